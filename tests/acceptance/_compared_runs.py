"""Compares a run that was disturbed with one of the same settings that nobody disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _common import metrics_of  # isort: skip - puts tests/ on the path
import torch

from verl.checkpoint.shards import read_tensors

IGNORED = ("time", "timing_s/", "perf/", "faults/")


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps of a run but times, in the order in which they were written."""
    if not (folder / "metrics.jsonl").exists():
        return []
    lines = [line for line in metrics_of(folder) if "reward/mean" in line]
    return [{name: value for name, value in line.items() if not name.startswith(IGNORED)} for line in lines]


def compare_steps(folder: Path, expected: Path) -> list[str]:
    """Return what differs in the metrics: repeated or missing steps, and values."""
    mine, others = read_steps(folder), read_steps(expected)
    if [line["step"] for line in mine] != [line["step"] for line in others]:
        return [f"the steps: {[line['step'] for line in mine]}"]
    return [
        f"{name} of step {a['step']}"
        for a, b in zip(mine, others, strict=True)
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def compare_tensors(folder: Path, expected: Path, step: int) -> list[str]:
    """Return the tensors of the checkpoints of a step that are not the same bits."""
    mine, others = (dict(read_tensors(each / f"global_step_{step}" / "actor")) for each in (folder, expected))
    if mine.keys() != others.keys():
        return ["the names of tensors"]
    return [name for name in mine if not torch.equal(mine[name], others[name])]
