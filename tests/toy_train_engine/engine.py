"""The toy engine: every rank has all weights, computes its own samples, and sums gradients with the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.toy_train_engine.settings import ToySettings
from verl.algorithms.aggregate import Totals, count_totals
from verl.algorithms.objective import ModelOutput, weigh_branches
from verl.data.flat_batch import FlatBatch
from verl.errors import DivergenceError
from verl.training.engine import KLTarget, Loss, TrainEngine, sum_metrics
from verl.training.random_state import get_random_state, set_random_state
from verl.types import LocalShard
from verl.weights.bucket import to_hf

_CPU = torch.device("cpu")


class ToyEngine(TrainEngine[ModelOutput]):
    """A policy. Checkpoints are distributed over the ranks: each saves some rows of every tensor."""

    def __init__(self, settings: ToySettings) -> None:
        self.settings, self.schedule, self.step = settings, settings.schedule, 0
        self.rank, self.layout = dist.get_rank(), settings.layout(dist.get_world_size())
        self.model = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=torch.float32).eval()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.schedule.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._skipped_steps = 0

    def forward(
        self,
        micro_batches: Sequence[FlatBatch],
        *,
        temperature: float | None = None,
        reference: KLTarget | None = None,
        with_squares: bool = False,
    ) -> list[ModelOutput]:
        assert (reference, with_squares) == (None, False), "capabilities that are not declared"
        with torch.no_grad():
            return [self._run(batch, temperature) for batch in micro_batches]

    def update(
        self,
        micro_batches: Sequence[FlatBatch],
        loss: Loss[ModelOutput],
        *,
        reference: KLTarget | None = None,
        teacher: KLTarget | None = None,
    ) -> dict[str, float]:
        assert (reference, teacher) == (None, None), "capabilities that are not declared"
        totals, shares = self._count_totals(micro_batches), dict[str, Tensor]()
        for batch in micro_batches:
            if batch.num_tokens:
                share, metrics = loss(self._run(batch), batch, totals)
                share.backward()
                shares |= {name: shares.get(name, 0.0) + value.detach() for name, value in metrics.items()}
        norm, has_stepped = self._step(has_tokens=totals.tokens > 0)
        role = self.settings.role
        return sum_metrics(shares) | {
            f"{role}/grad_norm": norm,
            f"{role}/lr": self.schedule.at(self.step),
            f"{role}/skipped_steps": 0.0 if has_stepped else 1.0,
        }

    def _run(self, batch: FlatBatch, temperature: float | None = None) -> ModelOutput:
        temperature = self.settings.temperature if temperature is None else temperature
        logprobs, entropies = [torch.zeros(0)], [torch.zeros(0)]
        for tokens in batch.tokens.split(batch.lengths.tolist()):
            logits = self.model(tokens[None], use_cache=False).logits[0, :-1] / temperature
            table, first = logits.log_softmax(-1), torch.zeros(1)
            logprobs += [first, table.gather(-1, tokens[1:, None]).squeeze(-1)]
            entropies += [first, -(table.exp() * table).sum(-1)]
        return ModelOutput(*(torch.where(batch.mask, torch.cat(parts), 0.0) for parts in (logprobs, entropies)))

    def _count_totals(self, micro_batches: Sequence[FlatBatch]) -> Totals:
        parts = [count_totals(batch.mask, batch.offsets, weigh_branches(batch)) for batch in micro_batches]
        counts = torch.tensor([sum(t.tokens for t in parts), sum(t.sequences for t in parts)], dtype=torch.float64)
        dist.all_reduce(counts)
        return Totals(tokens=float(counts[0]), sequences=float(counts[1]))

    def _step(self, *, has_tokens: bool) -> tuple[float, bool]:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        clip = self.settings.grad_clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        has_stepped = has_tokens and math.isfinite(norm)
        if has_stepped:
            self._optimizer.param_groups[0]["lr"] = self.schedule.at(self.step)
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._skipped_steps = 0 if math.isfinite(norm) else self._skipped_steps + 1
        if self._skipped_steps > self.settings.max_skipped_steps:
            raise DivergenceError(f"the gradient was not finite in {self._skipped_steps} updates in a row")
        return norm, has_stepped

    def advance_schedule(self) -> None:
        self.step += 1

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        named = ((name, each.detach().to(dtype)) for name, each in self.model.named_parameters())
        return to_hf(self.model, named)

    def weight_shapes(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight.to("meta")) for name, weight in self.weights(dtype))

    def copy_weights_from(self, other: TrainEngine[ModelOutput], ratio: float = 1.0) -> None:
        assert isinstance(other, ToyEngine)
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
                mine.lerp_(theirs, ratio)

    def find_divergence(self) -> str:
        names = [name for name, each in self.model.named_parameters() if not bool(each.isfinite().all())]
        return f"weights are not finite: {', '.join(names)}" if names else ""

    def state(self) -> dict[str, Any]:
        moments: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            state = self._optimizer.state.get(parameter) or {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            moments[name] = {key: self._cut(value) for key, value in state.items()}
        return {
            "model": {name: self._cut(each) for name, each in self.model.named_parameters()},
            "optimizer": moments,
            "schedule": {"step": self.step},
            "rng": {str(self.rank): get_random_state(_CPU)},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "model" in state:
                    parameter.copy_(_join(state["model"][name]))
                if "optimizer" in state:
                    moments = state["optimizer"][name]
                    self._optimizer.state[parameter] = {key: _join(value) for key, value in moments.items()}
        if "schedule" in state:
            self.step = int(state["schedule"]["step"])
        if random_state := state.get("rng", {}).get(str(self.rank)):
            set_random_state(random_state, _CPU)

    def _cut(self, tensor: Tensor) -> LocalShard | Tensor:
        """Return a copy of this rank's rows of a tensor; of a number, all of it."""
        if tensor.ndim == 0:
            return tensor.detach().clone()
        size = -(-len(tensor) // self.world_size)
        start = min(self.rank * size, len(tensor))
        rows = tensor.detach()[start : start + size].clone()
        return LocalShard(rows, (start, *(0,) * (tensor.ndim - 1)), tuple(tensor.shape), tensor.dtype)


def _join(shard: LocalShard | Tensor) -> Tensor:
    """Return the whole tensor from the rows of all ranks."""
    if isinstance(shard, Tensor):
        return shard.clone()
    whole = torch.zeros(shard.shape, dtype=shard.dtype)
    shard.copy_to(whole)
    dist.all_reduce(whole)
    return whole
