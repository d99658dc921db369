"""The Hugging Face model of a checkpoint: written to a folder, and compared with one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from verl.checkpoint.adapter import is_adapter, peft_name, read_saved_adapter, write_adapter
from verl.checkpoint.export import compare_weights, export_weights, iter_checkpoint_weights
from verl.checkpoint.files import write
from verl.checkpoint.shards import read_tensors
from verl.errors import CheckpointError
from verl.models.model_safety import model_problems
from verl.training.model_files import (
    base_weights_reader,
    check_fingerprint,
    read_model_files,
    read_saved_weights,
    weight_format,
)

SAMPLE_TOKENS = 16
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".pkl")


@dataclass(frozen=True, slots=True)
class CheckpointModel:
    """A folder of shards, and what kind of model is made of it.

    `base_path` replaces the config and tokenizer of the checkpoint, and the base model of an adapter. `is_adapter`
    writes the adapter itself instead of merging it. `must_be_tied` refuses models with a separate head.
    """

    path: Path
    _: KW_ONLY
    base_path: str | None
    is_adapter: bool
    is_value_model: bool
    must_be_tied: bool
    trust_remote_code: bool

    def write(self, folder: Path) -> None:
        """Write config, tokenizer and weights, or the adapter, to `folder`."""
        if self.is_adapter:
            write_adapter(folder, *self._read_adapter())
            return
        for name, data in self._read_small_files().items():
            write(folder / name, data)
        config = self._read_config(folder)
        if self.is_value_model:
            config.save_pretrained(folder)
        export_weights(self._read_weights(config), folder)

    def compare(self, folder: Path) -> list[str]:
        """Return the differences between the model in `folder` and the checkpoint."""
        disable_progress_bar()
        if self.is_adapter:
            return [*self._compare_adapter(folder)]
        config = self._read_config(folder)
        return compare_weights(self._read_weights(config), folder) or [*self._compare_forward(folder, config)]

    @property
    def _load_options(self) -> dict[str, Any]:
        head = "value" if self.is_value_model else "tokens"
        return {"head": head, "trust_remote_code": self.trust_remote_code}

    def _read_base(self) -> Any:
        return base_weights_reader(path=self.base_path, **self._load_options)

    def _read_weights(self, config: PreTrainedConfig) -> Iterator[tuple[str, Tensor]]:
        """Return the weights under the names of `from_pretrained`; an adapter is merged into its base model."""
        return read_saved_weights(self.path, config, base=self._read_base(), **self._load_options)

    def _read_adapter(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return PEFT's configuration and tensors of the checkpoint's adapter."""
        saved = read_saved_adapter(self.path)
        if saved is None:
            raise CheckpointError(f"--adapter: {self.path} has full weights and no adapter; remove the option")
        base = self.base_path or saved.base
        check_fingerprint(saved, base)
        tensors = {peft_name(name): tensor for name, tensor in read_tensors(self.path, prefix="model.")}
        return saved.config | {"base_model_name_or_path": base}, tensors

    def _read_small_files(self) -> dict[str, bytes]:
        """Return config and tokenizer, from the base model or from the checkpoint, which stores them with the actor."""
        if self.base_path is not None:
            return read_model_files(self.base_path, trust_remote_code=self.trust_remote_code)
        for folder in (self.path / "huggingface", self.path.resolve().parent / "actor" / "huggingface"):
            if (folder / "config.json").is_file():
                files = [path for path in folder.iterdir() if path.is_file() and not path.name.endswith(WEIGHT_FILES)]
                return {path.name: path.read_bytes() for path in files}
        raise CheckpointError(f"checkpoint {self.path}: no huggingface/config.json; name a model by --hf_model_path")

    def _read_config(self, folder: Path) -> Any:
        for problem in model_problems(str(folder), trust_remote_code=self.trust_remote_code):
            raise CheckpointError(problem)
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder}: config.json cannot be used: {error}") from error
        if self.must_be_tied and not weight_format(config)["tied"]:
            raise CheckpointError(
                "--tie-word-embedding: config.json has tie_word_embeddings=false, and the head was trained separately; "
                "remove the option"
            )
        if self.is_value_model:
            kind: Any = AutoModelForTokenClassification._model_mapping[type(config)]
            config.architectures, config.num_labels, config.tie_word_embeddings = [kind.__name__], 1, False
        return config

    def _compare_adapter(self, folder: Path) -> Iterator[str]:
        """Compare the adapter as PEFT loads it with the checkpoint."""
        from peft import PeftModel

        config, expected = self._read_adapter()
        base = AutoModelForCausalLM.from_pretrained(
            config["base_model_name_or_path"], dtype="auto", trust_remote_code=self.trust_remote_code
        )
        try:
            model = PeftModel.from_pretrained(base, str(folder))
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            yield f"it cannot be loaded: {error}"
            return
        parameters = model.get_base_model().named_parameters()
        loaded = {peft_name(name): parameter.detach() for name, parameter in parameters if is_adapter(name)}
        for name in sorted(expected.keys() | loaded.keys()):
            if name not in loaded:
                yield f"{name} is missing"
            elif name not in expected:
                yield f"{name} is not in the checkpoint"
            elif not torch.equal(loaded[name], expected[name]):
                yield f"{name} has other values"
        peft_config: Any = model.peft_config["default"]
        scale, expected_scale = peft_config.lora_alpha / peft_config.r, config["lora_alpha"] / config["r"]
        if scale != expected_scale:
            yield f"its scale is {scale:g} instead of {expected_scale:g}"

    def _compare_forward(self, folder: Path, config: Any) -> Iterator[str]:
        """Compare the logits of the model in `folder` with those of a model that is filled from the shards."""
        kind: Any = AutoModelForTokenClassification if self.is_value_model else AutoModelForCausalLM
        arguments = {"trust_remote_code": self.trust_remote_code, "attn_implementation": "eager"}
        tokens = torch.arange(SAMPLE_TOKENS)[None] * 7919 % config.get_text_config().vocab_size
        try:
            loaded, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True, **arguments)
        except (OSError, ValueError, RuntimeError) as error:
            yield f"it cannot be loaded: {error}"
            return
        for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[keys]:
                yield f"from_pretrained reports {keys.replace('_', ' ')}: {', '.join(map(str, sorted(info[keys])[:3]))}"
        form, head = weight_format(config), loaded.get_output_embeddings()
        if head is not None and form["tied"] != (head.weight is loaded.get_input_embeddings().weight):
            yield f"the head is {'not ' * form['tied']}the embedding, unlike tie_word_embeddings in the config"
        with torch.no_grad():
            logits = loaded.eval()(tokens).logits
            del loaded
            filled = kind.from_config(config, dtype=form["dtype"], **arguments)
            weights = dict(iter_checkpoint_weights(self.path, base=self._read_base(), **form))  # the model's own names
            filled.load_state_dict(weights, strict=False, assign=True)
            filled.tie_weights()
            expected = filled.eval()(tokens).logits
        if not torch.equal(logits, expected):
            distance = float((logits.double() - expected.double()).abs().max())
            yield f"the logits of a forward pass differ by up to {distance:.3g}"
