"""What the page shows, as JSON: curves, warnings, timeline, samples, settings. Large runs are reduced to fit a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import verl
from verl.diagnosis.rules import RULES
from verl.redaction import redact
from verl.report.advice import read_advice
from verl.report.curves import group_metrics, list_notable, make_columns, thin_out
from verl.report.sample_texts import (
    SampleSet,
    choose_text_limit,
    count_shortened,
    make_chunks,
    make_table,
    read_sample_set,
)
from verl.report.sample_tokens import choose_groups, read_tokens
from verl.tracking.run_folder import Phase, RunFolder, Setting, StepMetrics

_MOST_PHASES = 100_000


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a run goes into the page: samples, characters of their texts, and tokens with their numbers."""

    samples: int = 20_000
    characters: int = 16_000_000
    tokens: int = 600_000


@dataclass(slots=True)
class Contents:
    """The parts of a page: `run` is read when it opens, `texts` in the background, `tokens` when a group is opened."""

    run: dict[str, Any]
    texts: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[int, dict[int, Any]] = field(default_factory=dict)


def read_run(folder: RunFolder, now: float) -> dict[str, Any]:
    """Return everything but samples. `omissions` says what is not in the page."""
    metrics = folder.read_metrics()
    shown, stride = thin_out(metrics)
    state = folder.read_state(now, metrics)
    starts, advice = folder.read_starts(), read_advice(folder, metrics)
    return {
        "name": folder.name,
        "version": verl.__version__,
        "built": now,
        "state": {"name": state.name, "step": state.step, "total": state.total_steps, "time": state.time},
        "began": min(filter(None, [*(each.time for each in starts), *(each.time for each in metrics)]), default=None),
        "metrics": make_columns(shown),
        "groups": [{"title": title, "names": names} for title, names in group_metrics(list_notable(shown))],
        "warnings": [[each.step, each.time, redact(each.describe()), each.rule] for each in advice],
        "rules": {rule.name: rule.meaning.replace("`", "") for rule in RULES if rule.name in {a.rule for a in advice}},
        "starts": [
            {
                "step": each.step,
                "time": each.time,
                "command": redact(each.command),
                "settings": _list_settings(each.settings),
                "environment": each.environment,
            }
            for each in starts
        ],
        "settings": _list_settings(folder.read_settings()),
        "phases": _make_phases(folder.read_phases(), shown),
        "omissions": [f"Curves and timeline show every {stride}th step of {len(metrics):,}."] if stride > 1 else [],
    }


def make_contents(folder: RunFolder, run: Mapping[str, Any], data: SampleSet, limits: Limits) -> Contents:
    """Add the samples to what `read_run` returned, with as much of their texts and tokens as the limits allow."""
    lengths = [len(each.prompt) + sum(map(len, each.segments)) for each in data.samples]
    text_limit = choose_text_limit(lengths, limits.characters)
    chosen = choose_groups(data, limits.tokens)
    with_tokens = sum(map(len, chosen.values()))
    samples = make_table(data) | {"with_tokens": chosen}
    omissions = [*run["omissions"], *_describe_omissions(data, text_limit, with_tokens)]
    return Contents(
        {**run, "samples": samples, "omissions": omissions},
        list(make_chunks(data.samples, text_limit)),
        {file: read_tokens(folder, data, file, positions) for file, positions in chosen.items()},
    )


def read_samples(folder: RunFolder, limits: Limits) -> SampleSet:
    return read_sample_set(folder, limits.samples)


def _list_settings(settings: Sequence[Setting]) -> list[list[str]]:
    return [[each.key, redact(each.value), each.origin] for each in settings]


def _make_phases(phases: Mapping[int, Sequence[Phase]], shown: Sequence[StepMetrics]) -> dict[str, Any]:
    """Return step -> rows of worker, phase (indices of names), start and end in milliseconds since the first start.

    Of many rows, such as those of 1,024 ranks, every n-th step is kept.
    """
    workers: dict[str, int] = {}
    names: dict[str, int] = {}
    steps = {}
    known = sorted({each.step for each in shown} & phases.keys())
    stride = 1 + sum(len(phases[step]) for step in known) // _MOST_PHASES
    for step in known[::-stride]:
        begin = min((each.start for each in phases[step]), default=0.0)
        steps[step] = [
            [
                workers.setdefault(each.worker, len(workers)),
                names.setdefault(each.name, len(names)),
                round(1000 * (each.start - begin)),
                round(1000 * (each.end - begin)),
            ]
            for each in phases[step]
        ]
    return {"workers": list(workers), "names": list(names), "steps": steps}


def _describe_omissions(data: SampleSet, text_limit: int, with_tokens: int) -> Iterator[str]:
    count = len(data.samples)
    if data.skipped_rows:
        yield f"{data.skipped_rows:,} of {data.skipped_rows + count:,} recorded samples are not in this page."
    if data.damaged_files:
        yield f"Sample files that could not be read: {data.damaged_files:,}."
    if shortened := count_shortened(data.samples, text_limit):
        yield f"The texts of {shortened:,} samples are shortened to about {text_limit:,} characters."
    if with_tokens < count:
        yield f"{with_tokens:,} of {count:,} samples have the numbers of their tokens; the others have texts only."
