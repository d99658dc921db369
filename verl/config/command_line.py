"""Parsing of the command line: options, overrides in Hydra's grammar, sweeps, and the user's YAML files."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from verl.config.paths import Tree
from verl.errors import ConfigError

if TYPE_CHECKING:  # importing Hydra and OmegaConf takes a third of a second
    from hydra.core.override_parser.types import Override

_CONFIG_PATH = ("--config-path", "-cp", "--config-dir", "-cd")
_CONFIG_NAME = ("--config-name", "-cn")

DEFAULTS = File(__file__).parent / "legacy" / "defaults"
"""The YAML files that launch scripts name without having them: the defaults of the modules that they start."""

_PLAIN = re.compile(r"[\w.+~/@]+=[^\s'\",\[\]{}()$\\]+")
"""An override with a plain value: text, where Hydra's grammar rejects a character (~/models, a?b)."""

_RANGE = re.compile(r"([\w.+]*_threshold)=([\d.]+_[\d._,]+)")
"""A setting that takes ranges: 0.5_5 is text, which Hydra's grammar would read as the number 0.55."""

_FOREIGN_OPTIONS = {
    "--check --validate": "run `verl doctor` with the same settings",
    "--dry-run": "only `verl train` has it; every run checks its settings and files before it starts",
    "--cfg --print-config --show-config": "run `verl config` with the same settings",
    "--config -c": "use --config-path DIR --config-name NAME",
    "--resume --resume-from-checkpoint": "rerun the command: it resumes from the last checkpoint of its folder",
    "--output-dir --output --out --save-dir": "set trainer.default_local_dir=DIR",
    "--model --model-name --model-path --model-name-or-path": "set model.path=MODEL",
    "--dataset --data --train-files --train-data": "set data.train_files=FILE",
    "--lr --learning-rate": "set optim.lr=1e-6",
    "--epochs --num-epochs --num-train-epochs": "set trainer.total_epochs=1",
    "--steps --max-steps": "set trainer.total_training_steps=100",
    "--batch-size --per-device-train-batch-size": "set data.train_batch_size=64 (prompts or examples per step)",
    "--gpus --num-gpus --nproc-per-node": "set trainer.n_gpus_per_node=1",
    "--nodes --nnodes --num-nodes": "set trainer.nnodes=1",
    "--seed": "set trainer.seed=1",
    "--report-to --logger --wandb": "set trainer.logger=[console,wandb]",
    "--debug --local": "set trainer.local=True rollout.name=hf: one process, in which breakpoints work",
    "--version": "run `verl --version`",
    "--verbose -v --quiet -q": "there is one level of output; all metrics are in metrics.jsonl in the run's folder",
}
"""Options of other programs, separated by spaces, and what to use instead."""


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
    options.overrides += [text for text in unknown if not text.startswith("-")]  # those after an unknown option
    unknown = [option for option in unknown if option.startswith("-")]
    for option in unknown:
        problems.append(f"{option}: is not an option; {_suggest_option(option)}")
    for option, value in pairwise(argv):  # the 1e-5 of `--lr 1e-5` is not an override
        if option in unknown and value in options.overrides and "=" not in value and not value.startswith("~"):
            options.overrides.remove(value)
    return options


def _suggest_option(option: str) -> str:
    name, _, value = option.partition("=")
    for names, instead in _FOREIGN_OPTIONS.items():
        if name.replace("_", "-").lower() in names.split():
            return instead
    if "." in name:  # --trainer.seed=1
        return f"write {name.lstrip('-')}={value or 'value'}"
    close = get_close_matches(name, ["--config-path", "--config-name", "--multirun"], n=1)
    return f"use {close[0]}" if close else "write settings as key=value"


def _raise(message: str) -> Any:
    raise ConfigError([f"command line: {message}"])


def find_yaml(directory: str | None, name: str | None, problems: list[str]) -> tuple[File, str] | None:
    """Return the directory of the user's YAML file, or of one of `DEFAULTS`, and its name."""
    if name is None:
        if directory is not None:
            problems.append(f"--config-path: {directory} requires the name of a file; add --config-name NAME")
        return None
    folder, inner = (File(directory), name) if directory is not None else (File(name).parent, File(name).name)
    folder = folder.expanduser().absolute()
    inner = inner.removesuffix(".yaml").removesuffix(".yml")
    if not (folder / f"{inner}.yaml").is_file():
        if (DEFAULTS / f"{inner}.yaml").is_file():
            return DEFAULTS, inner
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
                parsed.append(parser.parse_override(_RANGE.sub(r"\1='\2'", text)))
            except HydraException:
                if not _PLAIN.fullmatch(text):
                    raise
                key, _, value = text.partition("=")
                parsed.append(parser.parse_override(f"{key}='{value}'"))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            fix = "quote special characters: name='\"a, b\"'" if "=" in text else "write settings as key=value"
            problems.append(f"{text}: is not a valid override ({reason}); {fix}")
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
            problems.append(f"--config-name: {folder / name}.yaml cannot be read: {format_error(error)}; fix the file")
            return {}, rest
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}, rest


def format_error(error: Exception) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split("\n")[0].split())
