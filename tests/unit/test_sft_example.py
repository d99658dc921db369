"""`examples/sft`: its script writes what its settings read."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import chat_tokenizer

from verl.config.load import load_sft
from verl.sft.data import ExampleDataset
from verl.sft.examples import ExampleReader

pytestmark = pytest.mark.unit

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft"


def test_the_script_writes_what_the_settings_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        row = {"prompt": [{"role": "user", "content": "1+1?"}], "extra_info": {"answer": "two #### 2", "index": 0}}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{split}.parquet")
    target = tmp_path / "sft"
    monkeypatch.setattr(sys, "argv", ["gsm8k_sft.py", "--source", str(tmp_path), "--local_dir", str(target)])
    runpy.run_path(str(EXAMPLE / "gsm8k_sft.py"), run_name="__main__")
    [loaded] = load_sft(["--config-path", str(EXAMPLE), "--config-name", "sft_config"])
    assert loaded.hints == ()
    reader = ExampleReader(chat_tokenizer(), (1,), loaded.config.data)
    for split in ("train", "test"):
        dataset = ExampleDataset(target / f"{split}.parquet", reader)
        example = dataset[0]
        assert reader.tokenizer.decode(example.tokens[example.mask]) == "two #### 2<|end|>"
