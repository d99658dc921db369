"""Lengths of prompts come from the disk when nothing has changed, and never when something has."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.data import lengths as measure_module
from verl.data.dataset import PromptDataset, PromptOptions
from verl.data.files import open_rows
from verl.data.lengths import TokenCounter, measure_lengths
from verl.errors import DataError

pytestmark = pytest.mark.unit

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if think %}12345{% endif %}"


def make_tokenizer(split: str = ".", template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="\0"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(split), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="\0", chat_template=template)


def write(path: Path, lengths: list[int], *, old: bool = True, column: str = "prompt") -> Path:
    rows = [
        {column: [{"role": "user", "content": "1" * n}], "other": [{"role": "user", "content": "1"}]} for n in lengths
    ]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if old:
        age(path, 100)
    return path


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


@pytest.fixture(autouse=True)
def _small_sets_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ROWS_TO_KEEP", 1)


@pytest.fixture
def lengths(tmp_path: Path) -> Callable[..., tuple[list[int], bool]]:
    """The lengths of the prompts of files, and whether they came from the disk."""

    def of(
        *paths: Path, rows: int = 99, column: str = "prompt", split: str = ".", template: str = TEMPLATE, **kwargs: Any
    ) -> tuple[list[int], bool]:
        counter = TokenCounter(make_tokenizer(split, template), kwargs)
        opened = [open_rows(path) for path in paths]
        rows = min(rows, sum(map(len, opened)))
        found, known = measure_lengths(opened, rows, column, counter, folder=tmp_path / "cache")
        return found.tolist(), known

    return of


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_second_start_measures_nothing(tmp_path: Path, lengths: Any, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", [3, 1, 2])
    assert lengths(path) == ([3, 1, 2], False)
    assert lengths(path) == ([3, 1, 2], True)


def test_a_changed_file_is_measured_again(tmp_path: Path, lengths: Any) -> None:
    path = write(tmp_path / "a.jsonl", [3, 1, 2])
    lengths(path)
    before = path.stat()
    write(path, [1, 3, 2], old=False)
    age(path, 50)
    assert path.stat().st_size == before.st_size
    assert lengths(path) == ([1, 3, 2], False)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    write(path, [1, 3, 20], old=False)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert lengths(path) == ([1, 3, 20], False), "another size at the same time"


def test_a_file_that_may_still_be_written_is_not_kept(tmp_path: Path, lengths: Any) -> None:
    path = write(tmp_path / "a.jsonl", [3, 1, 2], old=False)
    assert lengths(path) == ([3, 1, 2], False)
    write(path, [1, 3, 2], old=False)  # the clock of the file system may not have moved on
    assert lengths(path) == ([1, 3, 2], False)


def test_a_file_that_changes_while_it_is_measured_is_not_kept(
    tmp_path: Path, lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", [3, 1, 2])
    original = measure_module.encode_prompts

    def and_touch(*given: Any) -> Any:
        age(path, 10)
        return original(*given)

    monkeypatch.setattr(measure_module, "encode_prompts", and_touch)
    lengths(path)
    monkeypatch.undo()
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.parametrize(
    "other",
    [{"split": ".."}, {"template": "123" + TEMPLATE}, {"think": True}, {"column": "other"}, {"rows": 2}],
    ids=lambda other: next(iter(other)),
)
def test_lengths_are_measured_again_if_their_inputs_change(tmp_path: Path, lengths: Any, other: dict[str, Any]) -> None:
    path = write(tmp_path / "a.parquet", [3, 1, 2])
    first = lengths(path)
    changed = lengths(path, **other)
    assert not changed[1]
    assert changed != first
    assert lengths(path) == (first[0], True)
    assert lengths(path, **other) == (changed[0], True)


def test_only_new_files_are_measured(tmp_path: Path, lengths: Any) -> None:
    first, second = write(tmp_path / "a.parquet", [3, 1]), write(tmp_path / "b.parquet", [5])
    lengths(first)
    assert lengths(first, second) == ([3, 1, 5], False)
    assert lengths(first, second) == ([3, 1, 5], True)
    assert lengths(second, first) == ([5, 3, 1], True)


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\x93NUMPY\x01\x00"])
def test_a_damaged_entry_is_measured_again(tmp_path: Path, lengths: Any, damage: bytes) -> None:
    path = write(tmp_path / "a.parquet", [3, 1, 2])
    lengths(path)
    [entry] = tmp_path.glob("cache/*")
    entry.write_bytes(damage)
    assert lengths(path) == ([3, 1, 2], False)
    assert lengths(path) == ([3, 1, 2], True)


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path, lengths: Any) -> None:
    path = write(tmp_path / "a.parquet", [3, 1, 2])
    (tmp_path / "cache").write_text("a file is in the way")
    assert lengths(path) == ([3, 1, 2], False)
    assert lengths(path) == ([3, 1, 2], False)


def test_small_sets_are_not_kept(tmp_path: Path, lengths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ROWS_TO_KEEP", 4)
    path = write(tmp_path / "a.parquet", [3, 1, 2])
    lengths(path)
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_in_python_is_not_trusted_to_be_the_same(tmp_path: Path) -> None:
    class Slow:
        """Like a tokenizer, but nobody can see what it does."""

        chat_template = None

        def __call__(self, texts: list[str], **_: Any) -> Any:
            return type("Ids", (), {"input_ids": [[1]] * len(texts)})

    path = write(tmp_path / "a.parquet", [3], column="x")
    pq.write_table(pa.table({"prompt": ["1"]}), path)
    age(path, 100)
    counter = TokenCounter(Slow(), {})  # type: ignore[arg-type]
    for _ in range(2):
        assert measure_lengths([open_rows(path)], 1, "prompt", counter, folder=tmp_path / "cache")[1] is False
    assert not (tmp_path / "cache").exists()


def test_the_report_says_that_lengths_came_from_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [3, 1, 9])

    def report() -> str:
        options = PromptOptions(max_prompt_length=4)
        return str(PromptDataset(path, make_tokenizer(), options, cache_dir=tmp_path / "cache").report)

    assert report() == "a.parquet: 3 rows, 1 dropped for being longer than 4 tokens, 2 kept"
    assert report() == "a.parquet: 3 rows, 1 dropped for being longer than 4 tokens, 2 kept (lengths from the cache)"


def test_a_prompt_that_cannot_be_rendered_is_named_with_its_place(tmp_path: Path, lengths: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1"}\n\n{"prompt": 5}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 3, column 'prompt': the prompt is of type int"):
        lengths(path)


@pytest.mark.parametrize(
    ("wanted", "rows", "cores", "started"),
    [
        (0, 10**9, 64, 0),
        (1, 10**9, 64, 0),
        (4, 10**9, 64, 4),
        (4, 1000, 64, 0),
        (4, 120_000, 64, 2),
        (None, 10**9, 64, 8),
        (None, 10**9, 2, 2),
        (None, 10**9, 1, 0),
    ],
)
def test_processes_start_only_where_they_pay(
    wanted: int | None, rows: int, cores: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert measure_module._choose_processes(wanted, rows) == started


def test_lengths_are_small_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [3])
    found, _ = measure_lengths([open_rows(path)], 1, "prompt", TokenCounter(make_tokenizer(), {}))
    assert found.dtype == np.int32
