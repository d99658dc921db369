"""A Hugging Face causal model as the engine sees it: a packed row of tokens in, log-probs and entropies out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from verl.errors import EngineError
from verl.training import attention
from verl.training.logprobs import token_logprobs

__all__ = ["PackedCausalLM", "load_model"]

LAYER_TYPES = {"full_attention", "sliding_attention"}


class PackedCausalLM(nn.Module):
    """The root that is sharded: log-probs are computed inside its forward, where the head's weight is whole."""

    def __init__(self, hf: PreTrainedModel, chunk: int | None = None) -> None:
        super().__init__()
        self.hf = hf
        self.chunk = chunk
        config = hf.config.get_text_config()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, lengths: Sequence[int], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [T] of tokens [T] where mask [T], 0 elsewhere; positions [T] restart per sequence."""
        states = self.hf.base_model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            **attention.packing(lengths, tokens.device),
        ).last_hidden_state[0]
        targets = mask.nonzero().squeeze(-1)
        head = self.hf.get_output_embeddings()
        logprobs, entropy = token_logprobs(
            states[targets - 1],  # a token is predicted from the one before it, which is in its own sequence
            head.weight,
            tokens[targets],
            bias=getattr(head, "bias", None),
            scale=self.scale,
            softcap=self.softcap,
            temperature=temperature,
            chunk=self.chunk,
        )
        zeros = logprobs.new_zeros(len(tokens))
        return zeros.index_copy(0, targets, logprobs), zeros.index_copy(0, targets, entropy)

    def layers(self) -> list[nn.Module]:
        """The decoder layers: the blocks that are sharded and gathered one after another."""
        kinds = set(self.hf._no_split_modules or ())
        return [module for module in self.hf.modules() if type(module).__name__ in kinds]


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    chunk: int | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
) -> PackedCausalLM:
    """Load the model of `path` into host memory and prove that packing does not change what it computes.

    It has no dropout, whatever its configuration says: an update must see the log-probs that were computed before it.
    """
    attention.register()
    disable_progress_bar()  # the console is ours
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _without_dropout(config)
        # "eager" is the model's own word on its attention: transformers' sdpa leaves out softcaps without saying so.
        hf = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise EngineError(f"model {path}: cannot be loaded: {error}") from error
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _check_layers(hf, path)
    model = PackedCausalLM(hf, chunk).eval()
    expected, largest = _own_logprobs(hf, _SAMPLE_LENGTHS)
    hf.set_attn_implementation(attention.NAME)
    _check_packing(model, expected, largest, path)
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


_SAMPLE_LENGTHS = (7, 4, 4)


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


def _sample(hf: PreTrainedModel, lengths: Sequence[int]) -> list[Tensor]:
    """Token ids spread over the vocabulary, the same on every rank."""
    vocabulary = hf.config.get_text_config().vocab_size
    flat = torch.arange(sum(lengths)) * 7919 % vocabulary
    return list(flat.split(list(lengths)))


@torch.no_grad()
def _own_logprobs(hf: PreTrainedModel, lengths: Sequence[int]) -> tuple[Tensor, float]:
    """What the model itself says of the sample, one sequence at a time: [T], 0 at first tokens; its largest |logit|."""
    parts, largest = [], 0.0
    for tokens in _sample(hf, lengths):
        logits = hf.eval()(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)
        parts += [logprobs.new_zeros(1), logprobs]
        largest = max(largest, float(logits.abs().max()))
    return torch.cat(parts), largest


@torch.no_grad()
def _check_packing(model: PackedCausalLM, expected: Tensor, largest: float, path: str) -> None:
    """Half the digits that the weights' type gives to a logit must agree; the rest is left to rounding."""
    lengths = _SAMPLE_LENGTHS
    tokens = torch.cat(_sample(model.hf, lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    logprobs, _ = model(tokens, positions, positions > 0, lengths, 1.0)
    gap = float((logprobs - expected).abs().max())
    limit = math.sqrt(torch.finfo(next(model.parameters()).dtype).eps) * largest + 1e-5  # log-probs are float32
    if not gap <= limit:
        raise EngineError(
            f"model {path} ({model.hf.config.model_type}): log-probs of packed sequences differ from the model's own "
            f"by {gap:.2g}, where rounding explains {limit:.2g}; this model type is not supported by the packed path"
        )
