"""Who trains on what: the samples of one step, spread over ranks and cut into mini-batches and micro-batches.

The planner sees handles (numbers), never tokens, so its time and memory grow with the number of samples only. It
consumes what the buffer gives and produces a `Plan`; each train worker is sent its `RankPlan` and pulls the arrays
behind its references itself. Nothing here depends on the order in which samples arrived, but for ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.data.packing import balance, chunk, longer_than, pack, pack_into
from verl.types import SampleHandle

__all__ = ["Limit", "Plan", "Planner", "RaggedIndices", "RankPlan", "UpdateSizes", "Updates"]

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RaggedIndices:
    """Lists of local indices as two arrays: list k is `indices[ends[k-1]:ends[k]]`. Small to send, cheap to read.

    >>> [list(part) for part in Cuts.of([[2, 0], [], [1]])]
    [[2, 0], [], [1]]
    """

    indices: Ints
    ends: Ints

    @classmethod
    def of(cls, parts: Sequence[Sequence[int]]) -> RaggedIndices:
        flat = np.fromiter(chain.from_iterable(parts), np.int32)
        return cls(flat, np.cumsum([len(part) for part in parts], dtype=np.int32))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, k: int) -> Ints:
        if not 0 <= k < len(self.ends):
            raise IndexError(k)
        return self.indices[self.ends[k - 1] if k else 0 : self.ends[k]]

    def __iter__(self) -> Iterator[Ints]:
        return (self[k] for k in range(len(self)))


@dataclass(frozen=True, slots=True)
class Updates:
    """The optimiser steps of one model: iterating gives the micro-batches of each, in the order of the steps."""

    micro_batches: RaggedIndices  # of all mini-batches, one mini-batch after another
    schedule: Ints  # [updates, 2] first micro-batch of each update, and the one after its last

    def __len__(self) -> int:
        return len(self.schedule)

    def __iter__(self) -> Iterator[list[Ints]]:
        for start, stop in self.schedule.tolist():
            yield [self.micro_batches[k] for k in range(start, stop)]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank holds and does in one step. Indices are places in its own `refs`.

    All ranks have equally many `forward` micro-batches, equally many updates, and in each update equally many
    micro-batches (some may be empty), because every one of them is a collective operation.
    """

    rank: int
    refs: list[Any]  # [n] where each sample lies
    groups: npt.NDArray[np.int64]  # [n] the prompt that each sample answers
    numbers: npt.NDArray[np.int64]  # [n] which of the prompt's answers it is
    scores: npt.NDArray[np.float64]  # [n]
    baselines: npt.NDArray[np.float64] | None  # [n] score of the greedy answer, where one was asked for
    forward: RaggedIndices  # micro-batches of a pass without gradients over all samples
    policy: Updates
    critic: Updates | None = None

    def __len__(self) -> int:
        """The number of samples on this rank."""
        return len(self.groups)

    def without_refs(self) -> RankPlan:
        """The same plan for a rank that has pulled its samples already."""
        return replace(self, refs=[])


@dataclass(frozen=True, slots=True)
class Plan:
    """One step for all ranks. `warnings` says in words what the user should know of how the batch was cut."""

    ranks: list[RankPlan]
    metrics: dict[str, float]
    warnings: list[str]

    def rank(self, rank: int) -> RankPlan:
        return self.ranks[rank]


@dataclass(frozen=True, slots=True)
class Limit:
    """What a micro-batch may hold: a number of samples, or a number of tokens."""

    samples: int | None
    tokens: int | None

    def __post_init__(self) -> None:
        if (self.samples is None) == (self.tokens is None):
            raise ValueError(
                f"micro_batch_samples={self.samples} and micro_batch_tokens={self.tokens}: give exactly one of them"
            )
        if (self.samples or self.tokens or 0) < 1:
            raise ValueError(f"a micro-batch of {self.samples or self.tokens} must be at least 1")

    def spread(self, lengths: Sequence[int], ranks: int) -> list[list[int]]:
        """Shares of equal token counts. Under a limit of samples the counts are bounded too, to what costs no
        micro-batch more than equal counts would: else a rank of many short samples keeps the others waiting."""
        if self.samples is None:
            return balance(lengths, ranks)
        return balance(lengths, ranks, max_items=self.samples * _ceil(len(lengths), ranks * self.samples))

    def cut(self, lengths: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Micro-batches of every rank, equally many on each, heaviest first: those that run together weigh alike."""
        if self.tokens is not None:
            count = max(len(pack(own, self.tokens)) for own in lengths)
            return [pack_into(own, self.tokens, count) if count else [] for own in lengths]
        assert self.samples is not None
        cuts = [chunk(own, self.samples) for own in lengths]
        count = max(map(len, cuts))
        return [
            sorted(parts, key=lambda part, own=own: -sum(map(own.__getitem__, part)))  # type: ignore[misc]
            + [[] for _ in range(count - len(parts))]
            for own, parts in zip(lengths, cuts, strict=True)
        ]

    def capacity_used(self, samples: int, tokens: int, micro_batches: int) -> float:
        used, limit = (samples, self.samples) if self.samples is not None else (tokens, self.tokens)
        return used / (micro_batches * (limit or 1))


@dataclass(frozen=True, slots=True)
class UpdateSizes:
    """How a model is updated: prompts per optimiser step, over all ranks, and what a micro-batch may hold."""

    mini_batch_prompts: int
    micro_batch_samples: int | None
    micro_batch_tokens: int | None
    epochs: int = 1


class Planner:
    """Cuts the samples of a step. Sizes are plain numbers; mini-batches count prompts, over all ranks.

    A micro-batch is limited either in samples or in tokens; passes without gradients take the same limit unless they
    are given their own. With a `shuffle_seed` the prompts are dealt to mini-batches at random, and every epoch after
    the first takes the mini-batches in a new order. A mini-batch keeps its prompts in all epochs, so that its tokens
    stay balanced over the ranks that hold them. A critic is updated on the same samples, cut its own way.
    """

    def __init__(
        self,
        ranks: int,
        mini_batch_prompts: int,
        *,
        micro_batch_samples: int | None,
        micro_batch_tokens: int | None,
        forward_micro_batch_samples: int | None = None,
        forward_micro_batch_tokens: int | None = None,
        epochs: int = 1,
        shuffle_seed: int | None = None,
        critic: UpdateSizes | None = None,
    ) -> None:
        for name, value in {"ranks": ranks, "mini_batch_prompts": mini_batch_prompts, "epochs": epochs}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        self.ranks, self.mini_batch_prompts, self.epochs = ranks, mini_batch_prompts, epochs
        self.shuffle_seed = shuffle_seed
        self._update = Limit(micro_batch_samples, micro_batch_tokens)
        own = forward_micro_batch_samples is not None or forward_micro_batch_tokens is not None
        self._forward = Limit(forward_micro_batch_samples, forward_micro_batch_tokens) if own else self._update
        self._critic = critic

    def plan(self, handles: Sequence[SampleHandle]) -> Plan:
        """Decide for every sample its rank, its mini-batch and its micro-batches."""
        if not handles:
            raise ValueError("a step needs at least one sample to plan, got none")
        lengths = [handle.tokens for handle in handles]
        groups = np.fromiter((handle.group for handle in handles), np.int64, len(handles))
        scores = np.fromiter((handle.score for handle in handles), np.float64, len(handles))
        random = None
        if self.shuffle_seed is not None:
            random = np.random.default_rng([self.shuffle_seed, abs(int(groups.min()))])
        order = _order(groups, random)

        held: list[list[int]] = [[] for _ in range(self.ranks)]  # samples of each rank, in local order
        cuts: list[list[list[int]]] = [[] for _ in range(self.ranks)]  # micro-batches of each rank, in local indices
        loads = [0] * self.ranks
        counts: list[int] = []  # micro-batches of each mini-batch
        slowest = 0  # tokens of the heaviest rank, summed over mini-batches
        for members in order.mini_batches(self.mini_batch_prompts):
            shares = self._update.spread([lengths[i] for i in members], self.ranks)
            weights = [sum(lengths[members[k]] for k in share) for share in shares]
            slowest += max(weights)
            # The heaviest share goes to the rank that holds least so far: ranks end up even over the whole step too.
            heaviest_first = sorted(range(self.ranks), key=weights.__getitem__, reverse=True)
            takers = sorted(range(self.ranks), key=loads.__getitem__)
            bases = [len(own) for own in held]
            for share, rank in zip(heaviest_first, takers, strict=True):
                held[rank].extend(members[k] for k in shares[share])
                loads[rank] += weights[share]
            pieces = self._update.cut([[lengths[i] for i in own[base:]] for own, base in zip(held, bases, strict=True)])
            for own_cuts, base, own_pieces in zip(cuts, bases, pieces, strict=True):
                own_cuts.extend([base + k for k in piece] for piece in own_pieces)
            counts.append(len(pieces[0]))

        forward = self._forward.cut([[lengths[i] for i in own] for own in held])
        schedule = _schedule(counts, self.epochs, random)
        critic = self._plan_critic(order, held, lengths, random)
        plans = [
            RankPlan(
                rank=rank,
                refs=[handles[i].ref for i in held[rank]],
                groups=groups[held[rank]],
                numbers=np.array([handles[i].index for i in held[rank]], np.int64),
                scores=scores[held[rank]],
                baselines=_baselines([handles[i] for i in held[rank]]),
                forward=RaggedIndices.of(forward[rank]),
                policy=Updates(RaggedIndices.of(cuts[rank]), schedule),
                critic=critic[rank],
            )
            for rank in range(self.ranks)
        ]
        used = self._update.capacity_used(len(handles), sum(lengths), sum(counts) * self.ranks)
        metrics = {
            "plan/samples": float(len(handles)),
            "plan/tokens": float(sum(lengths)),
            "plan/rank_tokens_min": float(min(loads)),
            "plan/rank_tokens_max": float(max(loads)),
            "plan/imbalance": slowest * self.ranks / max(sum(lengths), 1),
            "plan/updates": float(len(schedule)),
            "plan/micro_batches": float(sum(counts)),
            "plan/packing_efficiency": used,
            **_describe(handles, groups, scores),
        }
        return Plan(plans, metrics, self._warnings(handles, lengths))

    def _plan_critic(
        self, order: _Order, held: list[list[int]], lengths: list[int], random: np.random.Generator | None
    ) -> list[Updates] | list[None]:
        """The critic's updates on what each rank holds."""
        if self._critic is None:
            return [None] * self.ranks
        limit = Limit(self._critic.micro_batch_samples, self._critic.micro_batch_tokens)
        place = {sample: (rank, k) for rank, own in enumerate(held) for k, sample in enumerate(own)}
        cuts: list[list[list[int]]] = [[] for _ in held]
        counts = []
        for members in order.mini_batches(self._critic.mini_batch_prompts):
            own: list[list[int]] = [[] for _ in held]
            for sample in members:
                rank, k = place[sample]
                own[rank].append(k)
            pieces = limit.cut([[lengths[held[rank][k]] for k in mine] for rank, mine in enumerate(own)])
            for rank, parts in enumerate(pieces):
                cuts[rank].extend([own[rank][k] for k in part] for part in parts)
            counts.append(len(pieces[0]))
        schedule = _schedule(counts, self._critic.epochs, random)
        return [Updates(RaggedIndices.of(parts), schedule) for parts in cuts]

    def _warnings(self, handles: Sequence[SampleHandle], lengths: Sequence[int]) -> list[str]:
        limits = [limit.tokens for limit in (self._update, self._forward) if limit.tokens is not None]
        if not limits or not (alone := longer_than(lengths, min(limits))):
            return []
        longest = handles[alone[0]]
        return [
            f"{len(alone)} of {len(handles)} samples exceed the budget of {min(limits):,} tokens a micro-batch "
            f"and run alone; the longest answers prompt {longest.group} with {longest.tokens:,} tokens. If memory runs "
            "out, shorten data.max_response_length; otherwise raise the budget above prompt + response length."
        ]


@dataclass(frozen=True, slots=True)
class _Order:
    """Samples in the order in which their prompts are trained on, and the place of each one's prompt in it."""

    samples: npt.NDArray[np.intp]
    places: npt.NDArray[np.intp]
    prompts: int

    def mini_batches(self, prompts: int) -> Iterator[list[int]]:
        """Samples of each mini-batch: `prompts` whole groups each, the last one fewer."""
        starts = np.arange(prompts, self.prompts, prompts)
        for members in np.split(self.samples, np.searchsorted(self.places, starts)):
            yield members.tolist()


def _order(groups: npt.NDArray[np.int64], random: np.random.Generator | None) -> _Order:
    """Groups go by their ids, not by arrival: else the first mini-batch would be made of the quick, short answers."""
    ids, group = np.unique(groups, return_inverse=True)
    place = np.arange(len(ids)) if random is None else random.permutation(len(ids))
    places = place[group]
    samples = np.argsort(places, kind="stable")
    return _Order(samples, places[samples], len(ids))


def _schedule(counts: Sequence[int], epochs: int, random: np.random.Generator | None) -> Ints:
    """[epochs * mini-batches, 2]: the micro-batches of each update, start and stop."""
    stops = np.cumsum(counts, dtype=np.int32)
    spans = np.stack([stops - np.asarray(counts, np.int32), stops], axis=1)
    later = [spans if random is None else random.permutation(spans) for _ in range(epochs - 1)]
    return np.concatenate([spans, *later])


def _baselines(handles: Sequence[SampleHandle]) -> npt.NDArray[np.float64] | None:
    found = [handle.baseline for handle in handles if handle.baseline is not None]
    return np.array(found, np.float64) if len(found) == len(handles) else None


def _describe(
    handles: Sequence[SampleHandle], groups: npt.NDArray[np.int64], scores: npt.NDArray[np.float64]
) -> dict[str, float]:
    """What the answers of this step are like. Groups of one sample do not count as groups without signal."""
    answers = np.fromiter((handle.generated for handle in handles), np.int64, len(handles))
    cut = sum(handle.finish_reason == "length" for handle in handles)
    order = np.argsort(groups, kind="stable")
    ids, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    spread = np.maximum.reduceat(scores[order], starts) - np.minimum.reduceat(scores[order], starts)
    several = sizes > 1
    with np.errstate(invalid="ignore"):  # an infinite score is shown, not complained of here
        reward = {
            "reward/mean": float(scores.mean()),
            "reward/std": float(scores.std()),
            "reward/min": float(scores.min()),
            "reward/max": float(scores.max()),
        }
    return {
        **reward,
        "reward/groups_without_signal": float((spread[several] == 0).mean()) if several.any() else 0.0,
        "plan/groups": float(len(ids)),
        "response_length/mean": float(answers.mean()),
        "response_length/min": float(answers.min()),
        "response_length/max": float(answers.max()),
        "response_length/clip_ratio": cut / len(handles),
        **_users_numbers(handles),
    }


def _users_numbers(handles: Sequence[SampleHandle]) -> dict[str, float]:
    """Whatever else the reward function returned, as means over the samples that have it."""
    found: dict[str, list[float]] = {}
    for handle in handles:
        for name, value in handle.metrics.items():
            found.setdefault(f"reward/extra/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
