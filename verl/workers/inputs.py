"""What a program gives as objects of transformers instead of names: looked at before anything is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.data.chat import knows_text, load_tokenizer
from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_model", "tokenizer_for"]


def check_model(model: Any) -> None:
    """Refuse what wraps a model: what is saved of it would be something else, and training would not reach it."""
    from transformers import PreTrainedModel

    kind = type(model).__name__
    if hasattr(model, "merge_and_unload") or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            [
                f"model: {kind} holds an adapter of PEFT; give the model without it, and let the run make one "
                '(TrainingConfig(settings={"actor_rollout_ref.actor.peft.lora_rank": 16})), or train all weights of '
                "model.merge_and_unload()"
            ]
        )
    if not isinstance(model, PreTrainedModel) or any(hasattr(each, "device_mesh") for each in model.parameters()):
        raise ConfigError(
            [
                f"model: {kind} must be a PreTrainedModel of transformers; FSDP, DDP and their like are made here: "
                "give what was wrapped (model.module), a path or a name"
            ]
        )


def tokenizer_for(model: PreTrainedModel, given: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The tokenizer that was given with a model, or else the one that lies where the model was loaded from."""
    if given is not None and not knows_text(given):
        name = f"{type(given).__name__} of {given.name_or_path!r}"
        raise ConfigError([f"tokenizer: {name} has no vocabulary; load it from where it was saved"])
    if given is not None:
        return given
    mend, path = "give one: AutoTokenizer.from_pretrained(...)", model.name_or_path
    if not path:
        raise ConfigError([f"tokenizer: there is none, and the model was not loaded from anywhere; {mend}"])
    try:
        return load_tokenizer(path)
    except (OSError, ValueError) as error:
        problem = f"tokenizer: there is none, and none where the model was loaded from, {path!r}; {mend}: {error}"
        raise ConfigError([problem]) from error
