"""A training engine on a table with a row per token instead of a network: real gradients and optimizer, one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import Totals, count_totals
from verl.algorithms.objective import ModelOutput, ValueOutput, weigh_branches
from verl.data.flat_batch import FlatBatch
from verl.training.engine import KLTarget, Loss, TrainEngine
from verl.training.kernels.logprobs import LastLayer, token_logprobs, vocabulary_kl
from verl.training.layout import RankLayout
from verl.training.settings import Head, Schedule

__all__ = ["FakeSettings", "FakeTrainEngine", "concat"]


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """The settings that a table has, with the same meaning as for `FsdpEngine`."""

    vocab_size: int = 64
    head: Head = "tokens"
    role: str = "actor"
    trainable: bool = True
    lr: float = 1e-1
    grad_clip: float | None = None
    temperature: float = 1.0
    seed: int = 0


def concat(batches: Sequence[FlatBatch]) -> FlatBatch:
    """Return all sequences of all batches, in order; all have values in the same fields."""
    lengths = torch.cat([batch.lengths for batch in batches])
    known = [{field.name for field in fields(FlatBatch) if getattr(batch, field.name) is not None} for batch in batches]
    assert all(names == known[0] for names in known)
    names = known[0] - {"offsets", "for_teacher"}
    joined = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    return FlatBatch(offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), **joined)


class FakeTrainEngine(TrainEngine[Any]):
    """A `TrainEngine` that sees only the last token: a policy is a table of logits [V, V], a critic of values [V]."""

    def __init__(self, settings: FakeSettings | None = None) -> None:
        self.settings = settings or FakeSettings()
        self.rank, self.layout = 0, RankLayout.of_adjacent(1)
        self.schedule = Schedule(self.settings.lr)
        self.step = 0
        size, critic = self.settings.vocab_size, self.settings.head == "value"
        generator = torch.Generator().manual_seed(self.settings.seed)
        self.table = torch.nn.Parameter(torch.zeros(size) if critic else torch.randn(size, size, generator=generator))
        self.optimizer = torch.optim.AdamW([self.table], lr=self.settings.lr, weight_decay=0.0)

    def forward(
        self,
        micro_batches: Sequence[FlatBatch],
        *,
        temperature: float | None = None,
        reference: KLTarget | None = None,
        with_squares: bool = False,
    ) -> list[Any]:
        with torch.no_grad():
            outputs = [self._run(batch, temperature, reference) for batch in micro_batches]
            if not with_squares:
                return outputs
            return [
                output._replace(sum_pi_squared=self._squares(batch, temperature))
                for output, batch in zip(outputs, micro_batches, strict=True)
            ]

    def _squares(self, batch: FlatBatch, temperature: float | None) -> Tensor:
        targets = batch.mask.nonzero().squeeze(-1)
        layer = LastLayer(self._one_hot(batch), self.table.T)
        temperature = self.settings.temperature if temperature is None else temperature
        _, _, squares = token_logprobs(layer, batch.tokens[targets], temperature=temperature, with_squares=True)
        return torch.zeros(batch.num_tokens).index_copy(0, targets, squares)

    def update(
        self,
        micro_batches: Sequence[FlatBatch],
        loss: Loss[Any],
        *,
        reference: KLTarget | None = None,
        teacher: KLTarget | None = None,
    ) -> dict[str, float]:
        parts = [count_totals(batch.mask, batch.offsets, weigh_branches(batch)) for batch in micro_batches]
        totals = Totals(sum(t.tokens for t in parts), sum(t.sequences for t in parts))
        metrics: dict[str, float] = {}
        self.optimizer.zero_grad(set_to_none=False)
        for batch in micro_batches:
            if len(batch):
                share, shares = loss(self._run(batch, reference=reference, teacher=teacher), batch, totals)
                share.backward()
                metrics |= {name: metrics.get(name, 0.0) + float(value) for name, value in shares.items()}
        norm = 0.0 if self.table.grad is None else float(self.table.grad.norm())
        lr = self.schedule.at(self.step)
        should_step = totals.tokens > 0 and math.isfinite(norm)
        if should_step:
            self.optimizer.param_groups[0]["lr"] = lr
            torch.nn.utils.clip_grad_norm_([self.table], self.settings.grad_clip or math.inf)
            self.optimizer.step()
        role, skipped = self.settings.role, 0.0 if should_step else 1.0
        return metrics | {f"{role}/grad_norm": norm, f"{role}/lr": lr, f"{role}/skipped_steps": skipped}

    def advance_schedule(self) -> None:
        self.step += 1

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table.detach().to(dtype)

    def weight_shapes(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        yield "table", torch.empty_like(self.table, dtype=dtype, device="meta")

    def copy_weights_from(self, other: Any, ratio: float = 1.0) -> None:
        self.table.data.lerp_(other.table.data, ratio)

    def find_divergence(self) -> str:
        return "" if bool(self.table.isfinite().all()) else "weights are not finite: table"

    def state(self) -> dict[str, Any]:
        moments = self.optimizer.state.get(self.table) or {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(self.table),
            "exp_avg_sq": torch.zeros_like(self.table),
        }
        return {
            "model": {"table": self.table.detach()},
            "optimizer": dict(moments),
            "schedule": {"step": self.step},
            "rng": {"0": {"cpu": torch.get_rng_state()}},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if "model" in state:
            with torch.no_grad():
                self.table.copy_(state["model"]["table"])
        if "optimizer" in state:
            self.optimizer.state[self.table] = dict(state["optimizer"])
        if "schedule" in state:
            self.step = int(state["schedule"]["step"])
        if "rng" in state:
            torch.set_rng_state(state["rng"]["0"]["cpu"])

    def last_layer(self, batch: FlatBatch) -> LastLayer:
        return LastLayer(self._one_hot(batch), self.table.detach().T)

    def _one_hot(self, batch: FlatBatch) -> Tensor:
        """Return [n, V]: the tokens before the generated ones."""
        return torch.eye(len(self.table))[batch.tokens[batch.mask.nonzero().squeeze(-1) - 1]]

    def _run(
        self,
        batch: FlatBatch,
        temperature: float | None = None,
        reference: KLTarget | None = None,
        teacher: KLTarget | None = None,
    ) -> ModelOutput | ValueOutput:
        targets = batch.mask.nonzero().squeeze(-1)
        zeros = torch.zeros(batch.num_tokens)
        if self.settings.head == "value":
            return ValueOutput(zeros.index_copy(0, targets, self.table[batch.tokens[targets - 1]]))
        temperature = self.settings.temperature if temperature is None else temperature
        layer = LastLayer(self._one_hot(batch), self.table.T)
        columns: list[Any] = [*token_logprobs(layer, batch.tokens[targets], temperature=temperature)]
        for engine in (reference, teacher):
            other = None if engine is None else engine.last_layer(batch)
            columns.append(None if other is None else vocabulary_kl(layer, other, temperature=temperature))
        return ModelOutput(*(None if each is None else zeros.index_copy(0, targets, each) for each in columns))
