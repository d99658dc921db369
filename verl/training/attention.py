"""Attention over sequences laid end to end: each attends to itself alone, and nothing is computed for padding.

transformers lets an attention function of ours stand in for its own, by name. The model is called on one row of T
tokens, and `packing(...)` makes the keyword arguments that travel through its layers to `packed_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from verl.errors import EngineError

__all__ = ["NAME", "packed_attention", "packing", "register"]

NAME = "verl_packed"
"""What `attn_implementation` is set to."""


def register() -> None:
    """Make the packed attention known to transformers under `NAME`; it builds no mask for it."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def packing(lengths: Sequence[int], device: torch.device | str) -> dict[str, Any]:
    """Keyword arguments for a model's forward that say where each sequence begins.

    `runs` are (sequences, length) of neighbours of equal length, as plain numbers; the others carry the names that
    transformers' own variable-length kernels know.
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: query [1, A, T, D], key and value [1, K, T, D] -> [1, T, A, D].

    `dropout` is what the model would like; none is applied.
    """
    model = type(module).__name__
    if kwargs.get("runs") is None:
        raise EngineError(
            f"{model}: attention was called without the boundaries of its sequences; this model does not hand keyword "
            "arguments on to its attention, so it cannot be trained on packed sequences"
        )
    for name in ("position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise EngineError(f"{model}: {name} is used in its attention, which the packed attention does not support")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise EngineError(f"{model}: only causal attention without a further mask can be packed")
    kernel = _KERNELS.get(query.device.type, _by_runs)
    flat = kernel(
        *(states[0].transpose(0, 1) for states in (query, key, value)),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        **kwargs,
    )
    return flat.unsqueeze(0), None


def _by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    runs: Sequence[tuple[int, int]],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    **_: Any,
) -> Tensor:
    """[T, heads, D] -> [T, A, D]: one batched call per run of equal lengths, on views of the flat arrays."""
    sizes = [count * length for count, length in runs]
    parts = []
    for (count, length), *qkv in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (states.unflatten(0, (count, length)).transpose(1, 2) for states in qkv)  # [n, heads, L, D]
        if softcap is not None:
            out = _softcapped(q, k, v, scaling, window, softcap)
        elif window is not None and length > window:
            mask = _band(length, window, q.device)
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _band(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool: token i sees the last `window` tokens up to itself."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() if window is None else ones.tril().triu(1 - window)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, softcap: float) -> Tensor:
    """Attention whose scores are squeezed by softcap * tanh(score / softcap), spelt out: no kernel of torch does it."""
    groups = q.shape[1] // k.shape[1]
    k, v = (states.repeat_interleave(groups, dim=1) for states in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_band(q.shape[-2], window, q.device), float("-inf"))
    precise = torch.promote_types(q.dtype, torch.float32)
    return scores.softmax(-1, dtype=precise).to(q.dtype) @ v


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> Tensor:
    """The same in one call of torch's variable-length flash kernel. Written for GPUs; no machine here has run it."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if softcap is not None or not half:
        return _by_runs(query, key, value, scaling=scaling, window=window, softcap=softcap, **kwargs)
    from torch.nn.attention.varlen import varlen_attn  # present only in torch that was built with flash attention

    back = -1 if window is None else window - 1
    out = varlen_attn(
        query,
        key,
        value,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(back, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out


_KERNELS = {"cuda": _varlen}
"""Kernels better than SDPA run by run, by type of device."""
