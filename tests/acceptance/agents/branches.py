"""An episode is one response, however many samples it becomes and wherever they are.

python branches.py [--short]

Random episodes of several turns are laid out in four ways: appended (one sample), branched (a sample per turn), as a
tree (turns that several samples contain), and with repeated branches. Each layout is trained on for two updates with
the real `PolicyTrainer`, on 1, 2 and 3 ranks and random micro-batches, for every estimator, loss and aggregation. The
model is a table with one parameter per generated token, so that a token has the same log-prob in every layout.

Losses, gradients, advantages and metrics of a layout must not depend on ranks and micro-batches; those of all layouts
must be equal, except for the formulas in `DIFFERS`. Validation and the statistics of a step count episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import _common
import numpy as np
import torch
from fake_train_engine import FakeSettings, FakeTrainEngine
from torch import Tensor

from verl.agents.transcript import Transcript
from verl.algorithms.advantages import ESTIMATORS
from verl.algorithms.aggregate import MODES, Totals, count_totals
from verl.algorithms.losses import LOSSES, PER_SEQUENCE
from verl.algorithms.objective import ModelOutput, ValueOutput, weigh_branches
from verl.algorithms.settings import (
    AlgorithmSettings,
    Correction,
    EstimatorOptions,
    KlController,
    LossOptions,
    Rejection,
)
from verl.config.batch_sizes import BatchSizes
from verl.data.flat_batch import FlatBatch
from verl.data.plan import Planner, RankPlan
from verl.rewards.result import FailureTracker
from verl.trainer.evaluator import Evaluator
from verl.training.policy.prime import PrimeRewardModel
from verl.training.policy.trainer import PolicyTrainer
from verl.types import Completion, Failed, Sample, SampleHandle
from verl.workers.episodes import make_handle

LIMIT = 1e-6
GROUPS, RESPONSES, PROMPT = 25, 8, 3  # 200 episodes
LAYOUTS = ("appended", "branched", "tree", "repeated")
RANKS = (1, 2, 3)

DIFFERS = {
    "gae": "the value of the next generated token is that of the same branch",
    "optimal_token_baseline": "tokens are compared by their index in the branch",
    "prime": "the process rewards of a token are those of its branch from there on",
    "clip_cov": "tokens are chosen at random, by a hash of their position in the branch",
    "ties": "without rewards all covariances are 0, and a hash of the position in the branch decides",
    "KL in the reward": "a return to go contains the KL of its branch from there on",
}
RETURNS_TO_GO = ("reinforce_plus_plus", "remax", "gae", "optimal_token_baseline")


class Ranks:
    """Ranks in threads, which wait for each other where ranks in processes would communicate."""

    def __init__(self, count: int) -> None:
        self.count, self._barrier, self._slots = count, threading.Barrier(count, timeout=60), [None] * count

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def guarded(rank: int) -> Any:
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as threads:
            futures = [threads.submit(guarded, rank) for rank in range(self.count)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [future.result() for future in futures]


class TokenTable(FakeTrainEngine):
    """A model with one parameter per token: its log-prob, or its value."""

    def __init__(self, tokens: int, ranks: Ranks, rank: int, seed: int, *, role: str = "actor") -> None:
        super().__init__(FakeSettings(2, head="value" if role == "critic" else "tokens", role=role))
        self._ranks, self.rank = ranks, rank
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.rand(tokens, generator=generator, dtype=torch.float64))
        self.gradients: list[Tensor] = []

    @property
    def data_rank(self) -> int:
        return self.rank

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat(self._ranks.gather(self.rank, rows))

    def forward(self, micro_batches: Sequence[FlatBatch], **options: Any) -> list[Any]:
        with torch.no_grad():
            return [self._run(batch) for batch in micro_batches]

    def update(self, micro_batches: Sequence[FlatBatch], loss: Any, **models: Any) -> dict[str, float]:
        parts = [count_totals(batch.mask, batch.offsets, weigh_branches(batch)) for batch in micro_batches]
        everywhere = [total for own in self._ranks.gather(self.rank, parts) for total in own]
        totals = Totals(sum(total.tokens for total in everywhere), sum(total.sequences for total in everywhere))
        gradient, metrics = torch.zeros_like(self.table), dict[str, float]()
        for batch in micro_batches:
            share, shares = loss(self._run(batch), batch, totals)
            gradient += torch.autograd.grad(share, self.table)[0]
            metrics |= {name: metrics.get(name, 0.0) + float(value) for name, value in shares.items()}
        results = self._ranks.gather(self.rank, (gradient, metrics))
        self.gradients.append(sum(own for own, _ in results))
        self.table.data -= 0.3 * self.gradients[-1]
        names, role = {name for _, own in results for name in own}, self.settings.role
        return {name: sum(own.get(name, 0.0) for _, own in results) for name in names} | {
            f"{role}/grad_norm": float(self.gradients[-1].norm()),
            f"{role}/lr": 0.3,
            f"{role}/skipped_steps": 0.0,
        }

    def _run(self, batch: FlatBatch, *others: Any) -> Any:
        values = torch.where(batch.mask, self.table[batch.tokens], 0.0)
        if self.settings.head == "value":
            return ValueOutput(values)
        logprobs = torch.where(batch.mask, -torch.nn.functional.softplus(-3.0 * values), 0.0)
        return ModelOutput(logprobs, values.square(), sum_pi_squared=logprobs.exp().square() + 0.1 * values)


@dataclass(frozen=True)
class Case:
    """One combination of formulas."""

    estimator: str
    loss: str
    mode: str
    correction: Correction
    reward_kl: bool
    loss_kl: bool
    mask_truncated: bool
    off_policy_mask: bool

    @property
    def reasons(self) -> list[str]:
        """Why layouts may differ."""
        reasons = [DIFFERS[name] for name in (self.estimator, self.loss) if name in DIFFERS]
        if self.loss == "kl_cov" and self.estimator == "no_rewards":
            reasons.append(DIFFERS["ties"])
        if self.reward_kl and self.estimator in RETURNS_TO_GO:
            reasons.append(DIFFERS["KL in the reward"])
        return reasons

    @property
    def algorithm(self) -> AlgorithmSettings:
        return AlgorithmSettings(
            estimator=self.estimator,
            estimator_options=EstimatorOptions(
                gamma=0.9 if self.estimator == "gigpo" else 1.0,  # others discount from token to token
                lam=0.9,
                component_weights={"score": 1.0, "format": 0.5},
            ),
            loss_mode=self.loss,
            loss_options=LossOptions(
                clip_cov_lb=-1.0,
                clip_cov_ratio=0.2,
                kl_cov_ratio=0.2,
                dpo_beta=0.3,
                off_policy_mask_threshold=-0.2 if self.off_policy_mask else None,
            ),
            agg_mode=self.mode,
            scale=50.0,
            entropy_coeff=0.01,
            reward_kl=KlController(0.1, adaptive=True) if self.reward_kl else None,
            loss_kl_coef=0.1 if self.loss_kl or self.loss == "dpo" else None,
            correction=self.correction,
            mask_truncated=self.mask_truncated,
        )


def list_cases(draw: random.Random, *, short: bool) -> list[Case]:
    """Every estimator with every loss and aggregation; in the short form every estimator, and every loss and mode."""
    estimators = [name for name in ESTIMATORS if not name.endswith("_vectorized") and not name.startswith("tir_")]
    formulas = [(loss, mode) for loss in LOSSES for mode in (MODES if loss not in PER_SEQUENCE else MODES[:1])]
    pairs = itertools.product(estimators, formulas)
    if short:
        length = max(len(estimators), len(formulas))
        pairs = itertools.islice(zip(itertools.cycle(estimators), itertools.cycle(formulas), strict=True), length)
    corrections = [
        Correction(),
        Correction("token", 1.2, normalize=True),
        Correction("sequence", 3.0, normalize=True, reject=(Rejection("token", 0.6, 1.6),)),
        Correction("token", 1.6, 0.6, reject=(Rejection("geometric", 0.9, 1.1),)),
        Correction(reject=(Rejection("token", 0.7, 1.4), Rejection("seq_max_k2", 0.0, 0.15))),
        Correction(reject=(Rejection("sequence", 0.4, 2.5), Rejection("seq_mean_k3", 0.0, 0.05))),
    ]
    has_differed = Case("gigpo", "geo_mean", MODES[0], corrections[3], False, False, True, True)
    return [has_differed] + [
        Case(
            estimator,
            loss,
            mode,
            corrections[index % 6],
            draw.random() < 0.3,
            draw.random() < 0.3,
            index % 3 == 0,
            draw.random() < 0.5 and loss not in ("dpo", "sppo"),
        )
        for index, (estimator, (loss, mode)) in enumerate(pairs)
    ]


@dataclass(frozen=True)
class Turns:
    """An episode before it is laid out: lengths and rewards of its turns."""

    group: int
    index: int
    lengths: list[int]
    rewards: list[float]
    states: list[int]
    score: float
    finish_reason: str
    format: float


def draw_episodes(draw: random.Random) -> list[Turns]:
    episodes = []
    for group, index in itertools.product(range(GROUPS), range(RESPONSES)):
        count = draw.randint(1, 4)
        lengths = [draw.randint(1, 5) for _ in range(count)]
        rewards = [draw.choice([0.0, 0.3, -0.2]) for _ in range(count)]
        score, reason = draw.choice([0.0, 1.0]), draw.choice(["stop", "stop", "length"])
        states = [0, *draw.choices([0, 1, 2, 2**52], k=count - 1)]
        episodes.append(Turns(group, index, lengths, rewards, states, score, reason, draw.random()))
    return episodes


def lay_out(episodes: Sequence[Turns], layout: str, draw: random.Random) -> tuple[list[Sample], int]:
    """Return the samples of the episodes, and the number of generated tokens, which are their ids."""
    samples, token = list[Sample](), PROMPT
    noise = np.random.default_rng(0)
    for episode in episodes:
        transcript, turns = Transcript(), []
        columns = zip(episode.lengths, episode.rewards, episode.states, strict=True)
        for turn, (length, reward, state) in enumerate(columns):
            ids, token = list(range(token, token + length)), token + length
            logprobs = -noise.random(length).astype(np.float32)
            completion = Completion(ids, logprobs, np.zeros(length, np.int32), "stop", engine=turn)
            if turn + 1 == len(episode.lengths):
                completion = replace(completion, finish_reason=episode.finish_reason)
            parents = {"appended": turns[-1:], "tree": [None, *turns]}.get(layout) or [None]
            parent = draw.choice(parents)
            turns.append(transcript.add([0] * draw.randint(1, 3), completion, parent))
            turns[-1].reward, turns[-1].state = reward, state
        score, metrics = episode.score + sum(episode.rewards), {"format": episode.format}
        own = transcript.to_samples(episode.group, episode.index, score, metrics)
        own = [replace(sample, baseline=0.4) for sample in own]
        samples += repeat_one(own, draw) if layout == "repeated" else own
    return samples, token


def repeat_one(samples: list[Sample], draw: random.Random) -> list[Sample]:
    """Return the branches of an episode with one of them twice, as if two branches had the same turns."""
    chosen = draw.randrange(len(samples))
    shares = [np.ones(len(each.tokens), np.float32) if each.shares is None else each.shares for each in samples]
    count = len(samples) + 1
    laid = [replace(each, branches=count, shares=share) for each, share in zip(samples, shares, strict=True)]
    half = replace(laid[chosen], shares=shares[chosen] / 2)
    return [*laid[:chosen], half, half, *laid[chosen + 1 :]]


def plan_randomly(samples: list[Sample], ranks: int, draw: random.Random) -> tuple[list[RankPlan], list[list[Sample]]]:
    """Spread samples over ranks and micro-batches at random, for two epochs over one mini-batch."""
    owners = [draw.randrange(ranks) for _ in samples]
    cuts = draw.randint(1, 4)
    plans, owned = [], []
    for rank in range(ranks):
        own = [sample for sample, owner in zip(samples, owners, strict=True) if owner == rank]
        order = draw.sample(range(len(own)), len(own))
        parts = [order[part::cuts] for part in range(cuts)]
        scores = np.array([sample.score for sample in own])
        has_branches = any(sample.branches > 1 for sample in samples)
        plans.append(
            RankPlan(
                rank=rank,
                refs=[],
                groups=np.array([sample.group for sample in own], np.int64),
                indices=np.array([sample.index for sample in own], np.int64),
                scores=scores,
                baselines=np.full(len(own), 0.4),
                forward=parts,
                reference=parts,
                policy=[parts, parts],
                critic=[parts, parts],
                components={"score": scores, "format": np.array([sample.metrics["format"] for sample in own])},
                branches=np.array([sample.branches for sample in own], np.float64) if has_branches else None,
            )
        )
        owned.append(own)
    return plans, owned


def train(case: Case, samples: list[Sample], tokens: int, ranks: int, draw: random.Random) -> dict[str, Any]:
    """Return metrics, the gradient of every update and the final tables."""
    plans, owned = plan_randomly(samples, ranks, draw)
    group, algorithm = Ranks(ranks), case.algorithm

    def work(rank: int) -> dict[str, Any]:
        def model(seed: int, role: str = "actor") -> TokenTable:
            return TokenTable(tokens, group, rank, seed, role=role)

        actor, critic = model(1), model(2, "critic") if case.estimator == "gae" else None
        prime = model(4, "process") if case.estimator == "prime" else None
        reference = model(3) if algorithm.reward_kl or algorithm.loss_kl_coef else None
        policy = PolicyTrainer(
            actor,
            algorithm,
            reference=reference,
            critic=critic,
            prime=None if prime is None else PrimeRewardModel(prime, model(5), beta=0.5),
        )
        metrics = policy.prepare(owned[rank], plans[rank])
        batch = policy._batch
        advantages = torch.zeros(tokens, dtype=torch.float64)
        shares = torch.ones(batch.num_tokens) if batch.shares is None else batch.shares
        advantages.index_add_(0, batch.tokens, (batch.advantages * shares * batch.mask).double())
        advantages = sum(group.gather(rank, advantages))
        metrics |= policy.update(plans[rank])
        trained = [engine for engine in (actor, critic, prime) if engine is not None]
        return {
            "metrics": metrics,
            "advantages": advantages,
            "gradients": torch.stack([gradient for engine in trained for gradient in engine.gradients]),
            "tables": torch.stack([engine.table.detach() for engine in trained]),
        }

    results = group.run(work)
    for other in results[1:]:
        assert find_difference(results[0], other) < LIMIT, "ranks disagree"
    return results[0]


def find_difference(ours: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference, relative to values above 1; infinite if there are different metrics."""
    if ours["metrics"].keys() != expected["metrics"].keys():
        print("metrics differ:", sorted(ours["metrics"].keys() ^ expected["metrics"].keys()))
        return float("inf")
    columns = [(ours["metrics"][name], value) for name, value in expected["metrics"].items()]
    worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in columns)
    for name in ("advantages", "gradients", "tables"):
        gap = (ours[name] - expected[name]).abs() / expected[name].abs().clamp(min=1.0)
        worst = max(worst, float(gap.max()))
    return worst


def describe(samples: list[Sample]) -> dict[str, float]:
    """Return what a step and a validation say about these episodes."""
    handles = [make_handle(sample, index) for index, sample in enumerate(samples)]
    planned = Planner(2, BatchSizes(5, 8, None)).plan(handles).metrics
    by_group = [[handle for handle in handles if handle.group == group] for group in range(GROUPS)]

    async def run_prompt(row: int) -> list[SampleHandle]:
        return [replace(handle, final_answer=str(handle.score)) for handle in by_group[row]]

    async def preview(source: str) -> str:
        return ""

    evaluator = Evaluator(run_prompt, ["a" if row % 2 else "b" for row in range(GROUPS)], preview=preview)
    validation = asyncio.run(evaluator.evaluate())
    failures = FailureTracker(1.0, GROUPS * RESPONSES)
    failed = [replace(each, failure=Failed("error", "") if each.index == 3 else None) for each in handles]
    failures.keep_scored(failed)
    counted = {name: value for name, value in planned.items() if name.startswith(("reward/", "response_length/"))}
    return counted | validation | failures.end_step() | {"timing_s/validation": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(0)
    episodes = draw_episodes(draw)
    layouts = {layout: lay_out(episodes, layout, random.Random(1)) for layout in LAYOUTS}
    tokens = layouts["appended"][1]
    described = {layout: describe(samples) for layout, (samples, _) in layouts.items()}
    expected = described["appended"]
    assert all(values.keys() == expected.keys() for values in described.values())
    statistics = max(abs(values[name] - expected[name]) for values in described.values() for name in expected)
    worst = {"over ranks and cuts": 0.0, "over layouts": 0.0}
    unequal: dict[str, int] = {}
    cases = list_cases(draw, short=options.short)
    for number, case in enumerate(cases):
        first: dict[str, Any] | None = None
        for layout in LAYOUTS:
            samples = layouts[layout][0]
            whole = train(case, samples, tokens, 1, random.Random(0))
            for ranks in (random.Random(number).choice(RANKS[1:]),) if options.short else RANKS:
                gap = find_difference(train(case, samples, tokens, ranks, random.Random(number)), whole)
                if gap >= LIMIT:
                    print(f"{case}: {layout} on {ranks} ranks differs by {gap:.3g}")
                worst["over ranks and cuts"] = max(worst["over ranks and cuts"], gap)
            first = first or whole
            gap = find_difference(whole, first)
            if case.reasons and gap >= LIMIT:
                for reason in case.reasons:
                    unequal[reason] = unequal.get(reason, 0) + 1
            else:
                if gap >= LIMIT:
                    print(f"{case}: {layout} differs by {gap:.3g} from appended")
                worst["over layouts"] = max(worst["over layouts"], gap)
    for reason, count in unequal.items():
        print(f"{count} layouts differ, as they should: {reason}")
    _common.finish(
        "branches",
        max(*worst.values(), statistics) < LIMIT,
        episodes=len(episodes),
        samples={layout: len(samples) for layout, (samples, _) in layouts.items()},
        combinations=len(cases),
        worst_over_ranks_and_cuts=worst["over ranks and cuts"],
        worst_over_layouts=worst["over layouts"],
        worst_statistic=statistics,
        statistics=len(expected),
        differ_for_a_reason=len(unequal),
        allowed=LIMIT,
    )


if __name__ == "__main__":
    main()
