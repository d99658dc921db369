"""Invariants of estimators and losses, built-in or custom: check your own in your tests.

>>> from verl.algorithms.advantages import grpo
>>> check_estimator(grpo)

A violated invariant raises an AssertionError that names it. Batches are random: several turns, groups of two to four
responses in any order, a response without generated tokens, ranks without responses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageInputs, Estimator
from verl.algorithms.aggregate import segment_ids
from verl.algorithms.losses import LossFunction, LossInputs, LossOptions, PolicyLoss

Part = TypeVar("Part")
Result = TypeVar("Result")
Record = TypeVar("Record", AdvantageInputs, LossInputs)
PER_SEQUENCE = ("scores", "groups", "baselines")


def check_estimator(estimator: Estimator, components: Sequence[str] = ("correct", "format")) -> None:
    """Check that advantages and returns are [T], finite, 0 outside the mask, and independent of order and ranks.

    `components` are the names of the reward components that the responses have.
    """
    for seed in range(8):
        x = _advantage_inputs(seed, components)
        whole = _estimate(estimator, x)
        for name, values in whole.items():
            _check(values.shape == x.mask.shape, estimator, f"{name} are [T] like the mask, not {list(values.shape)}")
            _check(values.isfinite().all(), estimator, f"{name} are finite")
            _check(not values[~x.mask].any(), estimator, f"{name} are 0 outside the mask; see x.per_token")
        for ranks in (1, 2, 3):
            shares = _assign_ranks(len(x.scores), ranks, seed)
            parts = run_on_ranks(
                [_select_sequences(x, share) for share in shares],
                lambda part, rank, gather: _estimate(estimator, replace(part, rank=rank, gather=gather)),
            )
            indices = torch.cat([_token_indices(x.offsets, share) for share in shares])
            invariant = "do not depend on the order of the responses"
            if ranks > 1:
                invariant = f"are the same on {ranks} ranks as on one; see x.per_group and x.total"
            for name, values in whole.items():
                is_same = _is_close(torch.cat([part[name] for part in parts]), values[indices])
                _check(is_same, estimator, f"{name} {invariant}")


def check_loss(loss: LossFunction, options: LossOptions | None = None) -> None:
    """Check that losses are [T], finite, affect generated tokens only, and treat each sequence separately."""
    options = options or LossOptions()
    for seed in range(8):
        for reach in (0.1, 50.0):
            x = _loss_inputs(seed, reach)
            whole, gradient = _loss_and_gradient(loss, x, options)
            _check(whole[x.mask].isfinite().all(), loss, f"the loss is finite, also at log-ratios of {reach:g}")
            _check(gradient.isfinite().all(), loss, f"the gradient is finite, also at log-ratios of {reach:g}")
            _check(not gradient[~x.mask].any(), loss, "tokens outside the mask have no gradient; see x.sequence_mean")
            _check(reach > 1 or gradient.any(), loss, "a gradient reaches logprobs")
            for share in _assign_ranks(len(x.offsets) - 1, 3, seed):
                part, indices = _select_sequences(x, share), _token_indices(x.offsets, share)
                losses, slopes = _loss_and_gradient(loss, part, options)
                is_same = _is_close(losses[part.mask], whole[indices][part.mask])
                is_same = is_same and _is_close(slopes, gradient[indices])
                _check(is_same, loss, "the loss of a token does not depend on the other sequences of its micro-batch")


def run_on_ranks(parts: Sequence[Part], run: Callable[[Part, int, Callable[[Tensor], Tensor]], Result]) -> list[Result]:
    """Call `run(part, rank, gather)` on every part, as if each were on a separate rank.

    `run` must be pure: it is called again after every gather, with the results of all gathers before.
    """
    gathered: list[Tensor] = []
    while True:
        results, pending = [], []
        for rank, part in enumerate(parts):
            try:
                results.append(run(part, rank, _Replay(gathered)))
            except _Pending as gather:
                pending.append(gather.rows)
        if not pending:
            return results
        assert not results, "invariant violated: all ranks gather equally often, even without sequences"
        gathered.append(torch.cat(pending))


class _Replay:
    """A gather that returns known results first, then interrupts its rank."""

    def __init__(self, gathered: Sequence[Tensor]) -> None:
        self._known = iter(gathered)

    def __call__(self, rows: Tensor) -> Tensor:
        for result in self._known:
            return result
        raise _Pending(rows)


class _Pending(BaseException):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


def _select_sequences(x: Record, indices: Sequence[int]) -> Record:
    """Return the sequences at `indices`, in that order."""
    tokens, sequences = _token_indices(x.offsets, indices), torch.tensor(indices, dtype=torch.int64)
    changes: dict[str, Any] = {"offsets": torch.cat([x.offsets[:1], x.offsets.diff()[sequences].cumsum(0)])}
    for name in (field.name for field in fields(x) if field.name != "offsets"):
        if isinstance(value := getattr(x, name), Tensor):
            changes[name] = value[sequences if name in PER_SEQUENCE else tokens]
    if isinstance(x, AdvantageInputs):
        changes["components"] = {name: values[sequences] for name, values in x.components.items()}
    return replace(x, **changes)


def _token_indices(offsets: Tensor, indices: Sequence[int]) -> Tensor:
    """Return the token indices of these sequences, one sequence after another."""
    return torch.cat([torch.arange(0), *(torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in indices)])


def _assign_ranks(count: int, ranks: int, seed: int) -> list[list[int]]:
    """Assign every sequence to a rank, in any order; one of three ranks gets none."""
    draw = random.Random(seed)
    working = draw.sample(range(ranks), min(ranks, 2))
    owners = {i: draw.choice(working) for i in draw.sample(range(count), count)}
    return [[i for i, owner in owners.items() if owner == rank] for rank in range(ranks)]


def _layout(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (groups, mask, offsets) of three prompts; one response has an empty mask."""
    draw = random.Random(seed)
    groups = [10**9 + prompt for prompt in range(3) for _ in range(draw.randint(2, 4))]
    draw.shuffle(groups)
    offsets = torch.tensor([0, *(draw.randint(2, 9) for _ in groups)]).cumsum(0)
    mask = torch.tensor([draw.random() < 0.6 for _ in range(int(offsets[-1]))])
    mask[offsets[1:] - 1] = True
    mask[offsets[1] : offsets[2]] = False
    return torch.tensor(groups), mask, offsets


def _advantage_inputs(seed: int, components: Sequence[str]) -> AdvantageInputs:
    groups, mask, offsets = _layout(seed)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (len(groups),), generator=generator).double()
    last = offsets[1:] - 1
    values, process = torch.randn(2, len(mask), generator=generator, dtype=torch.float64)
    probabilities, rest = torch.rand(2, len(mask), generator=generator, dtype=torch.float64)
    return AdvantageInputs(
        scores=scores,
        groups=groups,
        mask=mask,
        offsets=offsets,
        rewards=torch.zeros_like(values).index_copy(0, last, scores) * mask,
        values=values,
        baselines=(groups % 7).double(),
        process=process * mask,
        logprobs=torch.where(mask, probabilities.log(), 0.0),
        sum_pi_squared=(probabilities.square() + rest * (1.0 - probabilities).square()) * mask,
        components={name: torch.rand(len(groups), generator=generator).double() for name in components},
    )


def _loss_inputs(seed: int, reach: float) -> LossInputs:
    _, mask, offsets = _layout(seed)
    draw = torch.rand(4, len(mask), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logprobs = -3.0 * draw[0]
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs + reach * (2.0 * draw[1] - 1.0),
        advantages=(4.0 * draw[2] - 2.0)[offsets[:-1]][segment_ids(offsets)],
        mask=mask,
        offsets=offsets,
        ref_logprobs=logprobs + reach * (2.0 * draw[3] - 1.0),
        selected=mask & (draw[3] < 0.3),
    )


def _estimate(estimator: Estimator, x: AdvantageInputs) -> dict[str, Tensor]:
    result = estimator(x)
    tensors = result if isinstance(result, tuple) else (result,)
    is_valid = len(tensors) in (1, 2) and all(isinstance(values, Tensor) for values in tensors)
    _check(is_valid, estimator, "it returns advantages, or (advantages, returns), as tensors")
    return dict(zip(("advantages", "returns"), tensors, strict=False))


def _loss_and_gradient(loss: LossFunction, x: LossInputs, options: LossOptions) -> tuple[Tensor, Tensor]:
    logprobs = x.logprobs.clone().requires_grad_()
    result = loss(replace(x, logprobs=logprobs), options)
    values = result.loss if isinstance(result, PolicyLoss) else result
    _check(isinstance(values, Tensor), loss, "it returns a tensor or a PolicyLoss")
    _check(values.shape == x.mask.shape, loss, f"the loss is [T] like the mask, not {list(values.shape)}")
    if not values.requires_grad:
        return values, torch.zeros_like(logprobs)
    (gradient,) = torch.autograd.grad(values[x.mask].sum(), logprobs)
    return values.detach(), gradient


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def _check(holds: bool | Tensor, function: Callable[..., object], invariant: str) -> None:
    assert bool(holds), f"{getattr(function, '__qualname__', function)}: invariant violated: {invariant}"
