"""The samples of the page: a table of all, and their texts, shortened to fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from verl.errors import DataError
from verl.report.curves import to_json
from verl.tracking.run_folder import RunFolder, SampleFile

COLUMNS = (
    *("group", "index", "branch", "row", "data_source", "ground_truth", "prompt", "response", "score", "metrics"),
    *("finish_reason", "engines", "started", "generated", "scored", "pieces", "mask"),
)
PER_CHUNK = 1_000
"""Samples whose texts are compressed together; the page reads chunks one after the other."""
_MAX_TEXT = 50_000
"""Characters that are kept of any text."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of a file.

    `segments` is what follows the prompt: generated text first, then alternately what was inserted (tool results, turns
    of a user) and what was generated. `generated` counts tokens.
    """

    file: int
    row: int
    values: Mapping[str, Any]
    prompt: str
    segments: Sequence[str]
    generated: int


@dataclass(slots=True)
class SampleSet:
    """The samples of a report, and how many rows and files of the run are not among them."""

    files: list[SampleFile] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    skipped_rows: int = 0
    damaged_files: int = 0


def read_sample_set(folder: RunFolder, limit: int) -> SampleSet:
    """Read all samples; if there are more than `limit`, every n-th file, the last one included."""
    result, tables = SampleSet(), []
    for file in folder.list_samples():
        try:
            tables.append((file, folder.read_samples(file, ["group"]).num_rows))
        except DataError:
            result.damaged_files += 1
    stride = max(1, math.ceil(sum(rows for _, rows in tables) / limit))
    kept = tables[::-1][::stride][::-1]
    result.skipped_rows = sum(rows for _, rows in tables) - sum(rows for _, rows in kept)
    for file, _ in kept:
        result.samples += _read_file(folder.read_samples(file, COLUMNS), len(result.files))
        result.files.append(file)
    return result


def _read_file(table: pa.Table, file: int) -> Iterator[Sample]:
    runs = [_find_runs(mask) for mask in _list_column(table, "mask")]
    names = [name for name in COLUMNS if name not in ("pieces", "mask") and name in table.column_names]
    rows = table.select(names).to_pylist()
    for row, (values, ends) in enumerate(zip(rows, runs, strict=True)):
        prompt, response = values.pop("prompt", None) or "", values.pop("response", None) or ""
        segments = [response]
        if len(ends) > 2:  # several turns; ends[0] is that of the prompt
            pieces = table.column("pieces")[row].as_py()
            segments = ["".join(pieces[start:end]) for start, end in pairwise(ends)]
        generated = sum(end - start for start, end in zip(ends[::2], ends[1::2], strict=False))
        texts = [shorten(segment, _MAX_TEXT) for segment in segments]
        yield Sample(file, row, values, shorten(prompt, _MAX_TEXT), texts, generated)


def _list_column(table: pa.Table, name: str) -> list[np.ndarray]:
    """Return the arrays of a column of lists; empty ones if there is no such column."""
    if name not in table.column_names:
        return [np.zeros(0, bool)] * table.num_rows
    return [np.asarray(row.values if row.is_valid else [], bool) for row in table.column(name)]


def _find_runs(mask: np.ndarray) -> list[int]:
    """Return where the prompt ends, and then where each run of equal values ends.

    >>> _find_runs(np.array([False, False, True, True, False, True]))
    [2, 4, 5, 6]
    """
    if not mask.any():
        return []
    changes = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    return [*([0] if mask[0] else []), *changes, len(mask)]


def shorten(text: str, limit: int) -> str:
    """Return at most about `limit` characters, with a mark for what was removed from the middle."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]}\n[… {len(text) - limit:,} characters are not shown …]\n{text[len(text) - limit + head :]}"


def choose_text_limit(lengths: Sequence[int], budget: int) -> int:
    """Return the largest limit for which texts of these lengths, each cut to it, fit the budget.

    >>> choose_text_limit([10, 100, 1000], budget=310)
    200
    """
    rest = budget
    for position, length in enumerate(sorted(lengths)):
        share = rest // (len(lengths) - position)
        if length > share:
            return share
        rest -= length
    return max(lengths, default=0)


def make_table(data: SampleSet) -> dict[str, Any]:
    """Return the columns that the page filters and sorts by. Texts of few values are indices into lists."""
    samples = data.samples
    sources: dict[str, int] = {}
    finishes: dict[str, int] = {}
    return {
        "files": [[file.split, file.step] for file in data.files],
        "file": [each.file for each in samples],
        "group": [each.values.get("group") for each in samples],
        "index": [each.values.get("index") for each in samples],
        "branch": [each.values.get("branch") for each in samples],
        "score": [to_json(each.values.get("score")) for each in samples],
        "tokens": [each.generated for each in samples],
        "source": [sources.setdefault(each.values.get("data_source") or "", len(sources)) for each in samples],
        "finish": [finishes.setdefault(each.values.get("finish_reason") or "", len(finishes)) for each in samples],
        "sources": list(sources),
        "finishes": list(finishes),
    }


def make_chunks(samples: Sequence[Sample], limit: int) -> Iterator[dict[str, Any]]:
    """Yield the texts and further values of `PER_CHUNK` samples each. A prompt is stored once per chunk."""
    for start in range(0, len(samples), PER_CHUNK):
        prompts: dict[str, int] = {}
        rows = []
        for each in samples[start : start + PER_CHUNK]:
            prompt = prompts.setdefault(shorten(each.prompt, limit), len(prompts))
            share = choose_text_limit([len(segment) for segment in each.segments], limit)
            rows.append([prompt, [shorten(segment, share) for segment in each.segments], _describe(each.values)])
        yield {"prompts": list(prompts), "rows": rows}


def _describe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a sample beside its texts."""
    started, generated, scored = (values.get(name) or 0.0 for name in ("started", "generated", "scored"))
    return {
        "row": values.get("row"),
        "truth": shorten(values.get("ground_truth") or "", 2_000),
        "metrics": {str(name): to_json(value) for name, value in values.get("metrics") or ()},
        "engines": values.get("engines") or [],
        "generation_s": round(generated - started, 3) if started and generated else None,
        "scoring_s": round(scored - generated, 3) if generated and scored else None,
    }


def count_shortened(samples: Sequence[Sample], limit: int) -> int:
    return sum(len(each.prompt) > limit or sum(map(len, each.segments)) > limit for each in samples)


def iter_groups(samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Yield the positions of the samples of each group of a file."""
    ordered = sorted(range(len(samples)), key=lambda position: _group_key(samples[position]))
    for _, positions in groupby(ordered, key=lambda position: _group_key(samples[position])):
        yield list(positions)


def _group_key(sample: Sample) -> tuple[int, int]:
    return sample.file, sample.values.get("group") or 0
