"""How a model is spread over the ranks: the device mesh, and FSDP2 on it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from verl.training.fsdp.expert_parallel import distribute_experts
from verl.training.fsdp.model import PackedModel
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import build_mesh, check_divides
from verl.training.tensors import parse_dtype


def shard_model(model: PackedModel, settings: FsdpSettings, world_size: int) -> torch.device:
    """Shard the parameters in place, which may still be on the meta device; return the device for the shards.

    First the decoder layers, then the modules that compute in float32, then the rest.
    """
    if settings.lora is None or not settings.trainable:
        model.requires_grad_(settings.trainable)
    device = torch.device(settings.device)
    precision = _precision(settings)
    options: dict[str, Any] = {
        "mesh": build_fsdp_mesh(device.type, world_size, settings.fsdp_size),
        "reshard_after_forward": settings.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")
        if settings.offload_policy
        else OffloadPolicy(),
    }
    if settings.expert_parallel_size > 1:
        _shard_experts(model, settings, world_size, mp_policy=precision, **options)
    for layer in model.layers():
        fully_shard(layer, mp_policy=precision, **options)
    for module in model.fp32_modules():
        fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), **options)
    options["reshard_after_forward"] = None  # torch has a default for the root
    fully_shard(model, mp_policy=precision, **options)
    return torch.device("cpu") if settings.offload_policy else device


def _shard_experts(model: PackedModel, settings: FsdpSettings, world_size: int, **options: Any) -> None:
    """Distribute the experts of each layer over adjacent ranks, and shard each part over the others.

    A rank has the gradients of the tokens of its whole group, so the sum over the other ranks is that of all tokens.
    It is divided by the number of all ranks, as other gradients are.
    """
    outer, size = options["mesh"], settings.expert_parallel_size
    check_divides("fsdp_config.expert_parallel_size", size, outer.shape[-1])
    shape, names = (*outer.shape[:-1], outer.shape[-1] // size, size), (*outer.mesh_dim_names, "experts")
    mesh = build_mesh(outer.device_type, shape, names)
    for experts in distribute_experts(model, mesh["experts"], settings.model_path):
        fully_shard(experts, **options | {"mesh": mesh[names[:-1]]})
        experts.set_gradient_divide_factor(float(world_size))
        # gloo cannot divide in a reduction. On a mesh of size 1 there is none, and torch 2.13 would divide twice.
        experts.set_force_sum_reduction_for_comms(outer.device_type == "cpu" and shape[-2] > 1)


def build_fsdp_mesh(device_type: str, world_size: int, fsdp_size: int = -1) -> DeviceMesh:
    """Return the mesh of FSDP: one dimension, or copies x shards if a copy is sharded over `fsdp_size` ranks (HSDP).

    The ranks of a copy are adjacent, so that they are on one node if it has at least as many devices.
    """
    size = world_size if fsdp_size == -1 else fsdp_size
    check_divides("fsdp_config.fsdp_size", size, world_size)
    if size == world_size:
        return build_mesh(device_type, (world_size,), ("shard",))
    return build_mesh(device_type, (world_size // size, size), ("replicate", "shard"))


def _precision(settings: FsdpSettings) -> MixedPrecisionPolicy:
    """Reduce gradients in float32; cast parameters to the compute dtype where it differs from theirs."""
    is_same = settings.compute_dtype == settings.param_dtype
    compute_dtype = None if is_same else parse_dtype(settings.compute_dtype)
    return MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32)
