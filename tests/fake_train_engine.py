"""A training engine without a network: a table with a row per token. Real gradients and a real optimiser, one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import Totals, count_totals
from verl.data.flat_batch import FlatBatch
from verl.training.engine import Loss, ModelOutput, ValueOutput
from verl.training.logprobs import LastLayer, token_logprobs, vocabulary_kl
from verl.training.schedule import Schedule
from verl.training.settings import Head

__all__ = ["FakeSettings", "FakeTrainEngine"]


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """The few settings that a table has; they mean what they mean to `FsdpEngine`."""

    vocab_size: int = 64
    head: Head = "tokens"
    role: str = "actor"
    trainable: bool = True
    lr: float = 1e-1
    grad_clip: float | None = None
    temperature: float = 1.0
    seed: int = 0


class FakeTrainEngine:
    """A `TrainEngine` that knows of a state its last token alone: a policy has a table of logits [V, V], a critic one
    of values [V]."""

    def __init__(self, settings: FakeSettings | None = None) -> None:
        self.settings = settings or FakeSettings()
        self.rank, self.world_size = 0, 1
        self.schedule = Schedule(self.settings.lr)
        self.step = 0
        size, critic = self.settings.vocab_size, self.settings.head == "value"
        generator = torch.Generator().manual_seed(self.settings.seed)
        self.table = torch.nn.Parameter(torch.zeros(size) if critic else torch.randn(size, size, generator=generator))
        self.optimizer = torch.optim.AdamW([self.table], lr=self.settings.lr, weight_decay=0.0)

    def forward(
        self, micro_batches: Sequence[FlatBatch], *, temperature: float | None = None, reference: Any = None
    ) -> list[Any]:
        """What the table says, without gradients."""
        with torch.no_grad():
            return [self._run(batch, temperature, reference) for batch in micro_batches]

    def update(self, micro_batches: Sequence[FlatBatch], loss: Loss[Any], *, reference: Any = None) -> dict[str, float]:
        """One optimiser step."""
        mine = [count_totals(batch.mask, batch.offsets) for batch in micro_batches]
        totals = Totals(sum(t.tokens for t in mine), sum(t.sequences for t in mine))
        metrics: dict[str, float] = {}
        self.optimizer.zero_grad(set_to_none=False)
        for batch in micro_batches:
            if len(batch):
                share, shares = loss(self._run(batch, reference=reference), batch, totals)
                share.backward()
                metrics |= {name: metrics.get(name, 0.0) + float(value) for name, value in shares.items()}
        norm = 0.0 if self.table.grad is None else float(self.table.grad.norm())
        lr = self.schedule.at(self.step)
        moves = totals.tokens > 0 and math.isfinite(norm)
        if moves:
            torch.nn.utils.clip_grad_norm_([self.table], self.settings.grad_clip or math.inf)
            self.optimizer.step()
            self.step += 1
        role, skipped = self.settings.role, 0.0 if moves else 1.0
        return metrics | {f"{role}/grad_norm": norm, f"{role}/lr": lr, f"{role}/skipped_steps": skipped}

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of the only rank."""
        return rows

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The table."""
        yield "table", self.table.detach().to(dtype)

    def copy_weights_from(self, other: Any) -> None:
        """Copy another table."""
        self.table.data.copy_(other.table.data)

    def state(self) -> dict[str, Any]:
        """Table, moments, step and random state."""
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
        """The inverse of `state`; what is not in it stays as it is."""
        if "model" in state:
            with torch.no_grad():
                self.table.copy_(state["model"]["table"])
        if "optimizer" in state:
            self.optimizer.state[self.table] = dict(state["optimizer"])
        if "schedule" in state:
            self.step = int(state["schedule"]["step"])
        if "rng" in state:
            torch.set_rng_state(state["rng"]["0"]["cpu"])

    def _run(
        self, batch: FlatBatch, temperature: float | None = None, reference: Any = None
    ) -> ModelOutput | ValueOutput:
        targets = batch.mask.nonzero().squeeze(-1)
        zeros = torch.zeros(batch.num_tokens)
        if self.settings.head == "value":
            return ValueOutput(zeros.index_copy(0, targets, self.table[batch.tokens[targets - 1]]))
        temperature = self.settings.temperature if temperature is None else temperature
        before = torch.eye(len(self.table))[batch.tokens[targets - 1]]
        layer = LastLayer(before, self.table.T)
        numbers = [*token_logprobs(layer, batch.tokens[targets], temperature=temperature)]
        if reference is not None:
            other = LastLayer(before, reference.table.detach().T)
            numbers.append(vocabulary_kl(layer, other, temperature=temperature))
        return ModelOutput(*(zeros.index_copy(0, targets, each) for each in numbers))
