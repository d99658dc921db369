"""Steps of a `PolicyTrainer` on tables instead of models: a few samples, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.fake_train_engine import FakeSettings, FakeTrainEngine, concat
from verl.algorithms.settings import (
    AlgorithmSettings,
    Correction,
    LossOptions,
    Rejection,
)
from verl.checkpoint.save import load, save
from verl.config.batch_sizes import BatchSizes
from verl.data.flat_batch import FlatBatch
from verl.data.plan import Planner, RankPlan
from verl.training.policy.trainer import PolicyTrainer
from verl.types import Sample, SampleHandle

VOCABULARY = 16


class Table(FakeTrainEngine):
    """A table that remembers the mini-batches it was updated on, each as one batch, and what it was before."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(FakeSettings(VOCABULARY, **settings))
        self.optimizer.param_groups[0]["eps"] = 1e-3  # else AdamW makes whole steps of gradients that are rounding
        self.seen: list[FlatBatch] = []
        self.before: list[Tensor] = []

    def update(self, micro_batches: Sequence[FlatBatch], loss: Any, **others: Any) -> dict[str, float]:
        self.seen.append(concat(micro_batches))
        self.before.append(self.table.detach().clone())
        return super().update(micro_batches, loss, **others)

    def lookup_logprobs(self, batch: FlatBatch, table: Tensor | None = None) -> Tensor:
        """Log-probs [T] of generated tokens, straight from the table."""
        table = self.table.detach() if table is None else table
        indices = batch.mask.nonzero().squeeze(-1)
        logprobs = table.log_softmax(-1)[batch.tokens[indices - 1], batch.tokens[indices]]
        return torch.zeros(batch.num_tokens).index_copy(0, indices, logprobs)


def critic(table: Tensor | None = None) -> Table:
    engine = Table(head="value", role="critic")
    if table is not None:
        engine.table.data.copy_(table)
    return engine


def sample(group: int, tokens: str, score: float, **fields: Any) -> Sample:
    """`tokens` as a word: the model wrote what is in capitals; a letter is its place in the alphabet."""
    ids = np.array([ord(letter.lower()) - ord("a") for letter in tokens], np.int32)
    mask = np.array([letter.isupper() for letter in tokens])
    return Sample(
        group, ids, mask, np.zeros(len(ids), np.float32), np.where(mask, 0, -1).astype(np.int32), score, **fields
    )


SAMPLES = [
    sample(0, "abCDeFg", 1.0),  # a tool spoke in between, and had the last word
    sample(0, "abDD", 0.0),
    sample(0, "abcd", 0.25),  # nothing generated
    sample(1, "kIJ", 0.0),
    sample(1, "kLMNO", 2.0),
    sample(1, "kL", 1.0),
]
CRITIC_SIZES = {"critic": BatchSizes(9, 9, None)}
REJECTING = Correction(reject=(Rejection("sequence", 0.5, 2.0),))
GENERATED = 3 + 2 + 0 + 2 + 4 + 1


@dataclass(frozen=True)
class Step:
    """Samples and what the planner says of them, in the order of the rank."""

    samples: list[Sample]
    plan: RankPlan

    def run(self, policy: PolicyTrainer) -> dict[str, float]:
        return policy.prepare(self.samples, self.plan) | policy.update(self.plan)


def step_of(samples: Sequence[Sample], *, prompts: int = 9, micro: int = 9, epochs: int = 1, **sizes: Any) -> Step:
    """One rank's step; `prompts` of a mini-batch, `micro` samples of a micro-batch."""
    numbers: dict[int, int] = {}
    handles = []
    for index, one in enumerate(samples):
        number = numbers[one.group] = numbers.get(one.group, -1) + 1
        length, generated = len(one.tokens), int(one.mask.sum())
        handles.append(
            SampleHandle(index, one.group, length, generated, one.score, 0, baseline=one.baseline, index=number)
        )
    planner = Planner(1, BatchSizes(prompts, micro, None, epochs), **sizes)
    plan = planner.plan(handles).ranks[0]
    return Step([samples[index] for index in plan.refs], plan)


def with_rollout_logprobs(
    samples: Sequence[Sample], engine: Table, gap: float | dict[int, float] = 0.0
) -> list[Sample]:
    """The same samples, drawn by an engine whose log-probs are those of the table less a gap, of all or by place."""
    gaps = gap if isinstance(gap, dict) else dict.fromkeys(range(len(samples)), gap)
    logprobs = [engine.lookup_logprobs(FlatBatch.from_samples([one])).numpy() for one in samples]
    return [
        replace(one, logprobs=np.where(one.mask, known - gaps.get(index, 0.0), 0).astype(np.float32))
        for index, (one, known) in enumerate(zip(samples, logprobs, strict=True))
    ]


def by_token(batch: FlatBatch, values: Tensor) -> dict[tuple[int, ...], list[float]]:
    """Values of the generated tokens of each sequence, under the tokens of that sequence: whatever the order."""
    results = {}
    for b in range(len(batch)):
        part = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
        results[tuple(batch.tokens[part].tolist())] = values[part][batch.mask[part]].tolist()
    return results


def resumed(fresh: PolicyTrainer, saved: PolicyTrainer, tmp_path: Any) -> PolicyTrainer:
    """A new policy that takes over what another one saved, by way of files."""
    for folder, state in saved.states().items():
        save(state, tmp_path / folder)
    fresh.load_states({folder: load(state, tmp_path / folder) for folder, state in fresh.states().items()})
    return fresh


def exact_kl(actor: Table, reference: Table, batch: FlatBatch) -> Tensor:
    """Of the state that each generated token was drawn from, by hand."""
    log_p, other_log_p = (engine.table.detach().log_softmax(-1) for engine in (actor, reference))
    indices = batch.mask.nonzero().squeeze(-1)
    rows = (log_p.exp() * (log_p - other_log_p)).sum(-1)
    return torch.zeros(batch.num_tokens).index_copy(0, indices, rows[batch.tokens[indices - 1]])


def algorithm_of(loss_mode: str, **changes: Any) -> AlgorithmSettings:
    options = LossOptions(clip_cov_lb=-9.0, clip_cov_ub=9.0, clip_cov_ratio=0.4, kl_cov_ratio=0.3)
    estimator = "win_rate" if loss_mode == "sppo" else "grpo"
    return replace(AlgorithmSettings(estimator, loss_mode=loss_mode, loss_options=options), **changes)
