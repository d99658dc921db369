"""The files besides weights that `from_pretrained` needs."""

import json

import pytest
from tiny import chat_tokenizer, tiny_qwen2
from transformers import AutoConfig, AutoTokenizer

from verl.training.model_files import read_model_files

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("apart", [False, True])
def test_config_and_tokenizer_come_back_from_the_files(tmp_path, apart):
    tokenizer = tmp_path / ("tokenizer" if apart else "model")
    tiny_qwen2(dtype="bfloat16").save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tokenizer)
    files = read_model_files(str(tmp_path / "model"), str(tokenizer) if apart else None)
    (tmp_path / "written").mkdir()
    for name, data in files.items():
        (tmp_path / "written" / name).write_bytes(data)
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert AutoConfig.from_pretrained(tmp_path / "written").hidden_size == 64
    assert json.loads(files["config.json"])["dtype"] == "bfloat16", "as the model was, not as it is trained"
    again = AutoTokenizer.from_pretrained(tmp_path / "written")
    assert again.encode("12+3") == chat_tokenizer().encode("12+3")
    assert again.chat_template == chat_tokenizer().chat_template
