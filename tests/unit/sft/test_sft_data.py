"""Examples from files: all are read once, a bad row is reported with its location, and batches are balanced."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import chat_tokenizer

from verl.config.schema.sft import SftDataConfig
from verl.data.micro_batches import MicroBatchLimit
from verl.data.validate import find_file_problems
from verl.errors import DataError
from verl.sft.data import ExampleDataset
from verl.sft.examples import Example, ExampleReader, list_columns
from verl.sft.model import flatten
from verl.sft.trainer import split_batch

pytestmark = pytest.mark.unit


def reader(**settings: Any) -> ExampleReader:
    return ExampleReader(chat_tokenizer(), (1,), SftDataConfig(**settings))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(*lengths: int) -> list[dict[str, Any]]:
    return [{"prompt": "p" * (length - 2), "response": "r", "other": 1} for length in lengths]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_rows_of_all_files_are_numbered_through_and_measured(tmp_path: Path, suffix: str) -> None:
    files = [write(tmp_path / f"{k}{suffix}", pairs(*lengths)) for k, lengths in enumerate([(5, 3, 9), (4, 7)])]
    dataset = ExampleDataset(files, reader(max_length=9))
    assert dataset.lengths.tolist() == [5, 3, 9, 4, 7]
    assert [len(dataset[row].tokens) for row in range(len(dataset))] == [5, 3, 9, 4, 7]
    assert str(dataset.report) == "2 files: 5 rows, 5 kept"
    assert len(ExampleDataset(files, reader(max_length=9), max_samples=4)) == 4


def test_conversations_of_parquet_are_read_as_of_jsonl(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]
    found = []
    for suffix in (".parquet", ".jsonl"):
        dataset = ExampleDataset(
            write(tmp_path / f"talk{suffix}", [{"messages": talk}] * 3), reader(messages_key="messages", max_length=99)
        )
        found.append((dataset.lengths.tolist(), dataset[2].tokens.tolist(), dataset[2].mask.tolist()))
    assert found[0] == found[1]


def test_overlong_examples_are_refused_or_truncated(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", pairs(5, 12, 30))
    with pytest.raises(DataError) as raised:
        ExampleDataset(file, reader(max_length=10))
    assert str(raised.value) == (
        f"{file}, row 1: the example has 12 tokens, more than data.max_length=10; 1 more are too long (the longest: 30)"
        ". Set data.max_length=30, or data.truncation=right or left"
    )
    cut = ExampleDataset(file, reader(max_length=10, truncation="left"))
    assert cut.lengths.tolist() == [5, 10, 10]
    assert cut[2].mask.tolist() == [False] * 8 + [True] * 2
    assert str(cut.report) == "a.parquet: 3 rows, 2 truncated to 10 tokens, 3 kept"
    assert cut.truncation_warnings() == []
    [warning] = ExampleDataset(file, reader(max_length=10, truncation="right")).truncation_warnings()
    assert f"2 of 2 truncated examples have no token left to train on (the first: {file}, row 1)" in warning


def test_a_bad_row_is_found_at_start_and_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [*pairs(4), {"prompt": "p", "response": ""}])
    with pytest.raises(DataError, match=rf"^{file}, line 2: column 'response': the response is an empty string"):
        ExampleDataset(file, reader(max_length=10))


def test_a_missing_column_suggests_the_likely_one(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [{"prompt": "p", "answer": "r"}])
    with pytest.raises(DataError, match=r"column 'response' not found in .* Set data.response_key=answer"):
        ExampleDataset(file, reader(max_length=10))


@pytest.mark.parametrize("others", [{}, {"prompt": "p", "prompt_id": 3}])
def test_a_file_of_conversations_suggests_messages_key(tmp_path: Path, others: dict[str, Any]) -> None:
    file = write(tmp_path / "a.parquet", [{**others, "messages": [{"role": "user", "content": "a"}]}])
    [said] = find_file_problems(file, list_columns(SftDataConfig()))
    assert said.endswith("messages looks like whole conversations: set data.messages_key=messages")
    with pytest.raises(DataError, match=r"set data\.messages_key=messages$"):
        ExampleDataset(file, reader(max_length=10))
    both = write(tmp_path / "b.parquet", [{"messages": [{"role": "user", "content": "a"}], "answer": "b"}])
    assert [said.partition(". ")[2] for said in find_file_problems(both, list_columns(SftDataConfig()))] == [
        "Set data.prompt_key=messages",
        "Set data.response_key=answer",
    ]


def test_tools_may_come_with_a_later_line(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with_tools = reader(messages_key="messages", tools_key="tools", max_length=99)
    file = write(tmp_path / "a.jsonl", [{"messages": talk}, {"messages": talk, "tools": []}])
    assert len(ExampleDataset(file, with_tools)) == 2
    with pytest.raises(DataError, match="column 'tools' not found"):
        ExampleDataset(write(tmp_path / "b.jsonl", [{"messages": talk}]), with_tools)


limits = st.one_of(
    st.builds(lambda n: MicroBatchLimit(samples=n, tokens=None), st.integers(1, 5)),
    st.builds(lambda n: MicroBatchLimit(samples=None, tokens=n), st.integers(8, 40)),
)


@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=24), ranks=st.integers(1, 4), limit=limits)
def test_shares_hold_every_example_once_within_the_limit(
    lengths: list[int], ranks: int, limit: MicroBatchLimit
) -> None:
    examples = [
        Example(np.full(length, number, np.int32), np.arange(length) > 0) for number, length in enumerate(lengths)
    ]
    parts = split_batch(examples, ranks, limit)
    assert len(parts) == ranks
    assert len({len(part) for part in parts}) == 1, "every rank has as many micro-batches as the others"
    seen: list[int] = []
    for micro_batch in (micro_batch for part in parts for micro_batch in part):
        flat = flatten(micro_batch)
        if limit.tokens is not None:
            assert flat.num_tokens <= limit.tokens or len(flat) == 1
        else:
            assert len(flat) <= limit.samples
        for start, stop in pairwise(flat.offsets.tolist()):
            [index] = set(flat.tokens[start:stop].tolist())
            assert stop - start == lengths[index]
            assert flat.mask[start:stop].tolist() == [False, *[True] * (lengths[index] - 1)]
            seen.append(index)
    assert sorted(seen) == list(range(len(lengths)))


def test_a_micro_batch_without_examples_is_empty() -> None:
    nothing = flatten([])
    assert (nothing.tokens.tolist(), nothing.offsets.tolist(), nothing.mask.tolist()) == ([], [0], [])
    assert (nothing.tokens.dtype, nothing.mask.dtype) == (torch.int64, torch.bool)
