"""Hugging Face models on packed sequences: one row of tokens in, log-probs and entropies or values out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.algorithms.objective import ModelOutput, ValueOutput
from verl.training.fsdp.shared_prompts import SharedPrompts
from verl.training.kernels.attention import Packing, packing_kwargs
from verl.training.kernels.logprobs import (
    PLAIN,
    LastLayer,
    token_logprobs,
    vocabulary_kl,
)
from verl.training.sequence_parallel import SequenceGroup


class PackedModel(nn.Module):
    """The root module of a sharded model: a backbone on packed sequences; subclasses add the head.

    `hf` holds all parameters under their Hugging Face names. A forward pass returns a tuple, because FSDP looks there
    for the tensors that a backward pass starts from.
    """

    verified: str
    """What is compared to verify that packing does not change the results."""

    def __init__(self, hf: PreTrainedModel | ScoredBackbone) -> None:
        super().__init__()
        self.hf = hf
        self.note = ""  # for the user, about how it was loaded
        self.sequence_group: SequenceGroup | None = None  # the ranks that share the tokens of a batch

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return cast(PreTrainedModel, self.hf.base_model)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        shared: SharedPrompts | None = None,
        *,
        at: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states of tokens [T], which form sequences of `lengths`: [T, D], or only those `at`.

        positions [T] restart at 0 in each sequence. With `shared` prompts each of them is computed once. In a
        sequence group, `at` must be tokens that this rank computes.
        """
        if shared is None:
            kwargs = packing_kwargs(lengths, tokens.device)
        else:
            tokens, positions, kwargs = tokens[shared.computed], positions[shared.computed], shared.attention_kwargs()
            at = shared.rows if at is None else shared.rows[at]
        if (group := self.sequence_group) is not None:
            assert at is not None
            at = at - group.part(len(tokens)).start
            kwargs |= {"sequence_group": group, "count": len(tokens)}
            tokens, positions = group.take(tokens), group.take(positions)
        states = self.backbone(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, packing=Packing(kwargs)
        ).last_hidden_state[0]
        return states if at is None else states[at]

    def find_targets(self, mask: Tensor, shared: SharedPrompts | None) -> Tensor:
        """Return the tokens of mask [T] that this rank predicts: those whose previous token it computes."""
        targets = mask.nonzero().squeeze(-1)
        if self.sequence_group is None:
            return targets
        rows = targets - 1 if shared is None else shared.rows[targets - 1]
        part = self.sequence_group.part(len(mask) if shared is None else len(shared.computed))
        return targets[(rows >= part.start) & (rows < part.stop)]

    def place(self, values: Tensor, targets: Tensor, count: int) -> Tensor:
        """Return the values of all `count` tokens: those that this rank and its group have predicted, else 0."""
        placed = values.new_zeros(count).index_copy(0, targets, values)
        return placed if self.sequence_group is None else self.sequence_group.collect(placed)

    def layers(self) -> list[nn.Module]:
        """Return the decoder layers, the units of sharding."""
        names = set(self.backbone._no_split_modules or ())
        # Also bases: FSDP gives a sharded layer a class of its own.
        return [each for each in self.backbone.modules() if names & {base.__name__ for base in type(each).__mro__}]

    def fp32_modules(self) -> list[nn.Module]:
        """Return the modules that compute in float32, whatever the layers compute in."""
        return []


class PackedCausalLM(PackedModel):
    """A policy. Log-probs are computed inside `forward`, where the weight of the head is unsharded."""

    verified = "log-probs"
    hf: PreTrainedModel

    def __init__(self, hf: PreTrainedModel, chunk: int | None = None, *, fp32_head: bool = False) -> None:
        super().__init__(hf)
        self.chunk, self.kernels, self.fp32_head = chunk, PLAIN, fp32_head
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
        shared: SharedPrompts | None = None,
        *,
        reference: LastLayer | None = None,
        teacher: LastLayer | None = None,
        with_squares: bool = False,
        return_hidden: bool = False,
        kept_ids: Tensor | None = None,
    ) -> ModelOutput | LastLayer:
        """Return log-probs and entropies [T] where mask [T] is True, 0 elsewhere.

        With a `reference` or a `teacher`, also return the KL to it; `with_squares`, also the sums of squared
        probabilities. With `return_hidden`, return the last layer instead, which can be the `reference` or `teacher` of
        another model. With `kept_ids` [T, K], all of these are over the kept tokens of each position only.
        """
        targets = self.find_targets(mask, shared)
        # A token is predicted from the previous token of its sequence.
        previous = self.hidden_states(tokens, positions, lengths, shared, at=targets - 1)
        head = self.hf.get_output_embeddings()
        layer = LastLayer(previous, head.weight, getattr(head, "bias", None), self.scale, self.softcap)
        if kept_ids is not None:
            layer = layer._replace(kept=kept_ids[targets].long())
        if self.fp32_head:
            layer = layer.to(torch.float32)
        if return_hidden:
            return layer
        options: dict[str, Any] = {"temperature": temperature, "chunk": self.chunk}
        logprobs, entropy, *squares = token_logprobs(
            layer, tokens[targets], kernels=self.kernels, with_squares=with_squares, **options
        )
        kls = (None if other is None else vocabulary_kl(layer, other, **options) for other in (reference, teacher))
        place = partial(self.place, targets=targets, count=len(tokens))
        output = ModelOutput(place(logprobs), place(entropy), *(None if kl is None else place(kl) for kl in kls))
        return output._replace(sum_pi_squared=place(squares[0])) if squares else output

    def forward_unpacked(self, tokens: Tensor) -> tuple[Tensor, float]:
        """Return log-probs [T] by the model's own head, 0 at the first token, and the largest |logit|."""
        logits = self.hf(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)
        return torch.cat([logprobs.new_zeros(1), logprobs]), float(logits.abs().max())

    def forward_packed(
        self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], shared: SharedPrompts | None = None
    ) -> Tensor:
        """Return log-probs [T], 0 at the first token of each sequence."""
        return cast(ModelOutput, self.forward(tokens, positions, positions > 0, lengths, 1.0, shared)).logprobs


class PackedValueModel(PackedModel):
    """A critic: one value per state, from a head that is stored and computed in float32."""

    verified = "hidden states"
    hf: ScoredBackbone

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        temperature: float,
        shared: SharedPrompts | None = None,
    ) -> ValueOutput:
        """Return the values [T] of the states before tokens [T] where mask [T] is True, 0 elsewhere."""
        targets = self.find_targets(mask, shared)
        states = self.hidden_states(tokens, positions, lengths, shared, at=targets - 1)
        values = self.hf.score(states.float()).squeeze(-1)
        return ValueOutput(self.place(values, targets, len(tokens)))

    def fp32_modules(self) -> list[nn.Module]:
        """Return the head: a value in bfloat16 would have three digits."""
        return [self.hf.score]

    def forward_unpacked(self, tokens: Tensor) -> tuple[Tensor, float]:
        """Return hidden states [T, D], because a new head gives only zeros, and the largest |state|."""
        states = self.backbone(input_ids=tokens.unsqueeze(0), use_cache=False).last_hidden_state[0].float()
        return states, float(states.abs().max())

    def forward_packed(
        self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], shared: SharedPrompts | None = None
    ) -> Tensor:
        """Return hidden states [T, D]."""
        return self.hidden_states(tokens, positions, lengths, shared).float()


class ScoredBackbone(nn.Module):
    """A backbone with a scalar head, named as in Hugging Face's token classification with one label.

    The language-model head of `hf` is dropped; embeddings tied to it are kept. A scalar head of `hf` is reused. A new
    one is zero, so that an untrained critic predicts 0 and the first advantages are the rewards without noise.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.config = hf.config
        self._name = hf.base_model_prefix
        self.add_module(self._name, hf.base_model)
        heads = [module for module in hf.children() if isinstance(module, nn.Linear) and module.out_features == 1]
        self.score = heads[0].float() if heads else _make_zero_head(hf.config.get_text_config().hidden_size)

    @property
    def base_model(self) -> PreTrainedModel:
        """The backbone, under the name that Hugging Face models use."""
        return cast(PreTrainedModel, self.get_submodule(self._name))


def _make_zero_head(size: int) -> nn.Linear:
    head = nn.Linear(size, 1, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
