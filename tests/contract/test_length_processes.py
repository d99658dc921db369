"""Measuring prompts in processes gives what measuring them here gives, errors included, and leaves no process."""

import os
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.data import lengths as measure_module
from verl.data.files import open_rows
from verl.data.lengths import TokenCounter, measure_lengths
from verl.errors import DataError

pytestmark = pytest.mark.contract


@pytest.fixture
def counter() -> TokenCounter:
    core = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="\0"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    return TokenCounter(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="\0", chat_template=template), {})


def write(path: Path, prompts: list[Any]) -> Path:
    pq.write_table(pa.table({"prompt": prompts}), path)
    return path


def test_in_processes_as_here(tmp_path: Path, counter: TokenCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ROWS_FOR_A_PROCESS", 1000)
    texts = ["1" * (1 + n * 7 % 13) for n in range(9000)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    files = [open_rows(write(tmp_path / "a.parquet", texts)), open_rows(write(tmp_path / "b.parquet", chats))]
    here, _ = measure_lengths(files, 17_000, "prompt", counter, processes=0)
    there, _ = measure_lengths(files, 17_000, "prompt", counter, processes=2)
    assert here.tolist() == there.tolist()
    assert here[8999:9001].tolist() == [len(texts[8999]), len(texts[0]) + 1]

    bad = open_rows(write(tmp_path / "c.parquet", [*texts[:3000], "", *texts[3000:]]))
    with pytest.raises(DataError, match=r"c\.parquet, row 3000, column 'prompt': the prompt is an empty string"):
        measure_lengths([bad], len(bad), "prompt", counter, processes=2)
    assert not [
        child for child in psutil.Process(os.getpid()).children() if "verl.data.lengths" in " ".join(child.cmdline())
    ]


class Deadly(PreTrainedTokenizerFast):
    """A tokenizer that takes its process with it."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        os._exit(7)


def test_a_process_that_dies_is_said_with_a_fix(
    tmp_path: Path, counter: TokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_module, "ROWS_FOR_A_PROCESS", 1000)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    file = open_rows(write(tmp_path / "a.parquet", ["1"] * 3000))
    deadly = Deadly(tokenizer_object=counter.tokenizer.backend_tokenizer, unk_token="\0")
    with pytest.raises(DataError, match=r"ended with exit code 7.*data\.num_workers=0"):
        measure_lengths([file], 3000, "prompt", TokenCounter(deadly, {}), processes=2)
