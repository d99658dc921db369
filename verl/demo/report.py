"""The demo's report: accuracy before and after training, the reward curve, and some responses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from verl.demo.folder import RESPONSE_LENGTH, Assets

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Example:
    """One held-out problem with the responses before and after training."""

    prompt: str
    answer: str
    before: str
    after: str

    @property
    def change(self) -> tuple[bool, bool]:
        """Whether the response before and the one after are correct."""
        return self.before == self.answer, self.after == self.answer


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step from a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def render_curve(values: Sequence[float], width: int = 60) -> str:
    """Return the values as a line of bars from 0 to 1; more than `width` values are averaged.

    >>> render_curve([0.0, 0.5, 1.0])
    '▁▅█'
    """
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(mean * len(_BARS))))] for mean in means)


def render_report(
    records: Sequence[Mapping[str, Any]], examples: Sequence[Example] = (), *, metric: str = "val/addition/mean@1"
) -> str:
    """Return the report. Before and after are the first and the last validation in `records`."""
    validations = [(int(record["step"]), float(record[metric])) for record in records if metric in record]
    rewards = [float(record["reward/mean"]) for record in records if "reward/mean" in record]
    lines: list[str] = []
    if validations:
        (first, before), (last, after) = validations[0], validations[-1]
        lines += [
            "accuracy on held-out problems (greedy)",
            f"  before  (step {first:>3})   {_percent(before)}  {render_curve([before])}",
            f"  after   (step {last:>3})   {_percent(after)}  {render_curve([after])}",
            f"  change               {100 * (after - before):+5.1f} points",
            "",
        ]
    if rewards:
        lines += [
            f"mean reward over {len(rewards)} steps, from {rewards[0]:.2f} to {rewards[-1]:.2f}",
            f"  {render_curve(rewards)}",
            "",
        ]
    if examples:
        changes = Counter(example.change for example in examples)
        lines += [
            f"of {len(examples)} held-out problems {changes[False, True]} turned right, {changes[True, False]} turned "
            "wrong; a sample in these proportions",
            "                        before   after    correct",
        ]
        for e in choose_sample(examples):
            lines.append(f"  {e.prompt:<20}  {_mark(e.before, e)}  {_mark(e.after, e)}  {e.answer}")
    return "\n".join(lines).rstrip("\n")


def describe_next(assets: Assets, trained: Path, run: Path) -> str:
    """Return the commands that look at the run, and try and score its model."""
    return (
        "to look at the run, in a browser and here:\n"
        f"  verl report {run}\n"
        f"  verl show {run} --worst 3\n"
        f"the trained model is in {trained}, a Hugging Face model folder; to try and score it:\n"
        f"  verl generate {assets.test} --output responses.parquet model.path={trained} "
        f"rollout.temperature=0 data.max_response_length={RESPONSE_LENGTH} trainer.n_gpus_per_node=1\n"
        "  verl eval responses.parquet"
    )


def choose_sample(examples: Sequence[Example], count: int = 6) -> list[Example]:
    """Return examples whose changes, such as from wrong to right, are as frequent as among all of them."""
    by_change = sorted(examples, key=lambda example: example.change)
    count = min(count, len(examples))
    return [by_change[(2 * index + 1) * len(examples) // (2 * count)] for index in range(count)]


def _percent(share: float) -> str:
    return f"{100 * share:5.1f} %"


def _mark(response: str, example: Example) -> str:
    return f"{response[:5]:<5} {'✓' if response == example.answer else '✗'}"
