"""Finds the runs that a script launches among its recorded calls, or reads the settings of a YAML file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from verl.config.command_line import DEFAULTS
from verl.config.load import GENERATE, SFT, TRAIN, AnyRunType
from verl.config.paths import format_value, iter_leaves, join_path
from verl.errors import VerlError
from verl.migration.capture import TIMEOUT_S, Call, Capture, restore_variables

MODULE_DEFAULTS = {
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
}
"""The modules whose settings have other defaults, and the YAML file of them."""
_TRAIN_MODULES = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "recipe.dapo.main_dapo", *MODULE_DEFAULTS)
_SFT_MODULES = ("verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer_ray")
_GENERATE_MODULES = ("verl.trainer.main_generation", "verl.trainer.main_generation_server")
ENTRIES: dict[str, AnyRunType] = {
    **dict.fromkeys(_TRAIN_MODULES, TRAIN),
    **dict.fromkeys(_SFT_MODULES, SFT),
    **dict.fromkeys(_GENERATE_MODULES, GENERATE),
}
"""The modules that launch scripts start, and the type of run that each is."""
REFUSED_ENTRIES = {"verl_mlite.launch": "Megatron-Core"}
_LAUNCHER_SIZES = {
    r"nproc[_-]per[_-]node|num_processes": "trainer.n_gpus_per_node",
    r"nnodes|num_machines": "trainer.nnodes",
}
_CONFIG_OPTIONS = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")
_EVALUATED = ("date", "df", "free", "hostname", "id", "nproc", "uname", "whoami")


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """One run that a script launches.

    `arguments` are the recorded ones after the module; `overrides` are the settings among them, and those of the
    launcher. `open_variables` are names whose value is not known: overrides contain them as `${NAME}`.
    """

    run_type: AnyRunType
    overrides: tuple[str, ...]
    notes: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    open_variables: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """The runs of a launch script, what the script would have done besides, and what to know about both."""

    launches: list[LaunchCommand]
    other_commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_launches(file: File, captured: Capture) -> LaunchFile:
    """Return the runs among the recorded calls of a script.

    Raises:
        VerlError: If the script launches nothing that verl can do.
    """
    launches, others, notes = list[LaunchCommand](), list[str](), list[str]()
    for call in captured.calls:
        start = next((index for index, word in enumerate(call.words) if _get_module(word) is not None), None)
        shown = restore_variables(shlex.join(call.words))
        if start is not None:
            launches.append(_read_launch(call, start, captured.variables))
        elif call.words[0] in _EVALUATED:
            notes.append(f"{shown}: its output is that of this machine, now")
        else:
            others.append(shown)
            if call.is_output_used:
                notes.append(f"{shown}: was not executed, and the script uses its output, which was empty")
    problems = list(_list_problems(captured))
    if not launches:
        raise VerlError(f"{file}: starts none of {', '.join(sorted(ENTRIES))}" + _explain(problems, others, captured))
    used = {name for launch in launches for text in launch.arguments for name in re.findall(r"\$\{(\w+)\}", text)}
    for name in sorted(captured.variables):
        how = "stays in the command" if name in used else "was empty, or not used for the command"
        notes.append(f"{name} is not set by the script and {how}; to set it: verl migrate {file} {name}=VALUE")
    return LaunchFile(launches, list(dict.fromkeys(others)), [*problems, *dict.fromkeys(notes)])


def _list_problems(captured: Capture) -> list[str]:
    problems = [restore_variables(f"bash: {complaint}") for complaint in captured.complaints]
    if captured.exit_code is None:
        problems.append(f"the script was stopped after {TIMEOUT_S:g} s; later launches are missing")
    elif captured.exit_code:
        problems.append(f"the script ended with exit code {captured.exit_code}; later launches may be missing")
    return problems


def _explain(problems: Sequence[str], others: Sequence[str], captured: Capture) -> str:
    """Return why a script has launched nothing, as far as it is known."""
    lines = [*problems, *(f"it would have run: {command}" for command in others[:20])]
    lines += [f"its output ends with: {line}" for line in restore_variables(captured.output).splitlines()[-5:]]
    lines += [f"{name} is not set; give it as {name}=VALUE" for name in sorted(captured.variables)]
    fix = "give arguments of the script after --, environment variables as NAME=VALUE, or a YAML file"
    return f"; {fix}" + "".join(f"\n  {line}" for line in lines)


def _get_module(word: str) -> str | None:
    """Return the module that a word names, as a module or as a file; None if it is not one of a launch script."""
    name = word.removesuffix(".py").removeprefix("./").replace("/", ".")
    return next((known for known in (*ENTRIES, *REFUSED_ENTRIES) if name == known or name.endswith(f".{known}")), None)


def _read_launch(call: Call, start: int, variables: frozenset[str]) -> LaunchCommand:
    module = _get_module(call.words[start])
    assert module is not None
    if module in REFUSED_ENTRIES:
        raise VerlError(f"{module}: requires {REFUSED_ENTRIES[module]}, which is not supported yet")
    launcher, arguments = call.words[:start], call.words[start + 1 :]
    notes = []
    if not re.match(r"(python|torchrun)", launcher[0]):
        notes.append(f"the script launches it with: {restore_variables(shlex.join(launcher))}")
    defaults = read_yaml(DEFAULTS / f"{MODULE_DEFAULTS[module]}.yaml").launches if module in MODULE_DEFAULTS else []
    overrides = [*(text for launch in defaults for text in launch.overrides), *_read_sizes(launcher)]
    rest = iter(arguments)
    for word in rest:
        option = word.split("=")[0]
        if option in _CONFIG_OPTIONS:
            name = word.partition("=")[2] or next(rest, "")
            if "megatron" in name and ENTRIES[module] is TRAIN:
                overrides = [
                    f"{model}.strategy=megatron" for model in ("actor_rollout_ref.actor", "critic")
                ] + overrides
            notes.append(f"{option} {name} is dropped: give your own YAML files to `verl migrate` by themselves")
        elif ("=" in word and not word.startswith("--")) or word.startswith("~"):
            overrides.append(word)
        elif word:
            notes.append(f"{word} is dropped: it is not key=value")
    return LaunchCommand(
        ENTRIES[module],
        tuple(overrides),
        tuple(notes),
        tuple(arguments),
        call.exports,
        call.folder,
        variables | {"HOME", "USER"},
    )


def _read_sizes(launcher: Sequence[str]) -> list[str]:
    """Return the sizes of torchrun or accelerate as settings."""
    text, found = " ".join(launcher), []
    for option, key in _LAUNCHER_SIZES.items():
        match = re.search(rf"--(?:{option})[= ](\d+|\$\{{\w+\}})(?= |$)", text)
        if match:
            found.append(f"{key}={match[1]}")
    return found


def read_yaml(file: File) -> LaunchFile:
    """Return the run that a YAML file of settings describes."""
    import yaml

    try:
        tree: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise VerlError(f"{file}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise VerlError(f"{file}: is not valid YAML: {error}") from error
    if not isinstance(tree, Mapping):
        raise VerlError(f"{file}: must be a dictionary of settings")
    settings = {str(name): value for name, value in tree.items() if name not in ("defaults", "hydra")}
    notes = [f"{name}: is dropped: it is for Hydra" for name in ("defaults", "hydra") if name in tree]
    is_train = not settings.keys().isdisjoint({"actor_rollout_ref", "algorithm", "reward", "reward_model", "critic"})
    overrides = [f"{join_path(path)}={write_value(value)}" for path, value in iter_leaves(settings)]
    return LaunchFile([LaunchCommand(TRAIN if is_train else SFT, tuple(overrides), tuple(notes))])


def write_value(value: Any) -> str:
    """Return a value as an override that Hydra reads again."""
    if isinstance(value, str) and not re.fullmatch(r"[\w./:@+~-]+", value) and "${" not in value:
        # Hydra reads a backslash as an escape only before a quote.
        return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", "\\'"), value) + "'"
    if isinstance(value, list):
        return "[" + ",".join(write_value(item) for item in value) + "]"
    return format_value(value)
