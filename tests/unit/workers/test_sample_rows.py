"""Samples as rows for people: text, numbers of every token, and the JSON lines of launch scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from verl.tracking.sample_files import SCHEMA
from verl.types import Prompt, Sample
from verl.workers.sample_rows import MAX_CHARACTERS, SampleFile, SampleWriter, TokenValues

pytestmark = pytest.mark.unit

EOS = 9
PROMPT = Prompt(row=7, token_ids=[1, 2], data_source="sums", ground_truth={"answer": 3})
SAMPLE = Sample(
    group=4,
    index=1,
    tokens=np.array([1, 2, 3, 4, 5, EOS], np.int32),
    mask=np.array([0, 0, 1, 0, 1, 1], bool),
    logprobs=np.array([0, 0, -0.5, 0, -0.25, -0.125], np.float32),
    versions=np.array([-1, -1, 6, -1, 6, 7], np.int32),
    score=0.5,
    metrics={"format": 1.0},
    engines=frozenset({2, 0}),
    times=(10.0, 11.0, 12.0),
)


def decode(tokens: Sequence[int], keep_special: bool) -> str:
    return " ".join(str(token) for token in tokens if keep_special or token != EOS)


def write(path: Path, *samples: Sample, prompt: Prompt = PROMPT, values: TokenValues | None = None) -> None:
    SampleWriter(decode).write(SampleFile(path, "train", 8, {}, []), [(sample, prompt, values) for sample in samples])


def test_a_row_has_text_and_one_value_per_token(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "train.parquet"
    write(path, SAMPLE, values=TokenValues(SAMPLE.logprobs * 2, np.ones(6, np.float32)))
    [row] = pq.read_table(path).to_pylist()
    assert (row["prompt"], row["response"], row["pieces"]) == ("1 2", "3 4 5 9", ["1", "2", "3", "4", "5", "9"])
    assert (row["step"], row["split"], row["group"], row["index"], row["row"]) == (8, "train", 4, 1, 7)
    assert (row["score"], row["metrics"], row["ground_truth"]) == (0.5, [("format", 1.0)], '{"answer": 3}')
    assert (row["engines"], row["started"], row["scored"]) == ([0, 2], 10.0, 12.0)
    assert row["versions"] == [-1, -1, 6, -1, 6, 7]
    assert row["logprobs"] == [0.0, 0.0, -1.0, 0.0, -0.5, -0.25]
    assert {len(value) for value in row.values() if isinstance(value, list)} == {1, 2, 6}


def test_validation_has_no_values_of_the_trainer(tmp_path: Path) -> None:
    write(tmp_path / "val.parquet", SAMPLE)
    table = pq.read_table(tmp_path / "val.parquet")
    assert table.schema.equals(SCHEMA)
    assert table.column("advantages").to_pylist() == [None]


def test_branches_of_an_episode_are_numbered(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", replace(SAMPLE, branches=2), replace(SAMPLE, branches=2), replace(SAMPLE, index=2))
    assert pq.read_table(tmp_path / "a.parquet").column("branch").to_pylist() == [0, 1, 0]


def test_a_sample_without_a_generated_token_is_all_prompt(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", replace(SAMPLE, mask=np.zeros(6, bool)))
    [row] = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert (row["prompt"], row["response"]) == ("1 2 3 4 5 9", "")


def test_long_ground_truths_are_cut(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", SAMPLE, prompt=replace(PROMPT, ground_truth="x" * 2 * MAX_CHARACTERS))
    [truth] = pq.read_table(tmp_path / "a.parquet").column("ground_truth").to_pylist()
    assert len(truth) == MAX_CHARACTERS + len("...")


def test_json_lines_have_the_names_of_launch_scripts_and_no_special_tokens(tmp_path: Path) -> None:
    write(tmp_path / "more" / "8.jsonl", SAMPLE)
    [line] = (tmp_path / "more" / "8.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "input": "1 2",
        "output": "3 4 5",
        "gts": '{"answer": 3}',
        "score": 0.5,
        "step": 8,
        "data_source": "sums",
        "format": 1.0,
    }
