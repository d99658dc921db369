"""A training step on disk, to be run again elsewhere: the models before it, and its samples with their plan.

folder/
  actor/, critic/ ...   the state of each model before the step, as in a checkpoint
  batch/                samples and plan of all ranks, in the same format
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl.checkpoint.save import save
from verl.checkpoint.shards import ShardFiles, ShardIndex, read_index
from verl.data.plan import MicroBatches, RankPlan
from verl.training.policy.trainer import PolicyTrainer
from verl.types import Sample

BATCH = "batch"
_PLAN_ARRAYS = {"groups": np.int64, "indices": np.int64, "scores": np.float64, "baselines": np.float64}
_PLAN_ARRAYS |= {"branches": np.float64}


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The samples of a step and their plan, as one rank would have them.

    Args:
        samples: Those of rank 0 first.
        plan: The same updates, with the micro-batches of all ranks one after another.
        ranks: How many data ranks the step had.
        device: The type of device that it ran on.
    """

    samples: list[Sample]
    plan: RankPlan
    ranks: int
    device: str


def write_step(
    folder: Path, policy: PolicyTrainer, samples: Sequence[Sample], plan: RankPlan, device: str = "cpu"
) -> None:
    """Write a step before it is prepared; all ranks call it together, each with its own samples."""
    for name, state in policy.states().items():
        save(state, folder / name)
    content = {"plan": _describe_plan(plan), **pack_samples(samples)}
    save({"device": device, str(plan.rank): content}, folder / BATCH)


def read_batch(folder: Path) -> RecordedBatch:
    """Read the samples and the plan of a recorded step."""
    index = read_index(folder / BATCH)
    ranks = sorted({int(name.partition(".")[0]) for name in index.values if name[0].isdigit()})
    parts = [_read_rank(folder, index, rank) for rank in ranks]
    samples = [sample for own, _ in parts for sample in own]
    return RecordedBatch(samples, merge_plans([plan for _, plan in parts]), len(ranks), index.values["device"])


def merge_plans(plans: Sequence[RankPlan]) -> RankPlan:
    """Return one rank's plan of the same step: a loss does not depend on how samples are split."""
    starts = list(accumulate((len(plan) for plan in plans), initial=0))

    def merge(parts: Iterable[MicroBatches]) -> MicroBatches:
        shifted = [[k + start for k in part] for start, own in zip(starts, parts, strict=False) for part in own if part]
        return shifted or [[]]

    def concatenate(arrays: Sequence[npt.NDArray[Any] | None]) -> Any:
        return None if any(each is None for each in arrays) else np.concatenate(list(arrays))

    first, names = plans[0], _PLAN_ARRAYS
    return replace(
        first,
        refs=[],
        forward=merge(plan.forward for plan in plans),
        reference=merge(plan.reference for plan in plans),
        policy=[merge(parts) for parts in zip(*(plan.policy for plan in plans), strict=True)],
        critic=None
        if first.critic is None
        else [merge(parts) for parts in zip(*(plan.critic or [] for plan in plans), strict=True)],
        components={name: concatenate([plan.components[name] for plan in plans]) for name in first.components},
        **{name: concatenate([getattr(plan, name) for plan in plans]) for name in names},
    )


def _describe_plan(plan: RankPlan) -> dict[str, Any]:
    arrays = {name: getattr(plan, name) for name in _PLAN_ARRAYS}
    return {
        "forward": plan.forward,
        "reference": plan.reference,
        "policy": plan.policy,
        "critic": plan.critic,
        "components": [[name, values.tolist()] for name, values in plan.components.items()],  # names may have dots
        **{name: None if values is None else values.tolist() for name, values in arrays.items()},
    }


def _parse_plan(rank: int, values: Mapping[str, Any]) -> RankPlan:
    arrays = {
        name: None if values[name] is None else np.array(values[name], dtype) for name, dtype in _PLAN_ARRAYS.items()
    }
    components = {name: np.array(each, np.float64) for name, each in values["components"]}
    lists = {name: values[name] for name in ("forward", "reference", "policy", "critic")}
    return RankPlan(rank=rank, refs=[], components=components, **lists, **arrays)  # type: ignore[arg-type]


def pack_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return each field of samples: arrays end to end, with their lengths (-1: None); other values as a list."""
    arrays: dict[str, Any] = {}
    lengths: dict[str, list[int]] = {}
    values: dict[str, list[Any]] = {}
    for name in (each.name for each in fields(Sample)):
        column = [getattr(sample, name) for sample in samples]
        if present := [each for each in column if isinstance(each, np.ndarray)]:
            arrays[name] = torch.from_numpy(np.concatenate(present))
            lengths[name] = [-1 if each is None else len(each) for each in column]
        else:
            values[name] = [sorted(each) if isinstance(each, frozenset) else each for each in column]
    return {"count": len(samples), "arrays": arrays, "lengths": lengths, "values": values}


def _read_rank(folder: Path, index: ShardIndex, rank: int) -> tuple[list[Sample], RankPlan]:
    stored, prefix = index.values_below(f"{rank}."), f"{rank}.arrays."
    columns = {name.removeprefix("values."): each for name, each in stored.items() if name.startswith("values.")}
    with ShardFiles(folder / BATCH) as files:
        for full, entry in index.tensors.items():
            if full.startswith(prefix):
                name, whole = full.removeprefix(prefix), torch.empty(entry.shape, dtype=entry.dtype)
                files.fill(whole, (0,) * whole.ndim, full, entry)
                columns[name] = _split(whole.numpy(), stored[f"lengths.{name}"])
    samples = _build_samples(stored["count"], columns)
    plan = {name.removeprefix("plan."): each for name, each in stored.items() if name.startswith("plan.")}
    return samples, _parse_plan(rank, plan)


def unpack_samples(packed: Mapping[str, Any]) -> list[Sample]:
    """Return what `pack_samples` was given."""
    arrays = {name: _split(array.numpy(), packed["lengths"][name]) for name, array in packed["arrays"].items()}
    return _build_samples(packed["count"], {**packed["values"], **arrays})


def _build_samples(count: int, columns: Mapping[str, Sequence[Any]]) -> list[Sample]:
    return [Sample(**{name: _restore(name, column[k]) for name, column in columns.items()}) for k in range(count)]


def _split(values: npt.NDArray[Any], lengths: Sequence[int]) -> list[npt.NDArray[Any] | None]:
    ends = np.cumsum([max(0, length) for length in lengths])
    return [None if length < 0 else values[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _restore(name: str, value: Any) -> Any:
    """Return a value with the type that JSON does not have."""
    if name == "engines":
        return frozenset(value)
    if isinstance(value, list):
        return tuple(tuple(each) if isinstance(each, list) else each for each in value)
    return value
