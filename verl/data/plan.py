"""Assigns the samples of one step to ranks, mini-batches and micro-batches.

The planner sees handles (numbers), never tokens: its time and memory grow with the number of samples only. It consumes
samples from the buffer and produces a `Plan`; each train worker receives its `RankPlan` and pulls its arrays itself.
Apart from ties, the result does not depend on the order in which samples arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.config.batch_sizes import BatchSizes
from verl.data.micro_batches import MicroBatchLimit, SampleSize, balance_samples, count_computed, split_samples
from verl.types import SampleHandle, one_per_episode

_REPETITIVE = 0.5  # a response of which a larger share repeats itself counts as repetitive
EPISODE_METRICS = ("episode/", "tools/")  # prefixes of metrics that do not come from a reward function

MicroBatches = list[list[int]]
"""The samples of each micro-batch, as indices of a rank's own samples."""


@dataclass(frozen=True)  # without slots, which are slow to pickle
class RankPlan:
    """The samples and the work of one rank in one step. Indices refer to its own `refs`.

    All ranks have the same number of `forward` and `reference` micro-batches, of updates, and of micro-batches in each
    update (some may be empty), because every one of them is a collective operation.
    """

    rank: int
    refs: list[Any]  # [n] reference to each sample
    groups: npt.NDArray[np.int64]  # [n] prompt of each sample
    indices: npt.NDArray[np.int64]  # [n] index of each sample's episode in its group
    scores: npt.NDArray[np.float64]  # [n]
    baselines: npt.NDArray[np.float64] | None  # [n] score of the greedy response, if requested
    forward: MicroBatches  # forward passes over all samples
    reference: MicroBatches  # the same, for the reference policy
    policy: list[MicroBatches]  # one per optimizer step, in order
    critic: list[MicroBatches] | None = None
    components: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)  # [n] each: parts of the reward
    branches: npt.NDArray[np.float64] | None = None  # [n] branches of its episode; None: one each, on all ranks

    def __len__(self) -> int:
        return len(self.groups)

    def without_refs(self) -> RankPlan:
        """Return the plan without references, for a rank that has its samples."""
        return replace(self, refs=[])


@dataclass(frozen=True, slots=True)
class Plan:
    """One step for all ranks. `warnings` are messages for the user about how the batch was split."""

    ranks: list[RankPlan]
    metrics: dict[str, float]
    warnings: list[str]


class Planner:
    """Splits the samples of a step.

    Forward passes use the policy's micro-batch size unless they are given their own, and those of the reference policy
    use the size of forward passes unless they are given their own. With a `shuffle_seed` prompts are
    assigned to mini-batches at random, and every epoch after the first visits the mini-batches in a new order. A
    mini-batch keeps its prompts in all epochs, so that its tokens stay balanced over ranks. A critic is updated on the
    same samples with its own sizes. `components` are the metrics of samples that the estimator sees. If engines
    `shared_prompts`, samples of a group run together where that is faster, and tokens are those computed.
    """

    def __init__(
        self,
        ranks: int,
        policy: BatchSizes,
        *,
        forward: MicroBatchLimit | None = None,
        reference: MicroBatchLimit | None = None,
        shuffle_seed: int | None = None,
        critic: BatchSizes | None = None,
        components: Sequence[str] = (),
        shared_prompts: bool = False,
    ) -> None:
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}, it must be at least 1")
        self.ranks, self.policy, self.critic = ranks, policy, critic
        self._update = _limit(policy)
        self._forward = forward or self._update
        self._reference = reference or self._forward
        self._shuffle_seed, self._components, self._shared_prompts = shuffle_seed, components, shared_prompts

    def plan(self, handles: Sequence[SampleHandle]) -> Plan:
        """Assign every sample to a rank, a mini-batch and micro-batches."""
        if not handles:
            raise ValueError("a step needs at least one sample to plan, got none")
        sizes = [_measure(handle, shares_prompt=self._shared_prompts) for handle in handles]
        groups = np.fromiter((handle.group for handle in handles), np.int64, len(handles))
        scores = np.fromiter((handle.score for handle in handles), np.float64, len(handles))
        random = None
        if self._shuffle_seed is not None:
            random = np.random.default_rng([self._shuffle_seed, abs(int(groups.min()))])
        _, prompts = np.unique(groups, return_inverse=True)
        if random is not None:
            prompts = random.permutation(prompts.max() + 1)[prompts]
        shares = self._assign(_split_mini_batches(prompts, self.policy.mini_batch), sizes)
        rank_sizes = [[sizes[i] for i in of_rank] for of_rank in shares.samples]
        forward = split_samples(self._forward, rank_sizes)
        reference = forward if self._reference == self._forward else split_samples(self._reference, rank_sizes)
        policy = _plan_updates(self.policy, shares.mini_batches, shares.samples, sizes, random)
        critic: Sequence[list[MicroBatches] | None] = [None] * self.ranks
        if self.critic is not None:
            mini_batches = _split_mini_batches(prompts, self.critic.mini_batch)
            critic = _plan_updates(self.critic, mini_batches, shares.samples, sizes, random)
        owned = [[handles[i] for i in of_rank] for of_rank in shares.samples]
        has_branches = any(handle.branches > 1 for handle in handles)
        plans = [
            RankPlan(
                rank=rank,
                refs=[handle.ref for handle in own],
                groups=groups[samples],
                indices=np.array([handle.index for handle in own], np.int64),
                scores=scores[samples],
                baselines=_collect_baselines(own),
                forward=forward[rank],
                reference=reference[rank],
                policy=policy[rank],
                critic=critic[rank],
                components=_collect_components(own, self._components),
                branches=np.array([each.branches for each in own], np.float64) if has_branches else None,
            )
            for rank, (samples, own) in enumerate(zip(shares.samples, owned, strict=True))
        ]
        updates = len(policy[0]) // self.policy.epochs
        micro_batches = sum(map(len, policy[0][:updates]))
        computed = sum(size.tokens for size in sizes)
        if self._shared_prompts:
            computed = sum(
                count_computed(of_rank[k] for k in part)
                for of_rank, own in zip(rank_sizes, policy, strict=True)
                for part in chain.from_iterable(own[:updates])
            )
        metrics = {
            "plan/samples": float(len(handles)),
            "plan/tokens": float(sum(handle.tokens for handle in handles)),
            "plan/rank_tokens_min": float(min(shares.loads)),
            "plan/rank_tokens_max": float(max(shares.loads)),
            "plan/imbalance": shares.slowest * self.ranks / max(sum(shares.loads), 1),
            "plan/updates": float(len(policy[0])),
            "plan/micro_batches": float(micro_batches),
            "plan/packing_efficiency": self._update.utilization(len(handles), computed, micro_batches * self.ranks),
            **_describe_samples(handles),
        }
        if self._shared_prompts:
            metrics["plan/computed_tokens"] = float(computed)
        return Plan(plans, metrics, self._list_warnings(handles, [size.tokens for size in sizes]))

    def _assign(self, mini_batches: Iterable[list[int]], sizes: list[SampleSize]) -> _Shares:
        """Assign the samples of each of the policy's mini-batches to ranks."""
        result = _Shares([[] for _ in range(self.ranks)], [0] * self.ranks)
        for members in mini_batches:
            shares = balance_samples(self._update, [sizes[i] for i in members], self.ranks)
            weights = [count_computed(sizes[members[k]] for k in share) for share in shares]
            result.slowest += max(weights)
            # The heaviest share goes to the rank with the fewest tokens so far: ranks are even over the whole step too.
            heaviest_first = sorted(range(self.ranks), key=weights.__getitem__, reverse=True)
            lightest_ranks = sorted(range(self.ranks), key=result.loads.__getitem__)
            for share, rank in zip(heaviest_first, lightest_ranks, strict=True):
                result.samples[rank].extend(members[k] for k in shares[share])
                result.loads[rank] += weights[share]
            result.mini_batches.append([members[k] for share in shares for k in share])
        return result

    def _list_warnings(self, handles: Sequence[SampleHandle], lengths: Sequence[int]) -> list[str]:
        limits = [limit.tokens for limit in (self._update, self._forward, self._reference) if limit.tokens is not None]
        alone = sum(length > min(limits) for length in lengths) if limits else 0
        if not alone:
            return []
        longest = max(range(len(handles)), key=lengths.__getitem__)
        return [
            f"{alone} of {len(handles)} samples exceed the budget of {min(limits):,} tokens per micro-batch and run "
            f"alone; the longest is a response to prompt {handles[longest].group} with {lengths[longest]:,} tokens. If "
            "memory runs out, reduce data.max_response_length; otherwise raise the budget above prompt + response "
            "length."
        ]


@dataclass(slots=True)
class _Shares:
    """The samples of each rank, while they are assigned."""

    samples: list[list[int]]  # by rank, in local order
    loads: list[int]  # tokens that each rank computes
    mini_batches: list[list[int]] = field(default_factory=list)  # the policy's, each in local order
    slowest: int = 0  # tokens of the heaviest rank, summed over mini-batches


def _measure(handle: SampleHandle, *, shares_prompt: bool) -> SampleSize:
    """Return the tokens of a sample in the model that reads most of them."""
    tokens = max(handle.tokens, handle.teacher_tokens)
    response = handle.tokens - handle.prompt_tokens
    return SampleSize(tokens, tokens - response if shares_prompt and handle.prompt_tokens else 0, handle.group)


def _split_mini_batches(prompts: npt.NDArray[np.intp], size: int) -> list[list[int]]:
    """Return the samples of each mini-batch: `size` whole groups each, fewer in the last one.

    Samples are ordered by prompt, not by arrival: otherwise the first mini-batch would hold the short responses.
    """
    samples = np.argsort(prompts, kind="stable")
    starts = np.searchsorted(prompts[samples], np.arange(size, prompts.max() + 1, size))
    return [members.tolist() for members in np.split(samples, starts)]


def _limit(sizes: BatchSizes) -> MicroBatchLimit:
    return MicroBatchLimit(sizes.micro_batch_samples, sizes.micro_batch_tokens)


def _plan_updates(
    sizes: BatchSizes,
    mini_batches: Iterable[list[int]],
    samples: list[list[int]],
    tokens: list[SampleSize],
    random: np.random.Generator | None,
) -> list[list[MicroBatches]]:
    """Return the micro-batches of every update of a model on the `samples` of each rank."""
    places = {sample: (rank, k) for rank, own in enumerate(samples) for k, sample in enumerate(own)}
    splits: list[list[MicroBatches]] = []  # by mini-batch, then by rank
    for members in mini_batches:
        local: list[list[int]] = [[] for _ in samples]
        for sample in members:
            rank, k = places[sample]
            local[rank].append(k)
        by_rank = [[tokens[samples[rank][k]] for k in own] for rank, own in enumerate(local)]
        parts = split_samples(_limit(sizes), by_rank)
        splits.append([[[own[k] for k in part] for part in of] for own, of in zip(local, parts, strict=True)])
    order = list(range(len(splits)))
    for _ in range(sizes.epochs - 1):
        order += range(len(splits)) if random is None else random.permutation(len(splits)).tolist()
    return [[splits[k][rank] for k in order] for rank in range(len(samples))]


def _collect_baselines(handles: Sequence[SampleHandle]) -> npt.NDArray[np.float64] | None:
    baselines = [handle.baseline for handle in handles if handle.baseline is not None]
    return np.array(baselines, np.float64) if len(baselines) == len(handles) else None


def _collect_components(handles: Sequence[SampleHandle], names: Sequence[str]) -> dict[str, npt.NDArray[np.float64]]:
    """Return the numbers that are named, of each sample; `score` is the score itself."""
    numbers = [{"score": handle.score, **handle.metrics} for handle in handles] if names else []
    return {name: np.array([each[name] for each in numbers], np.float64) for name in names}


def _describe_samples(samples: Sequence[SampleHandle]) -> dict[str, float]:
    """Return statistics of rewards and response lengths over episodes.

    Groups of one episode are not groups without signal.
    """
    handles = one_per_episode(samples)
    groups = np.fromiter((handle.group for handle in handles), np.int64, len(handles))
    scores = np.fromiter((handle.score for handle in handles), np.float64, len(handles))
    responses = np.fromiter((handle.generated for handle in handles), np.int64, len(handles))
    truncated = sum(handle.finish_reason == "length" for handle in handles)
    order = np.argsort(groups, kind="stable")
    ids, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    spread = np.maximum.reduceat(scores[order], starts) - np.minimum.reduceat(scores[order], starts)
    several = sizes > 1
    with np.errstate(invalid="ignore"):  # an infinite score is reported elsewhere
        return {
            "reward/mean": float(scores.mean()),
            "reward/std": float(scores.std()),
            "reward/min": float(scores.min()),
            "reward/max": float(scores.max()),
            "reward/groups_without_signal": float((spread[several] == 0).mean()) if several.any() else 0.0,
            "plan/groups": float(len(ids)),
            "plan/generated_tokens": float(responses.sum()),
            "response_length/mean": float(responses.mean()),
            "response_length/min": float(responses.min()),
            "response_length/max": float(responses.max()),
            "response_length/clip_ratio": truncated / len(handles),
            "response/empty_ratio": sum(map(_is_empty, handles)) / len(handles),
            "response/repetitive_ratio": sum(handle.repetition > _REPETITIVE for handle in handles) / len(handles),
            "perf/preemptions_per_response": sum(handle.preemptions for handle in handles) / len(handles),
            **_mean_extra_metrics(handles),
        }


def _is_empty(handle: SampleHandle) -> bool:
    """Return whether the model generated nothing but its end token."""
    return handle.generated <= 1 and handle.finish_reason == "stop"


def _mean_extra_metrics(handles: Sequence[SampleHandle]) -> dict[str, float]:
    """Return the means of numbers of episodes, and of others that the reward returned, over the samples with them."""
    values: dict[str, list[float]] = {}
    for handle in handles:
        for name, value in handle.metrics.items():
            key = name if name.startswith(EPISODE_METRICS) else f"reward/extra/{name}"
            values.setdefault(key, []).append(value)
    return {name: float(np.mean(each)) for name, each in values.items()}
