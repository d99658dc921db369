"""Load settings from a command line, a YAML file or a dict into a validated, frozen `Config` or `SftConfig`.

The stages: Hydra's grammar and defaults lists -> canonical keys (`aliases`) -> interpolations -> known keys and types
(`schema`) -> settings against each other (`validation`), all for one `RunType`. Problems of all stages are collected
and raised as one error.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path as File
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from verl.config import validation
from verl.config.aliases import canonicalize, canonicalize_tree, list_section_aliases
from verl.config.paths import (
    Path,
    Tree,
    delete_path,
    find_setting,
    format_value,
    get_path,
    iter_leaves,
    join_path,
    set_path,
    suggest_key,
)
from verl.config.problems import ConfigProblem
from verl.config.run_types import GENERATE, RUN_TYPES, SFT, TRAIN, RunType
from verl.config.schema import CUSTOM_FUNCTION, MISSING, Config, Section, Setting, SftConfig, collect_settings
from verl.errors import ConfigError
from verl.redaction import remember

if TYPE_CHECKING:  # Hydra and OmegaConf take a third of a second to import: only where there is something to parse
    from hydra.core.override_parser.types import Override

__all__ = ["LoadedConfig", "load", "load_dict", "load_for_generation", "load_sft", "load_yaml", "split_arguments"]

_CONFIG_PATH = ("--config-path", "-cp", "--config-dir", "-cd")
_CONFIG_NAME = ("--config-name", "-cn")

C = TypeVar("C", bound=Section)

_PLAIN = re.compile(r"[\w.+~/@]+=[^\s'\",\[\]{}()$\\]+")
"""An override whose value has no structure: where Hydra's grammar refuses a character (~/models, a?b), it is text."""


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[C]):
    """Settings ready to run, what is worth saying about them, and the sweep values that they come from."""

    config: C
    hints: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()


def load(argv: Sequence[str], *, complete: bool = True) -> list[LoadedConfig[Config]]:
    """Settings from a command line: one, or with `-m` one for each point of the sweep.

    `complete=False` does not ask for the required settings: for looking, not for running.

    >>> [loaded] = load(["--config-name", "grpo", "data.train_batch_size=64", "+ray_kwargs.ray_init.num_gpus=1"])
    """
    return _load(TRAIN, argv, complete)


def load_sft(argv: Sequence[str], *, complete: bool = True) -> list[LoadedConfig[SftConfig]]:
    """The same for supervised training: `verl sft`."""
    return _load(SFT, argv, complete)


def load_for_generation(argv: Sequence[str]) -> LoadedConfig[Config]:
    """The settings of training, for what only writes or scores answers: `verl generate`, `verl eval`."""
    return _load(GENERATE, argv, complete=False)[0]


def _load(run_type: RunType[C], argv: Sequence[str], complete: bool) -> list[LoadedConfig[C]]:
    problems: list[str] = []
    options = _options(argv, problems)
    overrides = _parse(options.overrides, problems)
    points = _points(overrides, options.multirun, problems)
    source = _source(options.config_path, options.config_name, problems)
    if problems:
        # what can be read is checked too, so that the list is whole
        points = points[:1] or [_Point([])]
    runs = [_build(run_type, point, source=source, complete=complete, problems=problems) for point in points]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return runs


def load_yaml(path: str | File, overrides: Sequence[str] = (), *, complete: bool = True) -> LoadedConfig[Config]:
    """Settings from a YAML file, which may have a `defaults:` list, and overrides on top."""
    path = File(path).expanduser()
    [loaded] = load(["--config-path", str(path.parent), "--config-name", path.name, *overrides], complete=complete)
    return loaded


def load_dict(
    settings: Mapping[str, Any], overrides: Sequence[str] = (), *, complete: bool = True
) -> LoadedConfig[Config]:
    """Settings from nested dicts, and overrides on top.

    >>> load_dict({"data": {"train_files": "a.parquet"}}, ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"]).config
    """
    problems: list[str] = []
    parsed = _parse(overrides, problems)
    [point] = _points(parsed, False, problems)
    loaded = _build(TRAIN, point, tree=copy.deepcopy(dict(settings)), complete=complete, problems=problems)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return loaded


@dataclass(frozen=True, slots=True)
class _Point:
    """The overrides of one run; `sweep` are those that came from a sweep."""

    overrides: list[Override]
    sweep: tuple[str, ...] = ()


def _build(
    run_type: RunType[C],
    point: _Point,
    *,
    problems: list[str],
    complete: bool,
    source: tuple[File, str] | None = None,
    tree: Tree | None = None,
) -> LoadedConfig[C]:
    hints: list[str] = []
    overrides = point.overrides
    if source is not None:
        tree, overrides = _compose(*source, overrides, problems)
    tree = canonicalize_tree(tree or {}, hints, problems, run_type.aliases)
    for override in overrides:
        _apply(run_type, override, tree, hints, problems)
    _resolve(run_type, tree, problems)
    remember(tree)
    config, wrong = _validate(run_type, _known(run_type, tree, problems), problems)

    def say(findings: Iterable[ConfigProblem], into: list[str]) -> None:
        into += [found.text for found in findings if not wrong.intersection(found.keys)]

    if complete:
        say(run_type.find_missing(config), problems)
    say(validation.find_unsupported(config), problems)
    say(run_type.find_conflicts(config), problems)
    say(run_type.find_hints(config), hints)
    return LoadedConfig(config, tuple(dict.fromkeys(hints)), point.sweep)


# --- the command line


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of a command that is told names of files or keys beside settings: the names, and what `load` is given.

    >>> names_and_settings(["test.parquet", "rollout.n=8", "--config-name", "grpo"])
    (['test.parquet'], ['rollout.n=8', '--config-name', 'grpo'])
    """
    names: list[str] = []
    settings: list[str] = []
    rest = iter(arguments)
    for one in rest:
        if one in (*_CONFIG_PATH, *_CONFIG_NAME):
            settings += [one, *itertools.islice(rest, 1)]
        elif "=" in one or one.startswith(("-", "+", "~")):
            settings.append(one)
        else:
            names.append(one)
    return names, settings


def _options(argv: Sequence[str], problems: list[str]) -> argparse.Namespace:
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


def _source(directory: str | None, name: str | None, problems: list[str]) -> tuple[File, str] | None:
    """Where the user's YAML lies: its directory and its name in there."""
    if name is None:
        if directory is not None:
            problems.append(f"--config-path: {directory} needs the name of a file in it; add --config-name NAME")
        return None
    folder, inner = (File(directory), name) if directory is not None else (File(name).parent, File(name).name)
    folder = folder.expanduser().absolute()
    inner = inner.removesuffix(".yaml").removesuffix(".yml")
    if not (folder / f"{inner}.yaml").is_file():
        there = sorted(file.stem for file in folder.glob("*.yaml"))
        mend = f"there are: {', '.join(there)}" if there else "name the directory with --config-path"
        problems.append(f"--config-name: {name} must be a file {inner}.yaml in {folder}; {mend}")
        return None
    return folder, inner


def _parse(texts: Sequence[str], problems: list[str]) -> list[Override]:
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
            why = str(error).splitlines()[0]
            problems.append(f"{text}: cannot be read as key=value ({why}); quote special characters: key='\"a, b\"'")
    return parsed


def _points(overrides: Sequence[Override], multirun: bool, problems: list[str]) -> list[_Point]:
    """The product of all sweeps; without `-m` there may be none."""
    axes: list[list[Override]] = []
    swept: list[int] = []
    for override in overrides:
        if not override.is_sweep_override():
            axes.append([override])
        elif not multirun:
            key, values = override.key_or_group, override.get_value_string()
            problems.append(
                f"{key}: {values} must be one value; set {key}=[{values}] for a list, '{key}=\"{values}\"' for text, "
                "or add -m for one run each"
            )
        elif not override.is_discrete_sweep():
            problems.append(
                f"{override.key_or_group}: {override.get_value_string()} must be a sweep that can be counted; "
                f"set {override.key_or_group}=choice(...) or range(...)"
            )
        else:
            lines = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            axes.append(_parse(lines, problems))
            swept.append(len(axes) - 1)
    return [
        _Point(list(point), tuple(point[axis].input_line or "" for axis in swept)) for point in itertools.product(*axes)
    ]


def _compose(
    folder: File, name: str, overrides: Sequence[Override], problems: list[str]
) -> tuple[Tree, list[Override]]:
    """The user's YAML with its defaults list, by Hydra; and the overrides that were not choices of a config group."""
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
            problems.append(f"--config-name: {folder / name}.yaml cannot be read: {_one_line(error)}")
            return {}, rest
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}, rest


# --- one override


def _apply(run_type: RunType[C], override: Override, tree: Tree, hints: list[str], problems: list[str]) -> None:
    if override.is_hydra_override():
        hints.append(f"{override.input_line} has no effect: verl reads settings with Hydra, but Hydra does not run it")
        return
    path: Path = tuple(override.key_or_group.split("."))
    value = override.value()
    if override.is_delete():
        _delete(run_type, path, value, tree, hints, problems)
        return
    for spelled, leaf in iter_leaves(value, path) if isinstance(value, dict) and value else [(path, value)]:
        target, meant = canonicalize(spelled, leaf, hints, run_type.aliases)
        if override.is_add() and join_path(target) in collect_settings(run_type.root):
            hints.append(f"+{join_path(spelled)}: {join_path(target)} is a declared setting, the + is not needed")
        set_path(tree, target, meant)


def _delete(run_type: RunType[C], path: Path, value: Any, tree: Tree, hints: list[str], problems: list[str]) -> None:
    """`~key`: back to the default; in an open dictionary: out of it."""
    target, _ = canonicalize(path, None, hints, run_type.aliases)
    found, there = find_setting(target, run_type.root), get_path(tree, target)
    if found is None:
        problems.append(_unknown(run_type, target))
    elif value is not None and value != there:
        mend = f"~{join_path(target)}"
        problems.append(
            f"~{join_path(target)}={format_value(value)}: the value is {format_value(there)}; write {mend} alone"
        )
    elif not delete_path(tree, target) and found.key != join_path(target):
        entries = ", ".join(get_path(tree, found.path) or ()) or "nothing"
        problems.append(f"~{join_path(target)}: is not there to be removed; {found.key} holds {entries}")


# --- the tree


def _resolve(run_type: RunType[C], tree: Tree, problems: list[str]) -> None:
    """Replace ${...} by what it stands for; defaults can be referred to as well."""
    waiting = [(path, value) for path, value in iter_leaves(tree) if "${" in str(value)]
    if not waiting:
        return
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    whole: Tree = run_type.root().model_dump(mode="json")
    for path, value in iter_leaves(tree):
        set_path(whole, path, value)
    for short, full in list_section_aliases(run_type.aliases):
        whole.setdefault(short, f"${{{full}}}")
    try:
        root = OmegaConf.create(whole)
    except OmegaConfBaseException as error:
        problems.append(f"{error.full_key}: cannot be read: {_one_line(error)}; write ${{section.key}}")
        root = None
    for path, value in waiting:
        if root is None:
            delete_path(tree, path)
            continue
        try:
            node: Any = root
            for name in path:
                node = node[name]
            set_path(tree, path, OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node)
        except OmegaConfBaseException as error:
            problems.append(
                f"{join_path(path)}: {format_value(value)} cannot be resolved: {_one_line(error)}; write its value"
            )
            delete_path(tree, path)


def _known(run_type: RunType[C], tree: Tree, problems: list[str]) -> Tree:
    """The declared part of the tree. Other keys are problems; empty sections and values left as ??? are not given."""
    known: Tree = {}
    for path, value in iter_leaves(tree):
        found = find_setting(path, run_type.root)
        if found is None:
            problems.append(_unknown(run_type, path, value))
        elif found.section is not None and found.key == join_path(path):
            if value not in (None, {}):
                names = ", ".join(found.section.model_fields)
                problems.append(
                    f"{found.key}: {format_value(value)} must be a section; set one of its keys ({names}), such as "
                    f"{found.key}.{next(iter(found.section.model_fields))}=..."
                )
        elif value != MISSING:
            set_path(known, path, value)
    return known


def _unknown(run_type: RunType[C], path: Path, value: Any = None) -> str:
    key = join_path(path)
    for other in RUN_TYPES:
        if other is not run_type and find_setting(path, other.root) is not None:
            return f"{key}: is a setting of `verl {other.command}`, not of `verl {run_type.command}`; leave it out"
    near = suggest_key(key, root=run_type.root) or suggest_key(key, run_type.aliases.keys, run_type.root)
    above = find_setting(path[:-1], run_type.root) if len(path) > 1 else None
    if near is None and above is not None and above.section is not None:
        return f"{key}: is not a setting; {above.key} has: {', '.join(above.section.model_fields)}"
    if near is None:
        return f"{key}: is not a setting; `verl config` lists them all"
    mend = near if value is None else f"{near}={format_value(value)}"
    return f"{key}: is not a setting; the nearest is {near}: set {mend}"


def _validate(run_type: RunType[C], tree: Tree, problems: list[str]) -> tuple[C, set[str]]:
    """The config, and the keys whose values were wrong: those have their defaults, so that the checks can go on."""
    try:
        return run_type.root.model_validate(tree), set()
    except ValidationError as error:
        wrong: dict[str, str] = {}
        for item in error.errors(include_url=False):
            found = _setting_at(run_type, item["loc"])
            wrong.setdefault(found.key, _wrong(found, item))
    problems += wrong.values()
    for key in wrong:
        delete_path(tree, tuple(key.split(".")))
    return run_type.root.model_validate(tree), set(wrong)


def _setting_at(run_type: RunType[C], loc: tuple[int | str, ...]) -> Setting:
    """The setting of an error: pydantic goes on into list items and members of unions."""
    known = collect_settings(run_type.root)
    keys = (".".join(str(part) for part in loc[:length]) for length in range(len(loc), 0, -1))
    return next(known[key] for key in keys if key in known)


_RULES: dict[str, Callable[[Any], str]] = {
    "greater_than_equal": lambda context: f"must be at least {context['ge']}",
    "greater_than": lambda context: f"must be above {context['gt']}",
    "less_than_equal": lambda context: f"must be at most {context['le']}",
    "less_than": lambda context: f"must be below {context['lt']}",
    "value_error": lambda context: str(context["error"]),
}


def _wrong(setting: Setting, item: Any) -> str:
    value, mend = format_value(item["input"]), setting.default
    if item["type"] in _RULES:
        rule = _RULES[item["type"]](item["ctx"])
    elif setting.choices:
        rule = f"must be one of {', '.join(str(choice) for choice in setting.choices)}"
        rule += f", or your own as {CUSTOM_FUNCTION}" if setting.takes_custom_function else ""
        close = get_close_matches(value, [str(choice) for choice in setting.choices], n=1)
        if close and not isinstance(mend, list):
            mend = close[0]
    else:
        rule = f"must be {setting.type_name}"
    advice = "" if setting.required else f"; set {setting.key}={format_value(mend)}"
    return f"{setting.key}: {value} {rule}{advice}"


def _one_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split("\n")[0].split())
