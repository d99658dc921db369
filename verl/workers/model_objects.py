"""Checks of the transformers objects that a program passes instead of names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.data.chat import has_text_vocabulary, load_tokenizer
from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_model_object(model: Any) -> None:
    """Refuse wrapped models: they are saved differently, and training would not reach their weights."""
    from transformers import PreTrainedModel

    kind = type(model).__name__
    if hasattr(model, "merge_and_unload") or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            [
                f"model: {kind} has a PEFT adapter; pass the model without it and let the run create one "
                '(TrainingConfig(settings={"actor_rollout_ref.actor.peft.lora_rank": 16})), or train all weights of '
                "model.merge_and_unload()"
            ]
        )
    if not isinstance(model, PreTrainedModel) or any(hasattr(each, "device_mesh") for each in model.parameters()):
        raise ConfigError(
            [
                f"model: {kind} must be a transformers PreTrainedModel; verl applies FSDP itself: pass the wrapped "
                "model (model.module), a path or a name"
            ]
        )


def find_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return `tokenizer`, or else the one at the path that the model was loaded from."""
    if tokenizer is not None and not has_text_vocabulary(tokenizer):
        name = f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r}"
        raise ConfigError([f"tokenizer: {name} has no vocabulary; load it from the path where it was saved"])
    if tokenizer is not None:
        return tokenizer
    path, fix = model.name_or_path, "Pass AutoTokenizer.from_pretrained(...)"
    if not path:
        raise ConfigError([f"tokenizer: must be given, since the model was not loaded from a path. {fix}"])
    try:
        return load_tokenizer(path)
    except (OSError, ValueError) as error:
        raise ConfigError([f"tokenizer: must be given, since there is none at {path!r}. {fix}: {error}"]) from error
