"""Regional compilation: the decoder layers of a model are compiled one by one, and share the compiled code.

What torch.compile fuses in a layer is its elementwise work: norms, rotary embeddings, activations and residuals.
Attention on packed sequences, gradient checkpointing and FSDP stay outside: FSDP gathers a layer before its forward is
called.
"""

from __future__ import annotations

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from transformers import AttentionInterface

from verl.training.fsdp.model import PackedModel
from verl.training.kernels.attention import PACKED_ATTENTION, packed_attention
from verl.training.kernels.compilation import Compiler

VARIANTS = 32
"""Versions of a layer that may be compiled: with and without gradients, adapters, windows."""


def compile_layers(model: PackedModel) -> Compiler | None:
    """Compile the layers of a model at their first call; None if all of them have experts.

    How many tokens an expert gets differs from batch to batch, so layers with experts are left as they are.
    """
    layers = [layer for layer in model.layers() if not any(map(is_experts, layer.modules()))]
    if not layers:
        return None
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    torch._dynamo.config.recompile_limit = VARIANTS
    # By default torch assumes that nothing but weights changes in modules that FSDP manages; adapters are disabled.
    torch._dynamo.config.skip_fsdp_guards = False
    torch._functorch.config.force_non_lazy_backward_lowering = True  # else a failure would be too late to fall back
    compiler = Compiler()
    for layer in layers:
        layer.forward = compiler.compile(layer.forward)
    return compiler


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the experts of a layer."""
    return hasattr(module, "_is_expert_parallel")
