"""Exporting to Hugging Face format: the files that `from_pretrained` needs, and the weights in checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils.logging import disable_progress_bar

from verl.checkpoint.adapter import SavedAdapter
from verl.checkpoint.export import BaseWeights, iter_checkpoint_weights
from verl.errors import CheckpointError
from verl.training.fsdp.lora import HEAD, fingerprint
from verl.training.fsdp.model import ScoredBackbone
from verl.training.fsdp.model_loader import select_model_class
from verl.training.settings import Head
from verl.weights.bucket import to_hf


def read_model_files(
    model_path: str, tokenizer_path: str | None = None, *, trust_remote_code: bool = False
) -> dict[str, bytes]:
    """Return the contents of configuration, generation configuration and tokenizer files, by file name."""
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    files = {"config.json": config.to_json_string().encode()}
    try:
        generation = GenerationConfig.from_pretrained(model_path)
    except OSError:  # the model has none
        generation = GenerationConfig.from_model_config(config)
    files["generation_config.json"] = generation.to_json_string().encode()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path or model_path, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="verl-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return files | {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def read_saved_weights(
    shards: Path,
    config: PreTrainedConfig,
    *,
    base: BaseWeights | None = None,
    head: Head = "tokens",
    trust_remote_code: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Read the weights in a folder of shards, with the dtype and names that `from_pretrained` expects."""
    model_class = AutoModelForCausalLM if head == "tokens" else AutoModelForTokenClassification
    with torch.device("meta"):
        model = model_class.from_config(config, trust_remote_code=trust_remote_code)
    return to_hf(model, iter_checkpoint_weights(shards, base=base, **weight_format(config)))


def weight_format(config: PreTrainedConfig) -> dict[str, Any]:
    """Return `dtype`, that of the initial model even if training uses a wider one, and whether the head is `tied`."""
    dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    tied = getattr(config.get_text_config(), "tie_word_embeddings", False) or config.tie_word_embeddings
    return {"dtype": dtype, "tied": bool(tied)}


def base_weights_reader(
    *, path: str | None = None, head: Head = "tokens", trust_remote_code: bool = False
) -> Callable[[SavedAdapter], Iterator[tuple[str, Tensor]]]:
    """Return a function that reads the base weights of an adapter, from `path` or the model that it was trained on."""

    def read(adapter: SavedAdapter) -> Iterator[tuple[str, Tensor]]:
        base = path or adapter.base
        check_fingerprint(adapter, base)
        disable_progress_bar()
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        model_class = select_model_class(config, head)
        hf = model_class.from_pretrained(base, config=config, dtype="auto", trust_remote_code=trust_remote_code)
        model = hf if head == "tokens" else ScoredBackbone(hf)
        for name, parameter in model.named_parameters():
            if not name.startswith(HEAD):
                yield name, parameter.detach()

    return read


def check_fingerprint(adapter: SavedAdapter, base: str) -> None:
    """Raise a `CheckpointError` unless `base` has the weights that the adapter was trained on."""
    if fingerprint(base) != adapter.fingerprint:
        raise CheckpointError(
            f"{base} does not have the weights that the adapter was trained on ({adapter.base} at that time); set "
            "--hf_model_path to the folder that has them"
        )
