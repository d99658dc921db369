"""Parsing of the command line: options, overrides in Hydra's grammar, sweeps, and the user's YAML files."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from verl.config.paths import Tree
from verl.errors import ConfigError

if TYPE_CHECKING:  # importing Hydra and OmegaConf takes a third of a second
    from hydra.core.override_parser.types import Override

_CONFIG_PATH = ("--config-path", "-cp", "--config-dir", "-cd")
_CONFIG_NAME = ("--config-name", "-cn")

_PLAIN = re.compile(r"[\w.+~/@]+=[^\s'\",\[\]{}()$\\]+")
"""An override with a plain value: text, where Hydra's grammar rejects a character (~/models, a?b)."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The overrides of one run; `sweep` are those of a sweep."""

    overrides: list[Override]
    sweep: tuple[str, ...] = ()


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into names (of files or keys) and settings for `load`."""
    names: list[str] = []
    settings: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in (*_CONFIG_PATH, *_CONFIG_NAME):
            settings += [argument, *itertools.islice(rest, 1)]
        elif "=" in argument or argument.startswith(("-", "+", "~")):
            settings.append(argument)
        else:
            names.append(argument)
    return names, settings


def parse_options(argv: Sequence[str], problems: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, prog="verl")
    parser.add_argument(*_CONFIG_PATH)
    parser.add_argument(*_CONFIG_NAME)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("overrides", nargs="*")
    parser.error = _raise  # type: ignore[method-assign]
    options, unknown = parser.parse_known_intermixed_args(list(argv))
    for option in unknown:
        close = get_close_matches(option.split("=")[0], ["--config-path", "--config-name", "--multirun"], n=1)
        problems.append(
            f"{option}: is not an option; " + (f"use {close[0]}" if close else "write settings as key=value")
        )
    return options


def _raise(message: str) -> Any:
    raise ConfigError([f"command line: {message}"])


def find_yaml(directory: str | None, name: str | None, problems: list[str]) -> tuple[File, str] | None:
    """Return the directory of the user's YAML file and its name."""
    if name is None:
        if directory is not None:
            problems.append(f"--config-path: {directory} requires the name of a file; add --config-name NAME")
        return None
    folder, inner = (File(directory), name) if directory is not None else (File(name).parent, File(name).name)
    folder = folder.expanduser().absolute()
    inner = inner.removesuffix(".yaml").removesuffix(".yml")
    if not (folder / f"{inner}.yaml").is_file():
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        fix = f"available: {', '.join(names)}" if names else "give the directory with --config-path"
        problems.append(f"--config-name: {folder / inner}.yaml does not exist; {fix}")
        return None
    return folder, inner


def parse_overrides(texts: Sequence[str], problems: list[str]) -> list[Override]:
    if not texts:
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed = []
    for text in texts:
        try:
            try:
                parsed.append(parser.parse_override(text))
            except HydraException:
                if not _PLAIN.fullmatch(text):
                    raise
                key, _, value = text.partition("=")
                parsed.append(parser.parse_override(f"{key}='{value}'"))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            problems.append(f"{text}: is not a valid override ({reason}); quote special characters: name='\"a, b\"'")
    return parsed


def expand_sweeps(overrides: Sequence[Override], multirun: bool, problems: list[str]) -> list[SweepPoint]:
    """Return the product of all sweeps; without `-m`, a sweep is a problem."""
    axes: list[list[Override]] = []
    swept: list[int] = []
    for override in overrides:
        if not override.is_sweep_override():
            axes.append([override])
        elif not multirun:
            key, values = override.key_or_group, override.get_value_string()
            problems.append(
                f"{key}: {values} must be one value; set {key}=[{values}] for a list, '{key}=\"{values}\"' for text, "
                "or add -m to run each"
            )
        elif not override.is_discrete_sweep():
            problems.append(
                f"{override.key_or_group}: {override.get_value_string()} must be a finite sweep; "
                f"set {override.key_or_group}=choice(...) or range(...)"
            )
        else:
            lines = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            axes.append(parse_overrides(lines, problems))
            swept.append(len(axes) - 1)
    return [
        SweepPoint(list(point), tuple(point[axis].input_line or "" for axis in swept))
        for point in itertools.product(*axes)
    ]


def compose_yaml(
    folder: File, name: str, overrides: Sequence[Override], problems: list[str]
) -> tuple[Tree, list[Override]]:
    """Return the user's YAML composed by Hydra, and the overrides that are not choices of a config group."""
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_dir(config_dir=str(folder), job_name="verl", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()

        def is_choice(override: Override) -> bool:
            group = override.key_or_group
            return override.is_hydra_override() or "/" in group or bool(loader.get_group_options(group))

        choices = [override.input_line or "" for override in overrides if is_choice(override)]
        rest = [override for override in overrides if not is_choice(override)]
        try:
            composed = OmegaConf.to_container(compose(config_name=name, overrides=choices), resolve=False)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            problems.append(f"--config-name: {folder / name}.yaml cannot be read: {format_error(error)}")
            return {}, rest
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}, rest


def format_error(error: Exception) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split("\n")[0].split())
