"""The small files of a Hugging Face model: what, beside weights, `from_pretrained` needs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

__all__ = ["model_files"]


def model_files(
    model_path: str, tokenizer_path: str | None = None, *, trust_remote_code: bool = False
) -> dict[str, bytes]:
    """Configuration, generation configuration and tokenizer, by the names of their files."""
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    files = {"config.json": config.to_json_string().encode()}
    try:
        generation = GenerationConfig.from_pretrained(model_path)
    except OSError:  # not every model has one
        generation = GenerationConfig.from_model_config(config)
    files["generation_config.json"] = generation.to_json_string().encode()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path or model_path, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="verl-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return files | {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
