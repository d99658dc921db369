"""Decodes a batch at once on the CPU: SGLang's `torch_native` attention takes one sequence after another.

SGLang calls `register` in each of its processes; see `write_plugin` in tests/sglang_environment.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def register() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    one_by_one = TorchNativeAttnBackend._run_sdpa_forward_decode

    def decode(
        self: Any,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        if encoder_lens is not None or (sliding_window_size is not None and sliding_window_size > -1):
            return one_by_one(
                *(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens),
                *(scaling, enable_gqa, causal, is_cross_attn, sliding_window_size),
            )
        longest = int(seq_lens.max())
        mask = torch.arange(longest)[None] < seq_lens[:, None]
        slots = torch.where(mask, req_to_token[req_pool_indices, :longest], 0)
        keys, values = (cache[slots].to(query.dtype).transpose(1, 2) for cache in (k_cache, v_cache))
        output.copy_(
            scaled_dot_product_attention(
                query.unsqueeze(2), keys, values, attn_mask=mask[:, None, None], scale=scaling, enable_gqa=enable_gqa
            ).squeeze(2)
        )
        return output

    TorchNativeAttnBackend._run_sdpa_forward_decode = decode
