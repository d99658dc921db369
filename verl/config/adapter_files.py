"""LoRA adapters in PEFT's format that a run starts from: what their files say, and the settings that follow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

from verl.config.features import get_model_settings, list_trained_models
from verl.config.paths import Tree, format_value, get_path, join_path, set_path
from verl.config.schema import Config, Section, SftConfig
from verl.config.schema.actor import PeftConfig
from verl.models.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_config, read_json, read_shapes

_PREFIX = "base_model.model."
_SETTINGS = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
"""Setting of an adapter -> attribute of `AdapterFiles`."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """The setting that names an adapter to start from, its value, and the adapter's settings with their section."""

    key: str
    path: str
    section: str
    peft: PeftConfig
    model_path: str


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter, as far as its configuration and the header of its weights tell.

    `shapes` has the tensors by the names of their modules in the model: `model.layers.0.mlp.up_proj.lora_A.weight`.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    layers: int | None = None  # of the model, if known

    @property
    def rank(self) -> Any:
        return self.config.get("r")

    @property
    def alpha(self) -> Any:
        """The numerator of the scale, as an integer if it is one."""
        alpha = self.config.get("lora_alpha")
        return int(alpha) if isinstance(alpha, float) and alpha.is_integer() else alpha

    @property
    def targets(self) -> list[str]:
        """The value of `target_modules` by which the same modules get an adapter: suffixes if they describe it."""
        named = self.config.get("target_modules")
        is_partial = any(self.config.get(key) for key in ("layers_to_transform", "exclude_modules"))
        if isinstance(named, list) and named and not is_partial and not any("." in str(name) for name in named):
            return sorted(map(str, named))
        if self._is_in_all_layers():
            return sorted({name.rpartition(".")[2] for name in self.modules})
        return [name.partition(".")[2] for name in self.modules]

    def _is_in_all_layers(self) -> bool:
        by_layer: dict[str, set[int]] = {}
        for name in self.modules:
            if match := re.search(r"\.(\d+)\.(.+)", name):
                by_layer.setdefault(match[2], set()).add(int(match[1]))
        return self.layers is not None and all(each == set(range(self.layers)) for each in by_layer.values())

    @property
    def modules(self) -> list[str]:
        """The names of the modules that have an adapter, in the order of the file."""
        return list(dict.fromkeys(name.partition(".lora_A.")[0] for name in self.shapes if ".lora_A." in name))


def find_adapter_source(config: Config | SftConfig) -> AdapterSource | None:
    """Return the adapter that the run starts from, if any."""
    (key, model), trained = get_model_settings(config), list_trained_models(config)[0]
    if model.lora_adapter_path is None:
        return None
    peft = trained.settings.peft
    return AdapterSource(f"{key}.lora_adapter_path", model.lora_adapter_path, f"{trained.key}.peft", peft, model.path)


def read_adapter(folder: Folder, model_path: str | None = None) -> AdapterFiles:
    """Read the configuration of an adapter and the names and shapes of its tensors; a `ValueError` if that fails.

    `model_path` is the base model.
    """
    try:
        config = read_json(folder / ADAPTER_CONFIG)
    except OSError:
        raise ValueError(f"has no {ADAPTER_CONFIG}, so it is not a PEFT adapter") from None
    except ValueError as error:
        raise ValueError(f"{ADAPTER_CONFIG} is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{ADAPTER_CONFIG} is not a dictionary")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        others = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise ValueError(f"has no {ADAPTER_WEIGHTS} (it contains {others}); save it again with safe_serialization=True")
    shapes = read_shapes(folder / ADAPTER_WEIGHTS)
    shapes = {name.removeprefix(_PREFIX): shape for name, shape in shapes.items()}
    layers = None if model_path is None else read_config(model_path).get("num_hidden_layers")
    return AdapterFiles(config, shapes, layers)


def fill_from_adapter(root: type[Section], tree: Tree, hints: list[str]) -> dict[str, str]:
    """Set the adapter's settings that are not given to those of the adapter that a run starts from.

    What is wrong with its files is reported before the run starts, with everything else. Returns key -> origin.
    """
    default = root()
    assert isinstance(default, Config | SftConfig)
    model, section = get_model_settings(default)[0], (*list_trained_models(default)[0].key.split("."), "peft")
    path, used = (get_path(tree, (*model.split("."), name)) for name in ("lora_adapter_path", "path"))
    if not isinstance(path, str):
        return {}
    try:
        adapter = read_adapter(Folder(path).expanduser(), str(used))
    except ValueError:
        return {}
    origins = {}
    for name, attribute in _SETTINGS.items():
        value = getattr(adapter, attribute)
        is_valid = isinstance(value, list) or (isinstance(value, int) and value > 0)
        if is_valid and get_path(tree, (*section, name)) is None:
            set_path(tree, (*section, name), value)
            origins[join_path((*section, name))] = f"{ADAPTER_CONFIG} of the adapter"
    base = adapter.config.get("base_model_name_or_path")
    if base and used and Folder(str(base)).name != Folder(str(used)).name:
        hints.append(
            f"{model}.lora_adapter_path: the adapter was trained on {base}, and the model here is {used}; "
            "make sure that they are the same"
        )
    return origins


def find_differences(adapter: AdapterFiles, source: AdapterSource) -> Iterator[str]:
    """Yield settings of rank and scale that differ from the adapter's."""
    for name, expected in (("lora_rank", adapter.rank), ("lora_alpha", adapter.alpha)):
        key, value = f"{source.section}.{name}", getattr(source.peft, name)
        if value != expected:
            yield (
                f"{key}: is {format_value(value)}, but that of the adapter in {source.path} is "
                f"{format_value(expected)}; set {key}={format_value(expected)}, or remove the setting"
            )
