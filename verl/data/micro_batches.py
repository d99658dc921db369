"""Balances samples over ranks and splits them into micro-batches, also where samples of a group share their prompt.

If engines compute a prompt once for all samples of a group in a micro-batch, the samples of a group should run
together, and a token budget holds more of them. Groups stay in one piece as far as limits and balance allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl.data.packing import balance, chunk, pack, pack_into


class SampleSize(NamedTuple):
    """The tokens of a sample, of which `prompt` are computed once for all samples of its `group` that run together."""

    tokens: int
    prompt: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatchLimit:
    """The maximum size of a micro-batch, in samples or in tokens."""

    samples: int | None
    tokens: int | None

    def __post_init__(self) -> None:
        if (self.samples is None) == (self.tokens is None):
            raise ValueError(
                f"micro_batch_samples={self.samples} and micro_batch_tokens={self.tokens}: give exactly one of them"
            )
        if (self.samples or self.tokens or 0) < 1:
            raise ValueError(f"a micro-batch of {self.samples or self.tokens} must be at least 1")

    def balance(self, lengths: Sequence[int], ranks: int) -> list[list[int]]:
        """Return shares of equal token counts, one per rank.

        With a limit on samples the count of each share is bounded as well, so that no rank needs more micro-batches
        than equal counts would: otherwise a rank with many short samples keeps the others waiting.
        """
        if self.samples is None:
            return balance(lengths, ranks)
        micro_batches = -(-len(lengths) // (ranks * self.samples))
        return balance(lengths, ranks, max_items=self.samples * micro_batches)

    def split(self, lengths: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Return the micro-batches of every rank: the same number on each, heaviest first, so that those that run at
        the same time have similar sizes."""
        if self.tokens is not None:
            count = max(len(pack(of_rank, self.tokens)) for of_rank in lengths)
            return [pack_into(of_rank, self.tokens, count) if count else [] for of_rank in lengths]
        assert self.samples is not None
        chunks = [chunk(of_rank, self.samples) for of_rank in lengths]
        return _pad_heaviest_first(chunks, [[SampleSize(length) for length in of_rank] for of_rank in lengths])

    def utilization(self, samples: int, tokens: int, micro_batches: int) -> float:
        """Return the used share of the capacity of some micro-batches."""
        used, limit = (samples, self.samples) if self.samples is not None else (tokens, self.tokens)
        return used / (micro_batches * (limit or 1))


def count_computed(samples: Iterable[SampleSize]) -> int:
    """Return the tokens that are computed if these samples run together.

    >>> count_computed([SampleSize(64, prompt=46)] * 8)
    190
    """
    total = 0
    prompts: dict[int, int] = {}
    for tokens, prompt, group in samples:
        total += tokens - prompt
        if prompt > prompts.get(group, 0):
            prompts[group] = prompt
    return total + sum(prompts.values())


def balance_samples(limit: MicroBatchLimit, samples: Sequence[SampleSize], ranks: int) -> list[list[int]]:
    """Return shares of nearly equal numbers of computed tokens, one per rank.

    Whole groups share most, single samples balance best. Groups are tried whole, in halves, in quarters and so on, and
    the largest pieces that leave the slowest rank the fewest micro-batches and tokens are used.
    """
    shares = limit.balance([sample.tokens for sample in samples], ranks)
    if not any(sample.prompt for sample in samples):
        return shares
    candidates, size = [shares], 2
    groups = _group(samples)
    while size < 2 * max(map(len, groups)):
        pieces = [group[k : k + size] for group in groups for k in range(0, len(group), size)]
        weights = [count_computed(samples[i] for i in piece) for piece in pieces]
        most = None if limit.samples is None else -(-len(pieces) // ranks)
        shares = balance(weights, ranks, max_items=most)
        candidates.append([[i for k in share for i in pieces[k]] for share in shares])
        size *= 2

    def slowest(shares: list[list[int]]) -> tuple[int, int]:
        micro_batches = 0 if limit.samples is None else max(-(-len(share) // limit.samples) for share in shares)
        return micro_batches, max(count_computed(samples[i] for i in share) for share in shares)

    return min(reversed(candidates), key=slowest)


def split_samples(limit: MicroBatchLimit, samples: Sequence[Sequence[SampleSize]]) -> list[list[list[int]]]:
    """Return the micro-batches of every rank, as `MicroBatchLimit.split` does, with groups in as few as possible."""
    if not any(sample.prompt for of_rank in samples for sample in of_rank):
        return limit.split([[sample.tokens for sample in of_rank] for of_rank in samples])
    pieces = [_cut_groups(of_rank, limit.tokens) for of_rank in samples]
    weights = [
        [count_computed(of_rank[i] for i in piece) for piece in own]
        for of_rank, own in zip(samples, pieces, strict=True)
    ]
    if limit.tokens is not None:
        parts = limit.split(weights)
        return [[[i for k in part for i in own[k]] for part in of] for own, of in zip(pieces, parts, strict=True)]
    assert limit.samples is not None
    chunks = []
    for own, weighed in zip(pieces, weights, strict=True):
        order = [i for k in sorted(range(len(own)), key=weighed.__getitem__) for i in own[k]]
        chunks.append([order[start : start + limit.samples] for start in range(0, len(order), limit.samples)])
    return _pad_heaviest_first(chunks, samples)


def _group(samples: Sequence[SampleSize]) -> list[list[int]]:
    """Return the samples of each group, shortest first."""
    groups: dict[int, list[int]] = {}
    for index in sorted(range(len(samples)), key=lambda index: samples[index].tokens):
        groups.setdefault(samples[index].group, []).append(index)
    return list(groups.values())


def _cut_groups(samples: Sequence[SampleSize], budget: int | None) -> list[list[int]]:
    """Return the groups, cut where they would compute more than `budget` tokens."""
    pieces = []
    for group in _group(samples):
        piece: list[int] = []
        for index in group:
            if piece and budget is not None and count_computed(samples[i] for i in (*piece, index)) > budget:
                pieces.append(piece)
                piece = []
            piece.append(index)
        pieces.append(piece)
    return pieces


def _pad_heaviest_first(
    parts: Sequence[list[list[int]]], samples: Sequence[Sequence[SampleSize]]
) -> list[list[list[int]]]:
    """Return the micro-batches of every rank, heaviest first, with empty ones where a rank has fewer than others."""
    count = max(map(len, parts))
    return [
        sorted(own, key=lambda part, of_rank=of_rank: -count_computed(of_rank[i] for i in part))  # type: ignore[misc]
        + [[] for _ in range(count - len(own))]
        for of_rank, own in zip(samples, parts, strict=True)
    ]
