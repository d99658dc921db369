"""The laws that an estimator or a loss must keep, ours and yours: run them in your own tests.

>>> from verl.algorithms.advantages import grpo
>>> check_estimator(grpo)

A law that is broken is an AssertionError that names it. The batches are random: several turns, groups of two to four
answers in any order, an answer without a generated token, ranks without an answer.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageInputs, Estimator
from verl.algorithms.aggregate import segment_ids
from verl.algorithms.losses import LossFunction, LossInputs, LossOptions, PolicyLoss

__all__ = ["check_estimator", "check_loss", "run_on_ranks"]

Part = TypeVar("Part")
Result = TypeVar("Result")
Record = TypeVar("Record", AdvantageInputs, LossInputs)
PER_SEQUENCE = ("scores", "groups", "baselines")


def check_estimator(estimator: Estimator) -> None:
    """Advantages (and returns) are [T], finite, 0 outside the mask, and the same in any order and on any ranks."""
    for seed in range(8):
        x = _episodes(seed)
        whole = _estimate(estimator, x)
        for name, values in whole.items():
            _law(values.shape == x.mask.shape, estimator, f"{name} are [T] like the mask, not {list(values.shape)}")
            _law(values.isfinite().all(), estimator, f"{name} are finite")
            _law(not values[~x.mask].any(), estimator, f"{name} are 0 outside the mask; see x.per_token")
        for ranks in (1, 2, 3):
            shares = _shares(len(x.scores), ranks, seed)
            parts = run_on_ranks(
                [_select(x, share) for share in shares],
                lambda part, rank, gather: _estimate(estimator, replace(part, rank=rank, gather=gather)),
            )
            places = torch.cat([_places(x.offsets, share) for share in shares])
            law = "do not depend on the order of the answers"
            if ranks > 1:
                law = f"are the same on {ranks} ranks as on one; see x.per_group and x.total"
            for name, values in whole.items():
                _law(_close(torch.cat([part[name] for part in parts]), values[places]), estimator, f"{name} {law}")


def check_loss(loss: LossFunction, options: LossOptions | None = None) -> None:
    """Losses are [T] and finite, and move the log-probs of generated tokens alone, each sequence by itself."""
    options = options or LossOptions()
    for seed in range(8):
        for reach in (0.1, 50.0):
            x = _tokens(seed, reach)
            whole, gradient = _loss_and_gradient(loss, x, options)
            _law(whole[x.mask].isfinite().all(), loss, f"the loss is finite, also at log-ratios of {reach:g}")
            _law(gradient.isfinite().all(), loss, f"the gradient is finite, also at log-ratios of {reach:g}")
            _law(not gradient[~x.mask].any(), loss, "tokens outside the mask have no say; see x.sequence_mean")
            _law(reach > 1 or gradient.any(), loss, "a gradient reaches logprobs")
            for share in _shares(len(x.offsets) - 1, 3, seed):
                part, places = _select(x, share), _places(x.offsets, share)
                own, own_gradient = _loss_and_gradient(loss, part, options)
                same = _close(own[part.mask], whole[places][part.mask]) and _close(own_gradient, gradient[places])
                _law(same, loss, "the loss of a token does not depend on the other sequences of its micro-batch")


def run_on_ranks(parts: Sequence[Part], run: Callable[[Part, int, Callable[[Tensor], Tensor]], Result]) -> list[Result]:
    """`run(part, rank, gather)` on every part, as if each were on a rank of its own.

    The ranks are threads that take turns: one runs until it gathers or ends, then the next.
    """
    world, turns, running = len(parts), [threading.Semaphore(0) for _ in parts], list(range(len(parts)))
    gathered: list[list[Tensor]] = []

    def pass_on(rank: int) -> None:
        if running:
            turns[min(running, key=lambda other: (other - rank - 1) % world)].release()

    def one(rank: int) -> Result:
        rounds = itertools.count()

        def gather(mine: Tensor) -> Tensor:
            if (k := next(rounds)) == len(gathered):
                gathered.append([])
            gathered[k].append(mine)
            pass_on(rank)
            turns[rank].acquire()
            if len(gathered[k]) < world:
                raise _LeftAloneError("broken law: all ranks gather equally often, also those without a sequence")
            return torch.cat(gathered[k])

        turns[rank].acquire()
        try:
            return run(parts[rank], rank, gather)
        finally:
            running.remove(rank)
            pass_on(rank)

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(one, rank) for rank in range(world)]
        turns[0].release()
    errors = [error for future in futures if (error := future.exception())]
    if errors:  # what went wrong on one rank, rather than what the others saw of it
        raise min(errors, key=lambda error: isinstance(error, _LeftAloneError))
    return [future.result() for future in futures]


class _LeftAloneError(AssertionError):
    """A rank gathers where others do not."""


def _select(x: Record, indices: Sequence[int]) -> Record:
    """The sequences at `indices`, in that order, laid end to end."""
    places, chosen = _places(x.offsets, indices), torch.tensor(indices, dtype=torch.int64)
    changes: dict[str, Any] = {"offsets": torch.cat([x.offsets[:1], x.offsets.diff()[chosen].cumsum(0)])}
    for name in (field.name for field in fields(x) if field.name != "offsets"):
        if isinstance(value := getattr(x, name), Tensor):
            changes[name] = value[chosen if name in PER_SEQUENCE else places]
    return replace(x, **changes)


def _places(offsets: Tensor, indices: Sequence[int]) -> Tensor:
    """Where the tokens of these sequences lie, one sequence after the other."""
    return torch.cat([torch.arange(0), *(torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in indices)])


def _shares(count: int, ranks: int, seed: int) -> list[list[int]]:
    """Every sequence on one of the ranks, in any order; of three ranks one has none."""
    draw = random.Random(seed)
    working = draw.sample(range(ranks), min(ranks, 2))
    owners = {i: draw.choice(working) for i in draw.sample(range(count), count)}
    return [[i for i, owner in owners.items() if owner == rank] for rank in range(ranks)]


def _layout(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(groups, mask, offsets) of three prompts; one answer has an empty mask."""
    draw = random.Random(seed)
    answers = [10**9 + prompt for prompt in range(3) for _ in range(draw.randint(2, 4))]
    draw.shuffle(answers)
    offsets = torch.tensor([0, *(draw.randint(2, 9) for _ in answers)]).cumsum(0)
    mask = torch.tensor([draw.random() < 0.6 for _ in range(int(offsets[-1]))])
    mask[offsets[1:] - 1] = True
    mask[offsets[1] : offsets[2]] = False
    return torch.tensor(answers), mask, offsets


def _episodes(seed: int) -> AdvantageInputs:
    groups, mask, offsets = _layout(seed)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (len(groups),), generator=generator).double()
    last = offsets[1:] - 1
    values, process = torch.randn(2, len(mask), generator=generator, dtype=torch.float64)
    return AdvantageInputs(
        scores=scores,
        groups=groups,
        mask=mask,
        offsets=offsets,
        rewards=torch.zeros_like(values).index_copy(0, last, scores) * mask,
        values=values,
        baselines=(groups % 7).double(),
        process=process * mask,
    )


def _tokens(seed: int, reach: float) -> LossInputs:
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
        chosen=mask & (draw[3] < 0.3),
    )


def _estimate(estimator: Estimator, x: AdvantageInputs) -> dict[str, Tensor]:
    found = estimator(x)
    tensors = found if isinstance(found, tuple) else (found,)
    both = len(tensors) in (1, 2) and all(isinstance(values, Tensor) for values in tensors)
    _law(both, estimator, "it returns advantages, or (advantages, returns), as tensors")
    return dict(zip(("advantages", "returns"), tensors, strict=False))


def _loss_and_gradient(loss: LossFunction, x: LossInputs, options: LossOptions) -> tuple[Tensor, Tensor]:
    logprobs = x.logprobs.clone().requires_grad_()
    found = loss(replace(x, logprobs=logprobs), options)
    values = found.loss if isinstance(found, PolicyLoss) else found
    _law(isinstance(values, Tensor), loss, "it returns a tensor or a PolicyLoss")
    _law(values.shape == x.mask.shape, loss, f"the loss is [T] like the mask, not {list(values.shape)}")
    if not values.requires_grad:
        return values, torch.zeros_like(logprobs)
    (gradient,) = torch.autograd.grad(values[x.mask].sum(), logprobs)
    return values.detach(), gradient


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def _law(kept: bool | Tensor, function: Callable[..., object], law: str) -> None:
    assert bool(kept), f"{getattr(function, '__qualname__', function)}: broken law: {law}"
