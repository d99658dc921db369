"""Sequences that begin with the same prompt: its tokens are computed once, and all responses attend to them.

A micro-batch is laid out as sequences end to end, each with its prompt. Here the computed tokens are fewer: a shared
prompt, then the rest of each of its sequences. Results are equal up to rounding, and so are gradients: what every
response adds to the gradient of the prompt is summed by autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl.data.flat_batch import FlatBatch, copy_to


class Segment(NamedTuple):
    """Tokens start:stop of a batch that are computed, after those of the segment `prompt` if it is set."""

    start: int
    stop: int
    prompt: int | None = None

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The computed tokens of a batch: C of its T tokens, in segments laid end to end.

    >>> mask = torch.tensor([0, 0, 1, 0, 0, 1, 1]).bool()
    >>> batch = FlatBatch(torch.tensor([5, 6, 7, 5, 6, 8, 9]), torch.tensor([0, 3, 7]), mask)
    >>> batch.tokens[find_shared_prompts(batch).computed]
    tensor([5, 6, 7, 8, 9])
    """

    segments: tuple[Segment, ...]
    computed: Tensor  # [C] int64: index of each computed token in the batch
    rows: Tensor  # [T] int64: index of each token of the batch among the computed ones

    @property
    def counts(self) -> Tensor:
        """[C] int64: how many tokens of the batch each computed token stands for."""
        return torch.bincount(self.rows, minlength=len(self.computed))

    def to(self, device: torch.device | str) -> SharedPrompts:
        """Return the same on another device."""
        return replace(self, computed=copy_to(self.computed, device), rows=copy_to(self.rows, device))

    def attention_kwargs(self) -> dict[str, Any]:
        """Return keyword arguments for `attend_packed`, as `packing_kwargs` does for whole sequences.

        `prefixes` are the computed tokens (start, stop) that each of the `runs` attends to besides its own, and
        `key_rows` the computed tokens that the segments attend to, one segment after another.
        """
        starts = _cumulate([segment.length for segment in self.segments])
        spans = list(pairwise(starts))
        prefixes = [None if segment.prompt is None else spans[segment.prompt] for segment in self.segments]
        keys = [[span] if prefix is None else [prefix, span] for prefix, span in zip(prefixes, spans, strict=True)]
        key_lengths = [sum(stop - start for start, stop in parts) for parts in keys]
        lengths, device = [stop - start for start, stop in spans], self.computed.device
        runs = [(key, len(list(run))) for key, run in groupby(zip(prefixes, lengths, strict=True))]
        rows = np.concatenate([np.arange(start, stop) for parts in keys for start, stop in parts])
        return {
            "runs": tuple((count, length) for (_, length), count in runs),
            "prefixes": tuple(prefix for (prefix, _), _ in runs),
            "key_rows": copy_to(torch.from_numpy(rows), device),
            "cu_seq_lens_q": copy_to(torch.tensor(starts, dtype=torch.int32), device),
            "cu_seq_lens_k": copy_to(torch.tensor(_cumulate(key_lengths), dtype=torch.int32), device),
            "max_length_q": max(lengths),
            "max_length_k": max(key_lengths),
        }


def find_shared_prompts(batch: FlatBatch) -> SharedPrompts | None:
    """Return the computed tokens of a batch on the CPU; None if no two of its sequences share their prompt."""
    offsets = batch.offsets.tolist()
    groups = _group_by_prompt(batch, offsets)
    if len(groups) == len(batch):
        return None
    segments = tuple(_lay_segments(groups, offsets))
    starts = _cumulate([segment.length for segment in segments])
    rows = np.empty(batch.num_tokens, np.int64)
    for segment, start in zip(segments, starts, strict=False):
        rows[segment.start : segment.stop] = np.arange(start, start + segment.length)
        if segment.prompt is not None:
            length, first = segments[segment.prompt].length, starts[segment.prompt]
            rows[segment.start - length : segment.start] = np.arange(first, first + length)
    computed = np.concatenate([np.arange(segment.start, segment.stop) for segment in segments])
    return SharedPrompts(segments, torch.from_numpy(computed), torch.from_numpy(rows))


def _group_by_prompt(batch: FlatBatch, offsets: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return groups of sequences that begin alike: (length of the shared prompt, sequences).

    A prompt ends before the first token that the loss uses. If a correction has dropped the first tokens of a
    response, its sequence still joins those that begin with the true prompt. Every sequence keeps at least one token of
    its own. Replayed experts must be the same, too.
    """
    tokens, mask = batch.tokens.numpy(), batch.mask.numpy()
    experts = None if batch.routed_experts is None else batch.routed_experts.numpy()
    lengths = [_prompt_length(mask[start:stop]) for start, stop in pairwise(offsets)]

    def read(index: int, length: int) -> bytes:
        part = slice(offsets[index], offsets[index] + length)
        return tokens[part].tobytes() + (b"" if experts is None else experts[part].tobytes())

    groups: list[tuple[int, list[int]]] = []
    by_prompt: dict[bytes, list[int]] = {}
    known: list[int] = []  # lengths of prompts, longest first
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        members = next((by_prompt[key] for length in known if (key := read(index, length)) in by_prompt), None)
        if members is not None:
            members.append(index)
            continue
        groups.append((lengths[index], [index]))
        if lengths[index]:
            by_prompt[read(index, lengths[index])] = groups[-1][1]
            known = sorted({*known, lengths[index]}, reverse=True)
    return groups


def _prompt_length(mask: npt.NDArray[np.bool_]) -> int:
    """Return the number of tokens before the first generated one, and at most all but one."""
    return min(int(mask.argmax()) if mask.any() else len(mask), max(len(mask) - 1, 0))


def _lay_segments(groups: Sequence[tuple[int, list[int]]], offsets: Sequence[int]) -> Iterator[Segment]:
    """Yield each shared prompt and what follows it, then the other sequences in their order."""
    count = 0
    for length, members in sorted(groups, key=lambda group: (len(group[1]) == 1, group[1][0])):
        prompt = None
        if len(members) > 1:
            prompt, count = count, count + 1
            yield Segment(offsets[members[0]], offsets[members[0]] + length)
        for index in members:
            count += 1
            yield Segment(offsets[index] + (0 if prompt is None else length), offsets[index + 1], prompt)


def _cumulate(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]
