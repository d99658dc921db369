"""Checks of an adapter that a run starts from, by its files alone: made before any process starts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from verl.config.adapter_files import (
    AdapterFiles,
    AdapterSource,
    find_adapter_source,
    find_differences,
    read_adapter,
)
from verl.config.paths import format_value
from verl.config.schema import Config, SftConfig
from verl.data.files import suggest_path
from verl.errors import list_some
from verl.models.model_folder import ADAPTER_WEIGHTS, read_shapes
from verl.models.model_support import is_dense_and_verified
from verl.training.settings import is_target

_PLAIN_START = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights as they are."""
_UNSUPPORTED = {
    "use_rslora": "scales by the root of its rank (use_rslora)",
    "use_dora": "has magnitudes (use_dora)",
    "rank_pattern": "has several ranks (rank_pattern)",
    "alpha_pattern": "has several scales (alpha_pattern)",
    "modules_to_save": "contains whole modules (modules_to_save)",
    "lora_bias": "has biases (lora_bias)",
    "trainable_token_indices": "contains embeddings (trainable_token_indices)",
    "layer_replication": "repeats layers (layer_replication)",
    "fan_in_fan_out": "belongs to transposed weights (fan_in_fan_out)",
}
"""Key of adapter_config.json -> description of an adapter that sets the key."""


def find_adapter_problems(config: Config | SftConfig) -> Iterator[str]:
    """Yield everything that is wrong with the adapter that a run starts from."""
    source = find_adapter_source(config)
    if source is None:
        return
    folder = Path(source.path).expanduser()
    if not folder.is_dir():
        existing, near = suggest_path(folder)
        fix = f"set {source.key}={near}" if near and near.is_dir() else "set it to a directory with a PEFT adapter"
        yield f"{source.key}={source.path}: there is no such directory; {existing}; {fix}"
        return
    try:
        adapter = read_adapter(folder, source.model_path)
    except ValueError as error:
        yield f"{source.key}: {source.path} {error}; set it to a directory with a complete PEFT adapter"
        return
    unsupported = list(_describe_unsupported(adapter))
    for reason in unsupported:
        yield (
            f"{source.key}: the adapter in {source.path} {reason}, which is not supported; merge it into the model "
            f"(PEFT's merge_and_unload), set the path of the model to the result, and remove {source.key}"
        )
    if unsupported:
        return  # the other checks assume a plain adapter
    yield from find_differences(adapter, source)
    linear = _read_linear_shapes(source.model_path)
    yield from _find_shape_problems(adapter, source, linear)
    yield from _find_target_problems(adapter, source, linear)


def _describe_unsupported(adapter: AdapterFiles) -> Iterator[str]:
    config = adapter.config
    if config.get("peft_type") != "LORA":
        yield f"is of type {config.get('peft_type')}"
        return
    yield from (text for key, text in _UNSUPPORTED.items() if config.get(key))
    if config.get("bias", "none") != "none":
        yield f"has biases (bias={config['bias']})"
    if config.get("init_lora_weights") not in _PLAIN_START:
        yield f"may belong to changed base weights (init_lora_weights={config['init_lora_weights']})"
    if isinstance(adapter.alpha, float):
        yield f"has a scale that is not a whole number (lora_alpha={adapter.alpha:g})"
    others = [name for name in adapter.shapes if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if others:
        yield f"has tensors other than the two factors of linear modules ({list_some(others, 8, ', ')})"
    outside = [name for name in adapter.modules if not re.search(r"\.\d+\.", name)]
    if outside:
        yield f"adapts modules outside the layers ({list_some(outside, 8, ', ')})"


def _find_shape_problems(
    adapter: AdapterFiles, source: AdapterSource, linear: Mapping[str, tuple[int, ...]] | None
) -> Iterator[str]:
    """Yield tensors whose shapes do not fit the adapter's rank, or the model's weights if these are known."""
    wrong, foreign = [], []
    for name in adapter.modules:
        down, up = (adapter.shapes.get(f"{name}.lora_{factor}.weight", ()) for factor in "AB")
        if len(down) != 2 or len(up) != 2 or {down[0], up[1]} != {adapter.rank}:
            wrong.append(name)
        elif linear is not None and linear.get(name) != (up[0], down[1]):
            foreign.append(name)
    if wrong or not adapter.modules:
        yield (
            f"{source.key}: the tensors in {Path(source.path) / ADAPTER_WEIGHTS} are not those of a LoRA adapter of "
            f"rank {adapter.rank} ({list_some(wrong, 8, ', ') or 'there are none'}); save the adapter again"
        )
    if foreign:
        yield (
            f"{source.key}: the adapter in {source.path} belongs to another model: {source.model_path} has no linear "
            f"modules of these names and sizes ({list_some(foreign, 8, ', ')}); set the path of the model to "
            f"{adapter.config.get('base_model_name_or_path') or 'that model'}"
        )


def _find_target_problems(
    adapter: AdapterFiles, source: AdapterSource, linear: Mapping[str, tuple[int, ...]] | None
) -> Iterator[str]:
    """Yield a problem if the settings select other modules than the adapter has, as far as the modules are known."""
    targets, modules = source.peft.target_modules, adapter.modules
    known = modules if linear is None else list(linear)
    selected = {name for name in known if _is_selected(name, targets)}
    unselected = [name for name in modules if not _is_selected(name, targets)]
    absent = selected - set(modules)
    suffixes = [] if isinstance(targets, str) else targets
    unused = [suffix for suffix in suffixes if not any(_is_selected(name, [suffix]) for name in modules)]
    if not (unselected or absent or unused):
        return
    key, value = f"{source.section}.target_modules", format_value(adapter.targets)
    names = sorted({name.rpartition(".")[2] for name in modules})
    yield (
        f"{key}: {format_value(targets)} does not select the modules of the adapter in {source.path}, which are "
        f"{list_some(names, 8, ', ')}; set {key}={value}, or remove the setting"
    )


def _is_selected(name: str, targets: str | Collection[str]) -> bool:
    return is_target(name.partition(".")[2], targets)


def _read_linear_shapes(path: str) -> dict[str, tuple[int, ...]] | None:
    """Return the linear modules in the layers of a model by name, from the headers of its files; None if unknown."""
    folder = Path(path).expanduser()
    if not is_dense_and_verified(path):
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            shapes |= read_shapes(file)
    except ValueError:  # loading the model reports it
        return None
    layers = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if re.search(r"\.\d+\.", name)}
    return {name: shape for name, shape in layers.items() if len(shape) == 2} or None
