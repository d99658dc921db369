"""LoRA through PEFT: adding an adapter to a model, and identifying the weights that an adapter belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from verl.checkpoint.adapter import NAME, adapter_config, is_adapter, peft_name
from verl.errors import EngineError
from verl.installation import format_install_hint
from verl.models.hub import local_path
from verl.models.model_folder import ADAPTER_WEIGHTS, read_header
from verl.training.fsdp.model import PackedModel
from verl.training.settings import ALL_LINEAR, LoraSettings, is_target

HEAD = "score."
"""Prefix of a critic's value head: it is new, and trained in full along with an adapter."""
EDGE_BYTES = 4096


def add_adapter(model: PackedModel, settings: LoraSettings, path: str) -> None:
    """Add an adapter to the linear modules that the settings name, with the same initial values on every rank.

    Its initial contribution is zero: the model computes the same as before. With `settings.path` it is that of the
    adapter in this directory.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise EngineError(
            f"peft.lora_rank={settings.rank}: adapters need PEFT ({error}); {format_install_hint('lora')}, or set "
            "peft.lora_rank=0 to train all weights"
        ) from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_find_targets(model, settings, path),
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]), _without_meta(model):
        torch.manual_seed(settings.seed)
        inject_adapter_in_model(config, model.backbone, NAME)
    for name, parameter in model.hf.named_parameters():
        parameter.requires_grad_(is_trainable(name))
        if is_adapter(name):  # its updates are too small for less than float32
            parameter.data = parameter.data.float()
    if settings.path is not None:
        _load_values(model, settings.path)


@torch.no_grad()
def _load_values(model: PackedModel, path: str) -> None:
    """Copy the values of an adapter in PEFT's format; an `EngineError` unless it has exactly the same tensors."""
    try:
        stored = load_file(Path(path).expanduser() / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"adapter {path}: cannot be loaded: {error}") from error
    own = {peft_name(name): each for name, each in model.hf.named_parameters() if is_adapter(name)}
    differing = [name for name in {**own, **stored} if name not in own or name not in stored]
    differing = differing or [name for name, each in own.items() if each.shape != stored[name].shape]
    if differing:
        raise EngineError(
            f"adapter {path}: its tensors are not those that peft.target_modules and peft.lora_rank give this model "
            f"({differing[0]} and {len(differing) - 1} more differ); remove these settings to use the adapter's"
        )
    for name, parameter in own.items():
        parameter.copy_(stored[name])


@contextmanager
def _without_meta(model: nn.Module) -> Iterator[None]:
    """Replace parameters on the meta device by ones that repeat a single number in host memory.

    PEFT moves an adapter to the device of the weight below it, where its initial values would be lost.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                replaced.append((module, name, parameter))
                repeated = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(repeated, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


def is_trainable(name: str) -> bool:
    """Return whether a parameter of a model with an adapter is trained: those of the adapter and of a critic's head."""
    return is_adapter(name) or name.startswith(HEAD)


def _find_targets(model: PackedModel, settings: LoraSettings, path: str) -> list[str]:
    """Return the names of the linear modules inside the layers that match `settings.targets`."""
    inside = {id(module) for layer in model.layers() for module in layer.modules()}
    modules = model.backbone.named_modules()
    linear = [name for name, module in modules if isinstance(module, nn.Linear) and id(module) in inside]
    wanted = settings.targets
    targets = [name for name in linear if is_target(name, wanted)]
    suffixes = [] if isinstance(wanted, str) else wanted
    missing = [suffix for suffix in suffixes if not any(is_target(name, [suffix]) for name in linear)]
    if missing or not targets:
        available = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear)) or "none"
        raise EngineError(
            f"peft.target_modules: {', '.join(missing) or wanted} matches no linear module in the layers of {path}, "
            f"which are {available}; set peft.target_modules={ALL_LINEAR}, or a list of some of them"
        )
    return targets


def describe_adapter(model: PackedModel, settings: LoraSettings, path: str) -> dict[str, str]:
    """Return what a checkpoint stores with an adapter's tensors: its configuration and the weights it belongs to."""
    adapted = {name.partition(".lora_A.")[0] for name, _ in model.hf.named_parameters() if ".lora_A." in name}
    suffixes = {name.rpartition(".")[2] for name in adapted}
    matching = {name for name, _ in model.hf.named_modules() if name.rpartition(".")[2] in suffixes}
    targets = suffixes if adapted == matching else adapted
    config = adapter_config(base=path, rank=settings.rank, alpha=settings.alpha, targets=targets)
    return {"fingerprint": fingerprint(path), "adapter": json.dumps(config)}


def fingerprint(path: str) -> str:
    """Return a hash of a model's weights: names, types, shapes, and the first and last bytes of every tensor."""
    files = sorted(Path(local_path(path)).expanduser().glob("*.safetensors"))
    if not files:
        raise EngineError(f"model {path}: has no weights in safetensors format, which adapters need to identify it")
    digest = hashlib.sha256()
    for name, dtype, shape, edges in sorted(edge for file in files for edge in _read_edges(file)):
        digest.update(f"{name} {dtype} {shape}\n".encode() + edges)
    return digest.hexdigest()


def _read_edges(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    header, start = read_header(path)
    with path.open("rb") as file:
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            parts = []
            for offset in (first, max(first, end - EDGE_BYTES)):
                file.seek(start + offset)
                parts.append(file.read(min(EDGE_BYTES, end - offset)))
            yield name, entry["dtype"], str(entry["shape"]), b"".join(parts)


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Make the model compute as if it had no adapter, by the very operations of a model without one.

    PEFT's `enable_adapters` would also change `requires_grad` of the parameters, which FSDP has read already.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
