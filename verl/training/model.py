"""Hugging Face models on packed sequences: one row of tokens in, log-probs and entropies or values out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from verl.algorithms.objective import ModelOutput, ValueOutput
from verl.errors import EngineError
from verl.training.logprobs import (
    PLAIN,
    LastLayer,
    token_logprobs,
    token_logprobs_and_squares,
    vocabulary_kl,
)
from verl.training.sequence_parallel import SequenceGroup
from verl.training.shared_prompts import SharedPrompts

PACKED_ATTENTION = "verl_packed"
"""The value of `attn_implementation`."""


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
        self.sequence_group: SequenceGroup | None = None  # of ranks that share the tokens of a batch

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
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **kwargs
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
    ) -> ModelOutput | LastLayer:
        """Return log-probs and entropies [T] where mask [T] is True, 0 elsewhere.

        With a `reference` or a `teacher`, also return the KL to it; `with_squares`, also the sums of squared
        probabilities. With `return_hidden`, return the last layer instead, which can be the `reference` or `teacher` of
        another model.
        """
        targets = self.find_targets(mask, shared)
        # A token is predicted from the one before it, in the same sequence.
        previous = self.hidden_states(tokens, positions, lengths, shared, at=targets - 1)
        head = self.hf.get_output_embeddings()
        layer = LastLayer(previous, head.weight, getattr(head, "bias", None), self.scale, self.softcap)
        if self.fp32_head:
            layer = layer.to(torch.float32)
        if return_hidden:
            return layer
        options: dict[str, Any] = {"temperature": temperature, "chunk": self.chunk}
        compute = token_logprobs_and_squares if with_squares else token_logprobs
        logprobs, entropy, *squares = compute(layer, tokens[targets], kernels=self.kernels, **options)
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


def register_attention() -> None:
    """Register the packed attention with transformers under `PACKED_ATTENTION`, without a mask."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, lambda *args, **kwargs: None)


def packing_kwargs(lengths: Sequence[int], device: torch.device | str) -> dict[str, Any]:
    """Return keyword arguments for a model's forward that describe the boundaries of the sequences.

    `runs` are (count, length) of adjacent sequences of equal length; the others have the names that the
    variable-length kernels of transformers use.
    """
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths, default=0)
    return {
        "runs": tuple((len(list(run)), length) for length, run in groupby(lengths)),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sequence_group: SequenceGroup | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: query [1, A, T, D], key and value [1, K, T, D] -> [1, T, A, D].

    With `prefixes` and `key_rows` of `SharedPrompts`, also to the prompts that sequences share. In a `sequence_group`
    these are a rank's slice of all `count` tokens. `dropout` is ignored.
    """
    model = type(module).__name__
    if kwargs.get("runs") is None:
        raise EngineError(
            f"{model}: attention was called without the boundaries of its sequences; this model does not pass keyword "
            "arguments on to its attention, so it cannot be trained on packed sequences"
        )
    for name in ("position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise EngineError(f"{model}: its attention uses {name}, which packed attention does not support")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise EngineError(f"{model}: packed attention supports only causal attention without an additional mask")
    kernel = _KERNELS.get(query.device.type, _attend_by_runs)
    attend: Callable[..., Tensor] = kernel if sequence_group is None else partial(sequence_group.attend, kernel)
    flat = attend(
        *(states[0].transpose(0, 1) for states in (query, key, value)),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        **kwargs,
    )
    return flat.unsqueeze(0), None


def _attend_by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    runs: Sequence[tuple[int, int]],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    prefixes: Sequence[tuple[int, int] | None] | None = None,
    **_: Any,
) -> Tensor:
    """One batched call per run of equal lengths, on views of the flat arrays: [T, heads, D] -> [T, A, D]."""
    sizes = [count * length for count, length in runs]
    parts = []
    for (count, length), prefix, *qkv in zip(
        runs, prefixes or [None] * len(runs), query.split(sizes), key.split(sizes), value.split(sizes), strict=True
    ):
        q, k, v = (states.unflatten(0, (count, length)).transpose(1, 2) for states in qkv)  # [n, heads, L, D]
        if prefix is not None:
            k, v = _prepend(key[slice(*prefix)], k), _prepend(value[slice(*prefix)], v)
        if softcap is not None:
            out = _attend_softcapped(q, k, v, scaling, window, softcap)
        elif prefix is not None or (window is not None and length > window):
            mask = _causal_mask(length, k.shape[2], window, q.device)
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _prepend(prefix: Tensor, states: Tensor) -> Tensor:
    """Return the states [n, heads, L, D] after those of a shared prefix [P, heads, D]."""
    return torch.cat([prefix.transpose(0, 1).expand(len(states), -1, -1, -1), states], dim=2)


def _causal_mask(length: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [L, K] by which the last L of K tokens attend to the last `window` tokens up to themselves."""
    ones = torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)
    return ones if window is None else ones.triu(keys - length + 1 - window)


def _attend_softcapped(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, softcap: float
) -> Tensor:
    """Attention with logits capped by softcap * tanh(logit / softcap), written out because no torch kernel does it."""
    groups = q.shape[1] // k.shape[1]
    k, v = (states.repeat_interleave(groups, dim=1) for states in (k, v))
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~_causal_mask(q.shape[-2], k.shape[-2], window, q.device), float("-inf"))
    dtype = torch.promote_types(q.dtype, torch.float32)
    return logits.softmax(-1, dtype=dtype).to(q.dtype) @ v


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    key_rows: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The same in one call of torch's variable-length flash kernel, for GPUs. Untested: it needs one.

    If a sequence has more keys than queries, its queries are the last ones, as in the kernel.
    """
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if softcap is not None or not is_half:
        return _attend_by_runs(query, key, value, scaling=scaling, window=window, softcap=softcap, **kwargs)
    from torch.nn.attention.varlen import varlen_attn  # only in builds of torch with flash attention

    if key_rows is not None:
        key, value = key[key_rows], value[key_rows]
    lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    window_size = -1 if window is None else window - 1, 0
    out = varlen_attn(query, key, value, *lengths, scale=scaling, window_size=window_size, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


_KERNELS = {"cuda": _attend_varlen}
"""Device type -> kernel, where there is one faster than SDPA by runs."""
