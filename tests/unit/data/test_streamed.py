"""Files larger than memory: any layout of row groups, blocks read about once, long prompts found on the way."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.data import dataset as dataset_module
from verl.data import files
from verl.data.dataset import PromptDataset, PromptOptions
from verl.data.samplers import BufferedShuffleSampler
from verl.errors import DataError

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    core = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="\0"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="\0")


def write(path: Path, prompts: list[str], **options: Any) -> Path:
    rows = [{"prompt": prompt, "data_source": path.stem, "answer": str(place)} for place, prompt in enumerate(prompts)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, **options)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_ROWS", 4)
    monkeypatch.setattr(files, "READ_AT_ONCE", 3)


def open_streamed(path: Path) -> files.Rows:
    return files.open_rows(path, files.BlockCache(), streamed=True)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 60), group=st.integers(1, 70), data=st.data())
def test_every_row_is_itself_in_any_layout_and_any_sequence(
    tmp_path_factory: pytest.TempPathFactory, rows: int, group: int, data: st.DataObject
) -> None:
    path = write(tmp_path_factory.mktemp("a") / "a.parquet", [str(n) for n in range(rows)], row_group_size=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_ROWS", 4)
        patch.setattr(files, "READ_AT_ONCE", 3)
        patch.setattr(files, "CACHED_BYTES", 100)
        opened = open_streamed(path)
        for index in data.draw(st.lists(st.integers(0, rows - 1), max_size=20)):
            assert opened.row(index)["prompt"] == str(index)
        ends = opened.block_ends
    assert ends[-1] == rows
    sizes = np.diff(ends, prepend=0)
    assert sizes.min() > 0
    assert sizes.max() < 2 * 4


@pytest.mark.usefixtures("small_blocks")
def test_a_giant_row_group_is_read_forwards_once_and_never_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_streamed(write(tmp_path / "a.parquet", [str(n) for n in range(100)]))
    scans: list[Any] = []
    original = files._Scan
    monkeypatch.setattr(files, "_Scan", lambda *given: scans.append(given) or original(*given))
    monkeypatch.setattr(opened._file, "read_row_group", None)  # type: ignore[attr-defined]
    assert [opened.row(index)["prompt"] for index in range(100)] == [str(n) for n in range(100)]
    assert len(scans) == 1
    assert opened.row(50)["prompt"] == "50"
    assert len(scans) == 1, "what was decoded is kept while there is room"


def test_wide_rows_make_blocks_of_fewer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 10_000)
    path = write(tmp_path / "a.parquet", [str(n) * 500 for n in range(100, 200)], use_dictionary=False)
    sizes = np.diff(open_streamed(path).block_ends, prepend=0)
    assert sizes.max() < 10
    assert np.diff(files.open_rows(path).block_ends, prepend=0).tolist() == [100], "only where it is streamed"


@pytest.mark.usefixtures("small_blocks")
def test_files_of_a_data_set_share_one_bound_on_memory(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CACHED_BYTES", 1)
    paths = [write(tmp_path / f"{name}.parquet", ["1"] * 9, row_group_size=3) for name in "abc"]
    dataset = PromptDataset(paths, tokenizer, PromptOptions(max_prompt_length=4, streaming=True))
    assert len(list(dataset)) == 27
    assert len({id(file._cache) for file in dataset.files}) == 1  # type: ignore[attr-defined]
    assert len(dataset.files[0]._cache._tables) == 1  # type: ignore[attr-defined]


@pytest.mark.usefixtures("small_blocks")
def test_the_order_by_buffer_decodes_a_block_about_once(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", [str(n) for n in range(200)], row_group_size=4)
    dataset = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=4, streaming=True))
    ends = dataset.block_ends()
    assert ends.tolist() == list(range(4, 201, 4))
    [file] = dataset.files
    monkeypatch.setattr(files, "CACHED_BYTES", 5 * file._read(0, 4).nbytes)  # type: ignore[attr-defined]
    decoded: list[int] = []
    original = file._read  # type: ignore[attr-defined]
    monkeypatch.setattr(file, "_read", lambda start, stop: decoded.append(start) or original(start, stop))
    order = BufferedShuffleSampler(ends, 16, seed=5)
    rows = [dataset[order.row(place)].row for place in range(200)]  # type: ignore[union-attr]
    assert sorted(rows) == list(range(200))
    assert len(decoded) < 1.3 * 50


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_streamed_data_set_is_the_other_without_a_pass_over_it(
    tmp_path: Path, tokenizer: Any, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / f"{name}{suffix}", [f"{name}{n}" for n in range(5)]) for name in "ab"]
    measured = PromptDataset(paths, tokenizer, PromptOptions(max_prompt_length=4))
    monkeypatch.setattr(dataset_module, "measure_lengths", None)
    streamed = PromptDataset(paths, tokenizer, PromptOptions(max_prompt_length=4, streaming=True))
    assert list(streamed) == list(measured)
    assert streamed.kept == range(10)
    assert str(streamed.report) == "2 files: 10 rows, streamed: each is read and measured when it is needed"
    assert len(PromptDataset(paths, tokenizer, PromptOptions(max_prompt_length=4, streaming=True, max_samples=7))) == 7


def test_prompts_that_are_too_long_are_dropped_cut_or_refused_when_they_are_read(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "a.parquet", ["123", "12345678", "1234"])

    def streamed(**options: Any) -> PromptDataset:
        return PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=4, streaming=True, **options))

    dropping = streamed()
    assert dropping[1] is None
    assert [prompt.row for prompt in dropping] == [0, 2]
    cutting = streamed(filter_overlong=False, truncation="left")
    assert [len(prompt.token_ids) for prompt in cutting] == [3, 4, 4]
    refusing = streamed(filter_overlong=False)
    assert refusing[0] is not None
    with pytest.raises(DataError, match=r"a\.parquet, row 1: the prompt has 8 tokens.*filter_overlong_prompts=True"):
        refusing[1]


def test_blocks_end_with_the_rows_that_are_used(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.parquet", [str(n) for n in range(10)], row_group_size=4)
    dataset = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=4, streaming=True, max_samples=6))
    assert dataset.block_ends().tolist() == [4, 6]


def test_a_sample_shows_what_is_wrong_before_the_run(tmp_path: Path, tokenizer: Any) -> None:
    paths = [write(tmp_path / f"{n:02}.parquet", ["1" * (1 + n % 7)] * 20) for n in range(20)]
    found = PromptDataset(paths, tokenizer, PromptOptions(max_prompt_length=4, streaming=True)).sample()
    assert {prompt.data_source for prompt in found if prompt} <= {path.stem for path in paths}
    assert len({prompt.data_source for prompt in found if prompt}) >= 3, "of several files"
    assert None in found
    long = PromptDataset(paths[6], tokenizer, PromptOptions(max_prompt_length=4, streaming=True))
    with pytest.raises(DataError, match=r"06.parquet: all 20 prompts that were checked are longer than .*=4. Raise it"):
        long.sample()


def test_large_files_are_streamed_unless_the_settings_decide(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_large(files: Any, streaming: bool | None = None) -> bool:
        return PromptDataset(files, tokenizer, PromptOptions(max_prompt_length=4, streaming=streaming)).report.streamed

    paths = [write(tmp_path / name, ["1"] * 10) for name in ("a.parquet", "b.jsonl")]
    assert not is_large(paths)
    assert is_large(paths, streaming=True)
    monkeypatch.setattr(files, "STREAMED_ROWS", 20)
    assert is_large(paths)
    assert not is_large(paths, streaming=False)
    assert not is_large(paths[0])
    monkeypatch.setattr(files, "STREAMED_BYTES", 100)
    assert is_large(paths[0])
