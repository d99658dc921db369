"""Recorded samples: one Parquet file per step and validation, in `samples/` of the run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.private_files import make_folder

FOLDER = "samples"
_FLOATS, _INTS = pa.list_(pa.float32()), pa.list_(pa.int32())
SCHEMA = pa.schema(
    {
        "step": pa.int32(),
        "split": pa.string(),  # train or val
        "group": pa.int64(),
        "index": pa.int32(),
        "branch": pa.int32(),
        "row": pa.int64(),
        "data_source": pa.string(),
        "ground_truth": pa.string(),
        "prompt": pa.string(),
        "response": pa.string(),
        "score": pa.float64(),
        "metrics": pa.map_(pa.string(), pa.float64()),
        "finish_reason": pa.string(),
        "engines": _INTS,
        "started": pa.float64(),
        "generated": pa.float64(),
        "scored": pa.float64(),
        "token_ids": _INTS,
        "pieces": pa.list_(pa.string()),
        "mask": pa.list_(pa.bool_()),
        "versions": _INTS,
        "rollout_logprobs": _FLOATS,
        "logprobs": _FLOATS,
        "advantages": _FLOATS,
    }
)
"""The columns, which docs/run_folder.md describes."""
TEXT_COLUMNS = ("prompt", "response", "ground_truth", "score")
_TIMES = ("started", "generated", "scored")
EPISODE_COLUMNS = ("group", "index", "branch", "data_source", *TEXT_COLUMNS, "finish_reason", *_TIMES)
EPISODES = "train/episodes"
"""The name of a table with a row for each episode, which MLflow shows as traces."""


def get_sample_file(folder: Path, split: str, step: int) -> Path:
    """Return the file of a step in a run's folder: `samples/train_00000012.parquet`."""
    return folder / FOLDER / f"{split}_{step:08d}.parquet"


def read_texts(path: Path, limit: int) -> list[dict[str, Any]]:
    """Return the texts and the scores of the first samples of a file."""
    return pq.read_table(path, columns=list(TEXT_COLUMNS)).slice(0, limit).to_pylist()


def read_episodes(path: Path, groups: int | None) -> list[dict[str, Any]]:
    """Return what `EPISODE_COLUMNS` names of the samples of the first groups of a file; None: of all."""
    rows = pq.read_table(path, columns=list(EPISODE_COLUMNS)).to_pylist()
    chosen = list(dict.fromkeys(row["group"] for row in rows))[:groups]
    return [row for row in rows if row["group"] in chosen]


def write_samples(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with all columns of `SCHEMA`. Readers see the whole file or none."""
    make_folder(path.parent)
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), temporary, compression="zstd")
    os.replace(temporary, path)
