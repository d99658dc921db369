"""Samples on a train worker: sequences laid end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.types import Sample


@dataclass(slots=True)
class FlatBatch:
    """B sequences laid end to end, T tokens in all. A field is None until it is computed.

    Every field except `offsets` and `for_teacher` has one value or row per token; `select`, `split` and `to` carry all
    of them. An empty batch made by `select([])` keeps its fields, as empty tensors.

    >>> batch = FlatBatch(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 2, 5]), torch.tensor([0, 1, 0, 1, 1]).bool())
    >>> batch.select([1, 0]).tokens
    tensor([7, 8, 9, 5, 6])
    """

    tokens: Tensor  # [T] int64
    offsets: Tensor  # [B+1] int64: sequence b is tokens[offsets[b]:offsets[b+1]]
    mask: Tensor  # [T] bool: the model generated this token
    rollout_logprobs: Tensor | None = None  # [T] float32, as the rollout engine reported them
    old_logprobs: Tensor | None = None  # [T] float32, under the policy before the update
    ref_logprobs: Tensor | None = None  # [T] float32, under the reference policy
    advantages: Tensor | None = None  # [T] float32
    values: Tensor | None = None  # [T] float32, under the critic before the update
    returns: Tensor | None = None  # [T] float32, targets of the critic
    weights: Tensor | None = None  # [T] float32, importance weights of rollout correction
    selected: Tensor | None = None  # [T] bool: tokens that the prepass of a loss has selected
    routed_experts: Tensor | None = None  # [T, layers, k] int16: experts of an MoE; -1 if unknown
    kept_ids: Tensor | None = None  # [T, K] int32: tokens that sampling kept, some repeated; -1 if not generated
    teacher_logprobs: Tensor | None = None  # [T] float32, under the teacher
    turn_rewards: Tensor | None = None  # [T] float32: the reward of a turn, on its last token
    shares: Tensor | None = None  # [T] float32: 1 / branches of the episode that contain the token; None: one each
    episode_tokens: Tensor | None = None  # [T] float32: generated tokens of the whole episode, with `shares`
    episode_log_ratio: Tensor | None = None  # [T] float32: mean log-ratio of the episode, which a prepass has set
    episode_lag: Tensor | None = None  # [T] float32: mean lp_roll - lp of the episode, which a prepass has set
    for_teacher: FlatBatch | None = None  # the same B responses after the teacher's own prompts

    def __len__(self) -> int:
        """Return the number of sequences, B."""
        return self.offsets.numel() - 1

    @property
    def num_tokens(self) -> int:
        """The total number of tokens, T."""
        return self.tokens.numel()

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens of each sequence."""
        return self.offsets.diff()

    @property
    def segment_ids(self) -> Tensor:
        """[T] int64: the sequence of each token."""
        return torch.repeat_interleave(self.lengths, output_size=self.num_tokens)

    @property
    def positions(self) -> Tensor:
        """[T] int64: the position of each token in its sequence."""
        starts = torch.repeat_interleave(self.offsets[:-1], self.lengths, output_size=self.num_tokens)
        return torch.arange(self.num_tokens, device=starts.device) - starts

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], *, has_branches: bool | None = None) -> FlatBatch:
        """Concatenate the arrays of finished episodes, in the given order.

        With `has_branches`, tokens have `shares` though no episode among these samples has several branches.
        """
        if has_branches is None:
            has_branches = any(sample.branches > 1 for sample in samples)
        lengths = np.fromiter((len(sample.tokens) for sample in samples), np.int64, len(samples))

        def lay(arrays: Iterable[Any], dtype: type) -> Tensor:
            return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="unsafe"))

        return cls(
            tokens=lay((sample.tokens for sample in samples), np.int64),
            offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)], dtype=np.int64)),
            mask=lay((sample.mask for sample in samples), np.bool_),
            rollout_logprobs=lay((sample.logprobs for sample in samples), np.float32),
            routed_experts=_lay_experts(samples),
            kept_ids=_lay_kept_ids(samples),
            turn_rewards=_lay_turn_rewards(samples),
            **(_lay_branches(samples) if has_branches else {}),
            for_teacher=None
            if not samples or samples[0].teacher_prompt is None
            else cls.from_samples([_replace_prompt(sample) for sample in samples]),
        )

    @classmethod
    def empty(cls) -> FlatBatch:
        """Return a batch without sequences, for a rank without samples."""
        return cls.from_samples([])

    def select(self, indices: Sequence[int] | np.ndarray | Tensor) -> FlatBatch:
        """Return the sequences at `indices`, in that order."""
        selected = torch.as_tensor(indices, dtype=torch.int64, device=self.offsets.device)
        lengths = self.lengths[selected]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = torch.repeat_interleave(self.offsets[:-1][selected] - offsets[:-1], lengths)
        take = torch.arange(shift.numel(), device=shift.device) + shift
        return type(self)(
            offsets=offsets,
            for_teacher=None if self.for_teacher is None else self.for_teacher.select(selected),
            **{name: value[take] for name, value in self._per_token().items()},
        )

    def split(self, parts: Iterable[Sequence[int] | np.ndarray]) -> list[FlatBatch]:
        return [self.select(part) for part in parts]

    def with_(self, **changes: Tensor | None) -> FlatBatch:
        """Return a copy with some fields replaced. A per-token field must have T elements."""
        for name, value in changes.items():
            if name != "offsets" and value is not None and value.shape[0] != self.num_tokens:
                raise ValueError(f"{name} has {value.shape[0]} elements, the batch has {self.num_tokens} tokens")
        return replace(self, **changes)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> FlatBatch:
        """Return the batch on another device, for which the host does not wait; see `copy_to`."""
        moved = {name: copy_to(value, device) for name, value in self._per_token().items()}
        return type(self)(
            offsets=copy_to(self.offsets, device),
            for_teacher=None if self.for_teacher is None else self.for_teacher.to(device),
            **moved,
        )

    def _per_token(self) -> dict[str, Tensor]:
        names = [field.name for field in fields(self) if field.name not in ("offsets", "for_teacher")]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def copy_to(values: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device. A GPU copies from pinned memory, else the host would wait for all work before it."""
    if torch.device(device).type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _replace_prompt(sample: Sample) -> Sample:
    """Return the response of a sample after the teacher's own prompt."""
    assert sample.teacher_prompt is not None
    mask = np.repeat([False, True], [len(sample.teacher_prompt), int(sample.mask.sum())])
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = sample.logprobs[sample.mask]
    tokens = np.concatenate([sample.teacher_prompt, sample.tokens[sample.mask]])
    return Sample(sample.group, tokens, mask, logprobs, np.full(len(mask), -1, np.int32), sample.score)


def _lay_turn_rewards(samples: Sequence[Sample]) -> Tensor | None:
    """Put the rewards of turns on the last token of each; None if there are none."""
    if not any(sample.turn_rewards for sample in samples):
        return None
    rewards, start = np.zeros(sum(len(sample.tokens) for sample in samples), np.float32), 0
    for sample in samples:
        for position, reward in sample.turn_rewards:
            rewards[start + position] += reward
        start += len(sample.tokens)
    return torch.from_numpy(rewards)


def _lay_branches(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Return the shares of tokens in their episodes, and the generated tokens of these."""
    shares = [np.ones(len(sample.tokens)) if sample.shares is None else sample.shares for sample in samples]
    tokens = [
        np.full(len(sample.tokens), max(1.0, sample.episode_tokens or float(sample.mask.sum()))) for sample in samples
    ]
    return {
        name: torch.from_numpy(np.concatenate([np.empty(0), *parts]).astype(np.float32))
        for name, parts in (("shares", shares), ("episode_tokens", tokens))
    }


def _lay_experts(samples: Sequence[Sample]) -> Tensor | None:
    """Concatenate the experts of the samples; None if no sample has any."""
    known = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if not known:
        return None
    experts = np.full((sum(len(sample.tokens) for sample in samples), *known[0].shape[1:]), -1, np.int16)
    start = 0
    for sample in samples:
        if sample.routed_experts is not None:
            experts[start : start + len(sample.routed_experts)] = sample.routed_experts
        start += len(sample.tokens)
    return torch.from_numpy(experts)


def _lay_kept_ids(samples: Sequence[Sample]) -> Tensor | None:
    """Put the ids that sampling kept at the generated tokens; None if no sample has any."""
    known = [sample.kept_ids for sample in samples if sample.kept_ids is not None]
    if not known:
        return None
    mask = np.concatenate([sample.mask for sample in samples])
    kept = np.full((len(mask), known[0].shape[1]), -1, np.int32)
    kept[mask] = np.concatenate(known)
    return torch.from_numpy(kept)
