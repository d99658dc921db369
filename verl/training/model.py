"""A Hugging Face model as the engine sees it: a packed row of tokens in, log-probs and entropies or values out."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from verl.errors import EngineError
from verl.model_safety import MODEL_ATTENTION, PICKLED, local_path, model_problems
from verl.training import attention
from verl.training.engine import ModelOutput, ValueOutput
from verl.training.families import LAYER_TYPES
from verl.training.logprobs import PLAIN, LastLayer, token_logprobs, vocabulary_kl
from verl.training.lora import add_adapter
from verl.training.settings import Head, LoraSettings
from verl.weights.hf_names import check_names

__all__ = ["PackedCausalLM", "PackedValueModel", "ScoredBackbone", "load_model", "select_model_class"]


class PackedModel(nn.Module):
    """The root that is sharded: a backbone on packed sequences; subclasses add what is made of its hidden states.

    `hf` holds all parameters under their Hugging Face names. A forward pass returns a tuple, in which FSDP finds the
    tensors that a backward pass may start from.
    """

    proof: str
    """What is compared to prove that packing changes nothing."""

    def __init__(self, hf: PreTrainedModel | ScoredBackbone) -> None:
        super().__init__()
        self.hf = hf

    @property
    def backbone(self) -> PreTrainedModel:
        """All but the head."""
        return cast(PreTrainedModel, self.hf.base_model)

    def states(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Last hidden states [T, D] of tokens [T] that form sequences of `lengths`; positions [T] restart in each."""
        return self.backbone(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            **attention.packing(lengths, tokens.device),
        ).last_hidden_state[0]

    def layers(self) -> list[nn.Module]:
        """The decoder layers: the blocks that are sharded and gathered one after another."""
        kinds = set(self.backbone._no_split_modules or ())
        return [module for module in self.backbone.modules() if type(module).__name__ in kinds]

    def fp32_modules(self) -> list[nn.Module]:
        """Modules that compute in the type in which they are kept, whatever the layers compute in."""
        return []

    def forward_unpacked(self, tokens: Tensor) -> tuple[Tensor, float]:
        """Of one sequence, computed without packing: what `forward_packed` is to give; the largest number behind it."""
        raise NotImplementedError

    def forward_packed(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """The same of all sequences, packed."""
        raise NotImplementedError


class PackedCausalLM(PackedModel):
    """A policy: log-probs are computed inside its forward, where the head's weight is whole."""

    proof = "log-probs"
    hf: PreTrainedModel

    def __init__(self, hf: PreTrainedModel, chunk: int | None = None) -> None:
        super().__init__(hf)
        self.chunk, self.kernels = chunk, PLAIN
        config = hf.config.get_text_config()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        temperature: float,
        *,
        reference: LastLayer | None = None,
        return_hidden: bool = False,
    ) -> ModelOutput | LastLayer:
        """Log-probs and entropies [T] of tokens [T] where mask [T], 0 elsewhere; positions [T] restart per sequence.

        With the last layer of a `reference` the KL to it as well. With `return_hidden`, return that last layer.
        """
        states = self.states(tokens, positions, lengths)
        targets = mask.nonzero().squeeze(-1)
        head = self.hf.get_output_embeddings()
        before = states[targets - 1]  # a token is predicted from the one before it, which is in its own sequence
        layer = LastLayer(before, head.weight, getattr(head, "bias", None), self.scale, self.softcap)
        if return_hidden:
            return layer
        how: dict[str, Any] = {"temperature": temperature, "chunk": self.chunk}
        numbers = [*token_logprobs(layer, tokens[targets], kernels=self.kernels, **how)]
        if reference is not None:
            numbers.append(vocabulary_kl(layer, reference, **how))
        zeros = numbers[0].new_zeros(len(tokens))
        return ModelOutput(*(zeros.index_copy(0, targets, each) for each in numbers))

    def forward_unpacked(self, tokens: Tensor) -> tuple[Tensor, float]:
        """Log-probs [T] by the model's own head, 0 at the first token; the largest |logit|."""
        logits = self.hf(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)
        return torch.cat([logprobs.new_zeros(1), logprobs]), float(logits.abs().max())

    def forward_packed(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Log-probs [T], 0 at first tokens."""
        return self(tokens, positions, positions > 0, lengths, 1.0).logprobs


class PackedValueModel(PackedModel):
    """A critic: one number per state, from a head that is kept and computed in float32."""

    proof = "hidden states"
    hf: ScoredBackbone

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, lengths: Sequence[int], temperature: float
    ) -> ValueOutput:
        """Values [T] of the states that tokens [T] were drawn from where mask [T], 0 elsewhere, at any temperature."""
        states = self.states(tokens, positions, lengths)
        targets = mask.nonzero().squeeze(-1)
        values = self.hf.score(states[targets - 1].float()).squeeze(-1)  # the state that a token left, as log-probs do
        return ValueOutput(values.new_zeros(len(tokens)).index_copy(0, targets, values))

    def fp32_modules(self) -> list[nn.Module]:
        """The head: a value in bfloat16 would have three digits."""
        return [self.hf.score]

    def forward_unpacked(self, tokens: Tensor) -> tuple[Tensor, float]:
        """Hidden states [T, D], since values say nothing while the head is zero; the largest of them."""
        states = self.backbone(input_ids=tokens.unsqueeze(0), use_cache=False).last_hidden_state[0].float()
        return states, float(states.abs().max())

    def forward_packed(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states [T, D]."""
        return self.states(tokens, positions, lengths).float()


class ScoredBackbone(nn.Module):
    """A backbone with a scalar head, named as in Hugging Face's token classification with one label.

    It takes the backbone from `hf` and lets go of the rest: a language-model head is not kept, and embeddings that were
    tied to it stay. The head is the scalar one of `hf` if it has one; a new one is zero, so that a critic which
    has seen no rewards yet predicts none, and first advantages are rewards without noise.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.config = hf.config
        self._name = hf.base_model_prefix
        self.add_module(self._name, hf.base_model)
        self.score = _scalar_head(hf) or _zero_head(hf.config.get_text_config().hidden_size)

    @property
    def base_model(self) -> PreTrainedModel:
        """The backbone, as Hugging Face's models call it."""
        return cast(PreTrainedModel, self.get_submodule(self._name))


def _scalar_head(hf: PreTrainedModel) -> nn.Linear | None:
    heads = [module for module in hf.children() if isinstance(module, nn.Linear) and module.out_features == 1]
    return heads[0].float() if heads else None


def _zero_head(size: int) -> nn.Linear:
    head = nn.Linear(size, 1, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    head: Head = "tokens",
    chunk: int | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    lora: LoraSettings | None = None,
) -> PackedCausalLM | PackedValueModel:
    """Load the model of `path` into host memory and prove that packing does not change what it computes.

    It has no dropout, whatever its configuration says: an update must see the log-probs that were computed before it.
    """
    for problem in model_problems(local_path(path), trust_remote_code=trust_remote_code):
        raise EngineError(problem)
    attention.register()
    disable_progress_bar()  # the console is ours
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _without_dropout(config)
        hf = select_model_class(config, head).from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=MODEL_ATTENTION, trust_remote_code=trust_remote_code
        )
    except pickle.UnpicklingError as error:
        raise EngineError(f"model {path}: {PICKLED}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"model {path}: cannot be loaded: {error}") from error
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _check_layers(hf, path)
    check_names(hf, path)
    model = PackedCausalLM(hf, chunk) if head == "tokens" else PackedValueModel(ScoredBackbone(hf))
    _switch_to_packing(model.eval(), path)
    if lora is not None:
        add_adapter(model, lora, path)
    if gradient_checkpointing:
        model.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


_CLASSIFIERS = {
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}


def select_model_class(config: PreTrainedConfig, head: Head) -> Any:
    """The class to load: a causal model, unless a critic is asked for and the checkpoint has a scalar head."""
    name = (config.architectures or [""])[0]
    if head == "value" and config.num_labels == 1:
        for ending, kind in _CLASSIFIERS.items():
            if name.endswith(ending):
                return kind
    return AutoModelForCausalLM


def _without_dropout(config: PreTrainedConfig) -> None:
    """Zero every rate in a configuration: `attention_dropout`, `resid_pdrop`, `layerdrop` and their like."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def _check_layers(hf: PreTrainedModel, path: str) -> None:
    config = hf.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or LAYER_TYPES)
    if odd := kinds - LAYER_TYPES:
        raise EngineError(
            f"model {path} ({config.model_type}): layers of type {', '.join(sorted(odd))} cannot be trained on packed "
            f"sequences; supported are {', '.join(sorted(LAYER_TYPES))}"
        )


_SAMPLE_LENGTHS = (7, 4, 4)


@torch.no_grad()
def _switch_to_packing(model: PackedModel, path: str) -> None:
    """Replace the model's own attention, and prove on a sample that sequences laid end to end come out as alone.

    Half the digits that the weights' type gives to the numbers behind must agree; the rest is left to rounding.
    """
    lengths, config = _SAMPLE_LENGTHS, model.backbone.config
    # Token ids spread over the vocabulary, the same on every rank.
    tokens = torch.arange(sum(lengths)) * 7919 % config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(length) for length in lengths])
    unpacked = [model.forward_unpacked(sequence) for sequence in tokens.split(list(lengths))]
    model.backbone.set_attn_implementation(attention.NAME)
    expected, largest = (
        torch.cat([numbers for numbers, _ in unpacked]),
        max(size for _, size in unpacked),
    )
    gap = float((model.forward_packed(tokens, positions, lengths) - expected).abs().max())
    limit = math.sqrt(torch.finfo(model.backbone.dtype).eps) * largest + 1e-5  # log-probs are float32
    if not gap <= limit:
        raise EngineError(
            f"model {path} ({config.model_type}): {model.proof} of packed sequences differ from the model's own by "
            f"{gap:.2g}, where rounding explains {limit:.2g}; this model type is not supported by the packed path"
        )
