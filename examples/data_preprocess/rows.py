"""Shared code of these scripts: read raw examples, convert them to rows, and write train.parquet and test.parquet.

A row has the columns data_source, prompt (chat messages), reward_model {style, ground_truth} and extra_info {split,
index, ...}. Inspect it with `verl data train.parquet`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.files import find_files, open_rows
from verl.errors import DataError, VerlError

__all__ = ["ExampleError", "get_field", "make_row", "prepare"]

ROW_GROUP = 2048  # rows that a reader decodes at once
_SPLITS = ("train", "test")
_SUFFIXES = (".parquet", ".jsonl", ".json")

Example = Mapping[str, Any]
Convert = Callable[[Example, str], dict[str, Any]]
"""(raw example, data source) -> row of `make_row`."""


class ExampleError(Exception):
    """An example that cannot be converted; it is skipped and counted."""


def make_row(data_source: str, messages: list[dict[str, str]], ground_truth: str, **extra: Any) -> dict[str, Any]:
    """Return a row without its split and index."""
    return {
        "data_source": data_source,
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra,
    }


def get_field(example: Example, *names: str) -> Any:
    """Return the first of these fields that the example has."""
    for name in names:
        if example.get(name) is not None:
            return example[name]
    raise ExampleError(f"has none of the fields {', '.join(names)}; it has: {', '.join(example)}")


def prepare(
    convert: Convert,
    *,
    description: str | None,
    data_source: str,
    hub: tuple[str, ...] = (),
    argv: list[str] | None = None,
) -> int:
    """Run the script and return its exit code. `hub` is the data set on the Hugging Face Hub, and its configuration."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Raw files are Parquet or JSONL, named after their split: train.*, test.*.",
    )
    parser.add_argument("--local_dir", "--local_save_dir", default=f"~/data/{data_source.split('/')[-1]}", dest="out")
    parser.add_argument(
        "--source", "--local_dataset_path", help="a folder or file with the raw data, instead of the hub"
    )
    parser.add_argument("--data_source", default=data_source, help="selects the scorer (default: %(default)s)")
    parser.add_argument("--test_size", type=int, help="rows for test.parquet if the data has no test split")
    options = parser.parse_args(argv)
    try:
        out = Path(options.out).expanduser()
        raw = _read_splits(options.source, out, hub)
        if "test" not in raw:
            raw = _split(raw["train"], options.test_size)
        for split, examples in raw.items():
            _write(out / f"{split}.parquet", split, examples, lambda example: convert(example, options.data_source))
    except VerlError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"Inspect it with: verl data {out / 'train.parquet'}\n")
    return 0


def _read_splits(source: str | None, out: Path, hub: tuple[str, ...]) -> dict[str, list[Example]]:
    """Return raw examples by split: from `source`, from raw JSONL in the output folder, or from the hub."""
    if source is None and not list(out.glob("train.json*")):
        return _load_from_hub(hub)
    path = out if source is None else Path(source).expanduser()
    if path.is_file():
        return {"train": list(_iter_examples([path]))}
    suffixes = _SUFFIXES if source is not None else _SUFFIXES[1:]
    names = {split: [name + end for end in suffixes for name in (split, f"{split}-*")] for split in _SPLITS}
    files = {split: [file for name in names[split] for file in sorted(path.rglob(name))] for split in _SPLITS}
    if not files["train"]:
        find_files(path / "train.parquet")  # raises an error that lists the folder
    return {split: list(_iter_examples(paths)) for split, paths in files.items() if paths}


def _iter_examples(files: Iterable[Path]) -> Iterator[Example]:
    for file in files:
        rows = open_rows(file)
        yield from (rows.row(index) for index in range(len(rows)))


def _load_from_hub(hub: tuple[str, ...]) -> dict[str, list[Example]]:
    fix = "use a local copy with --source FOLDER that has train.jsonl and test.jsonl, or the same as Parquet"
    if not hub:
        raise DataError(f"this data has no default source: {fix}")
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise DataError(
            f"{hub[0]} is loaded with `datasets`, which is missing: pip install datasets, or {fix}"
        ) from None
    try:
        splits = load_dataset(*hub)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{hub[0]} cannot be loaded from the hub ({error}): {fix}") from error
    return {split: list(splits[split]) for split in _SPLITS if split in splits}


def _split(examples: list[Example], test_size: int | None) -> dict[str, list[Example]]:
    """Return a random split, the same at every call."""
    size = max(1, min(1000, len(examples) // 20)) if test_size is None else test_size
    if not 0 <= size < len(examples):
        raise DataError(f"--test_size {size}: there are only {len(examples)} examples; leave some for training")
    chosen = set(random.Random(0).sample(range(len(examples)), size))
    parts: dict[str, list[Example]] = {split: [] for split in _SPLITS}
    for index, example in enumerate(examples):
        parts["test" if index in chosen else "train"].append(example)
    return {split: part for split, part in parts.items() if part}


def _write(path: Path, split: str, examples: list[Example], convert: Callable[[Example], dict[str, Any]]) -> None:
    rows, reasons = [], []
    for index, example in enumerate(examples):
        try:
            row = convert(example)
        except ExampleError as error:
            reasons.append(f"example {index} of {split} {error}")
            continue
        row["extra_info"] = {"split": split, "index": index, **row["extra_info"]}
        rows.append(row)
    if not rows:
        why = f"the first: {reasons[0]}" if reasons else "the split is empty"
        raise DataError(f"{split}: none of the {len(examples)} examples can be used; {why}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # so that the file is complete or missing
    pq.write_table(pa.Table.from_pylist(rows), part, row_group_size=ROW_GROUP)
    os.replace(part, path)
    skipped = f", {len(reasons):,} skipped (the first: {reasons[0]})" if reasons else ""
    sys.stdout.write(f"{path}: {len(rows):,} rows{skipped}\n")
