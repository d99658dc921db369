"""Causal attention on packed sequences, registered with transformers; attention does not cross sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from verl.data.flat_batch import copy_to
from verl.errors import EngineError

if TYPE_CHECKING:
    from verl.training.sequence_parallel import SequenceGroup

PACKED_ATTENTION = "verl_packed"
"""The value of `attn_implementation`."""
FLASH_ATTENTION_3 = "flash_attn_interface"
"""The module of FlashAttention 3 that torch looks for. It is not on PyPI."""
HOPPER = 9
"""The major compute capability of the GPUs that it is for."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packing:
    """Keyword arguments for `packed_attention`, which models pass on as one object.

    Compiled layers do not look into it; for numbers that differ from batch to batch they would be compiled again.
    """

    arguments: Mapping[str, Any]


def register_attention() -> None:
    """Register the packed attention with transformers under `PACKED_ATTENTION`, without a mask."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, lambda *args, **kwargs: None)


def activate_flash_attention(device: torch.device | str, config: PreTrainedConfig) -> None:
    """Let torch call FlashAttention 3 on Hopper GPUs, if it is installed, instead of the version 2 that is in torch.

    It stays with version 2 if heads of the model's size fail in version 3. Untested: it needs a GPU.
    """
    if torch.device(device).type != "cuda" or torch.cuda.get_device_capability()[0] != HOPPER:
        return
    if find_spec(FLASH_ATTENTION_3) is None:
        return
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    try:
        activate_flash_attention_impl("FA3")
        states = torch.ones(9, 1, size, dtype=torch.bfloat16, device=device, requires_grad=True)
        attend_packed(states, states, states, **packing_kwargs([4, 5], device)).sum().backward()
        torch.accelerator.synchronize()
    except Exception as error:  # noqa: BLE001 - builds of it fail in many ways, and it is not needed
        restore_flash_attention_impl()
        _log.warning("FlashAttention 3 is installed, but cannot be used: %s", error)


def packing_kwargs(lengths: Sequence[int], device: torch.device | str) -> dict[str, Any]:
    """Return keyword arguments for `attend_packed` that describe the boundaries of the sequences.

    `runs` are (count, length) of adjacent sequences of equal length; the others have the names that the
    variable-length kernels of transformers use.
    """
    ends = copy_to(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
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
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: query [1, A, T, D], key and value [1, K, T, D] -> [1, T, A, D].

    With `prefixes` and `key_rows` of `SharedPrompts`, also to the prompts that sequences share. In a `sequence_group`
    these are a rank's slice of all `count` tokens. `dropout` is ignored.
    """
    model = type(module).__name__
    if packing is None:
        raise EngineError(
            f"{model}: attention was called without the boundaries of its sequences; this model does not pass keyword "
            "arguments on to its attention, so it cannot be trained on packed sequences"
        )
    for name in ("position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise EngineError(f"{model}: its attention uses {name}, which packed attention does not support")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise EngineError(f"{model}: packed attention supports only causal attention without an additional mask")
    arguments = dict(packing.arguments)
    group: SequenceGroup | None = arguments.pop("sequence_group", None)
    attend: Callable[..., Tensor] = attend_packed if group is None else partial(group.attend, attend_packed)
    flat = attend(
        *(states[0].transpose(0, 1) for states in (query, key, value)),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        **arguments,
    )
    return flat.unsqueeze(0), None


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    **packing: Any,
) -> Tensor:
    """Causal attention within each sequence of a flat batch, [T, heads, D] -> [T, A, D]; for `packing_kwargs`."""
    kernel: Callable[..., Tensor] = _KERNELS.get(query.device.type, _attend_by_runs)
    return kernel(query, key, value, scaling=scaling, window=window, softcap=softcap, **packing)


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
