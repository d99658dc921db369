"""Finds the launch commands of a shell script, or the settings of a YAML file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

from verl.config.legacy.shell import Variables, split_statements
from verl.config.load import GENERATE, SFT, TRAIN, AnyRunType
from verl.config.paths import format_value, iter_leaves, join_path
from verl.errors import VerlError

_TRAIN_MODULES = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "recipe.dapo.main_dapo")
_SFT_MODULES = ("verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer_ray")
_GENERATE_MODULES = ("verl.trainer.main_generation", "verl.trainer.main_generation_server")
ENTRIES: dict[str, AnyRunType] = {
    **dict.fromkeys(_TRAIN_MODULES, TRAIN),
    **dict.fromkeys(_SFT_MODULES, SFT),
    **dict.fromkeys(_GENERATE_MODULES, GENERATE),
}
"""The modules that launch scripts start, and the type of run that each is."""
REFUSED_ENTRIES = {
    "verl.experimental.fully_async_policy.fully_async_main": "asynchronous training",
    "verl_mlite.launch": "Megatron-Core",
}
_TORCHRUN = {
    "nproc_per_node": "trainer.n_gpus_per_node",
    "nnodes": "trainer.nnodes",
}
_CONFIG_OPTIONS = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """One command of a launch script: the type of its run, its overrides, and what could not be read."""

    run_type: AnyRunType
    overrides: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_launch_file(file: File) -> list[LaunchCommand]:
    """Return the launch commands of a shell script or a YAML file. Nothing of it is executed."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerlError(f"{file}: cannot be read: {error}") from error
    if file.suffix in (".yaml", ".yml"):
        return [_read_yaml(file, text)]
    commands = read_script(text)
    if not commands:
        raise VerlError(
            f"{file}: starts none of {', '.join(sorted(ENTRIES))}; give the script that contains the command, or a "
            "YAML file"
        )
    return commands


def read_script(text: str) -> list[LaunchCommand]:
    """Return the launch commands of a shell script."""
    variables, commands = Variables(), []
    for words in split_statements(text):
        raw = variables.read(words)
        arguments = [word for item in raw for word in variables.expand(item)]
        start = next((index for index, word in enumerate(arguments) if _get_module(word) is not None), None)
        if start is not None:
            used = {name for item in raw for name in re.findall(r"\$\{?(\w+)", item)}
            commands.append(_read_command(arguments, start, sorted(used & variables.conditional)))
    return commands


def _get_module(word: str) -> str | None:
    """Return the module that a word names, as a module or as a file; None if it is not one of a launch script."""
    name = word.removesuffix(".py").removeprefix("./").replace("/", ".")
    return next((known for known in (*ENTRIES, *REFUSED_ENTRIES) if name == known or name.endswith(f".{known}")), None)


def _read_command(arguments: Sequence[str], start: int, conditional: Sequence[str]) -> LaunchCommand:
    module = _get_module(arguments[start])
    assert module is not None
    if module in REFUSED_ENTRIES:
        raise VerlError(f"{module}: requires {REFUSED_ENTRIES[module]}, which is not supported yet")
    run_type = ENTRIES[module]
    notes = [f"{name} is set inside a condition; its last value is used" for name in conditional]
    overrides = list(_read_launcher(arguments[:start]))
    rest = iter(arguments[start + 1 :])
    for word in rest:
        option = word.split("=")[0]
        if option in _CONFIG_OPTIONS:
            name = word.partition("=")[2] or next(rest, "")
            if "megatron" in name:
                raise VerlError(f"{option}={name}: requires Megatron-Core, which is not supported yet")
            notes.append(f"{option} {name} is left out: give your own YAML files to `verl migrate` by themselves")
        elif word.startswith("--"):
            notes.append(f"{word} is left out: it is not a setting")
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        else:
            notes.append(f"{word} is left out: it is not key=value")
    return LaunchCommand(run_type, tuple(overrides), tuple(notes))


def _read_launcher(words: Sequence[str]) -> list[str]:
    """Return the sizes of torchrun as settings."""
    text = " ".join(words)
    found = []
    for option, key in _TORCHRUN.items():
        match = re.search(rf"--{option.replace('_', '[_-]')}[= ](\S+)", text)
        if match:
            found.append(f"{key}={match[1]}")
    return found


def _read_yaml(file: File, text: str) -> LaunchCommand:
    import yaml

    try:
        tree: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise VerlError(f"{file}: is not valid YAML: {error}") from error
    if not isinstance(tree, Mapping):
        raise VerlError(f"{file}: must be a dictionary of settings")
    settings = {str(name): value for name, value in tree.items() if name not in ("defaults", "hydra")}
    notes = [f"{name}: is left out: it is for Hydra" for name in ("defaults", "hydra") if name in tree]
    is_train = not settings.keys().isdisjoint({"actor_rollout_ref", "algorithm", "reward", "reward_model", "critic"})
    overrides = [f"{join_path(path)}={_quote(value)}" for path, value in iter_leaves(settings)]
    return LaunchCommand(TRAIN if is_train else SFT, tuple(overrides), tuple(notes))


def _quote(value: Any) -> str:
    """Return a value of a YAML file as Hydra reads it in an override."""
    if isinstance(value, str) and not re.fullmatch(r"[\w./:@+~-]+", value) and "${" not in value:
        return "'" + value.replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(_quote(item) for item in value) + "]"
    return format_value(value)
