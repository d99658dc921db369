"""Load settings from a command line, a YAML file or a dict into a validated, frozen `Config` or `SftConfig`.

The stages: Hydra's grammar and defaults lists -> canonical keys (`legacy`) -> interpolations -> known keys and types
(`schema`) -> settings that others set (`asynchronous`, `batch_sizes`) -> settings against each other (`checks`), all
for one `RunType`. Problems of all stages are collected and raised as one error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path as File
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from verl.config import checks
from verl.config.adapter_files import fill_from_adapter
from verl.config.asynchronous import delete_empty_batch, resolve_asynchronous
from verl.config.batch_sizes import resolve_batching
from verl.config.checks.requirements import find_missing
from verl.config.command_line import (
    SweepPoint,
    compose_yaml,
    expand_sweeps,
    find_yaml,
    format_error,
    parse_options,
    parse_overrides,
)
from verl.config.features import get_model_settings
from verl.config.legacy.legacy_keys import SFT_KEYS, TRAIN_KEYS, LegacyKeys
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
from verl.config.schema import CUSTOM_FUNCTION, MISSING, Config, Section, Setting, SftConfig, collect_settings
from verl.custom_functions import import_external
from verl.errors import ConfigError
from verl.redaction import remember

if TYPE_CHECKING:  # importing Hydra takes a third of a second
    from hydra.core.override_parser.types import Override

C = TypeVar("C", bound=Section)


@dataclass(frozen=True, slots=True)
class RunType(Generic[C]):
    """A type of run; `command` is the `verl` command that starts it."""

    command: str
    root: type[C]
    legacy: LegacyKeys
    conflicts: tuple[checks.Check, ...]
    hints: tuple[checks.Check, ...]


TRAIN = RunType("train", Config, TRAIN_KEYS, checks.TRAIN_CONFLICTS, checks.TRAIN_HINTS)
SFT = RunType("sft", SftConfig, SFT_KEYS, checks.SFT_CONFLICTS, checks.SFT_HINTS)
GENERATE = RunType("generate", Config, TRAIN_KEYS, checks.GENERATION_CONFLICTS, checks.GENERATION_HINTS)
"""Commands that generate and score responses with the training settings; only the settings they use are checked."""
REPLAY = RunType("replay", Config, TRAIN_KEYS, (), ())
"""Settings that were checked when their run started, on a machine that may have had other packages."""
AnyRunType = RunType[Config] | RunType[SftConfig]
RUN_TYPES: tuple[AnyRunType, ...] = (TRAIN, SFT)


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[C]):
    """Validated settings, hints about them, the sweep values that they come from, and the origins of given settings."""

    config: C
    hints: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)


AnyLoaded = LoadedConfig[Config] | LoadedConfig[SftConfig]


def load(argv: Sequence[str], *, complete: bool = True) -> list[LoadedConfig[Config]]:
    """Load the settings of `verl train` from a command line: one, or with `-m` one per point of the sweep.

    Args:
        argv: Overrides and options.
        complete: Whether required settings and packages must be present, as for a run.
    """
    return load_run(TRAIN, argv, complete=complete)


def load_sft(argv: Sequence[str], *, complete: bool = True) -> list[LoadedConfig[SftConfig]]:
    """Load the settings of `verl sft` from a command line."""
    return load_run(SFT, argv, complete=complete)


def load_for_generation(argv: Sequence[str]) -> LoadedConfig[Config]:
    """Load the training settings for commands that only generate or score responses: `verl generate`, `verl eval`."""
    return load_run(GENERATE, argv, complete=False)[0]


def load_for_replay(settings: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Load the settings of a run that has trained, as nested dicts, and apply overrides: `verl replay`."""
    return load_run(REPLAY, overrides, complete=False, tree=copy.deepcopy(dict(settings)))[0].config


def load_run(
    run_type: RunType[C], argv: Sequence[str], *, complete: bool = True, tree: Tree | None = None
) -> list[LoadedConfig[C]]:
    """Load the settings of a type of run from a command line, on top of the settings in `tree`."""
    runs, problems = inspect_run(run_type, argv, complete=complete, tree=tree)
    if problems:
        raise ConfigError(problems)
    return runs


def inspect_run(
    run_type: RunType[C], argv: Sequence[str], *, complete: bool = True, tree: Tree | None = None
) -> tuple[list[LoadedConfig[C]], list[str]]:
    """Return what `load_run` returns and all problems: settings that are wrong have their defaults."""
    problems: list[str] = []
    options = parse_options(argv, problems)
    overrides = parse_overrides(options.overrides, problems)
    points = expand_sweeps(overrides, options.multirun, problems)
    source = find_yaml(options.config_path, options.config_name, problems)
    if problems:
        # what could be read is validated too, so that all problems are reported
        points = points[:1] or [SweepPoint([])]
    runs = [_build(run_type, point, tree or {}, source, complete, problems) for point in points]
    return runs, list(dict.fromkeys(problems))


def load_dict(
    settings: Mapping[str, Any], overrides: Sequence[str] = (), *, complete: bool = True
) -> LoadedConfig[Config]:
    """Load settings from nested dicts and apply overrides."""
    return load_run(TRAIN, overrides, complete=complete, tree=copy.deepcopy(dict(settings)))[0]


def _build(
    run_type: RunType[C],
    point: SweepPoint,
    tree: Tree,
    source: tuple[File, str] | None,
    complete: bool,
    problems: list[str],
) -> LoadedConfig[C]:
    hints: list[str] = []
    overrides = point.overrides
    if source is not None:
        tree, overrides = compose_yaml(*source, overrides, problems)
    tree = run_type.legacy.canonicalize_tree(tree, hints, problems)
    origins = {join_path(path): f"{source[1]}.yaml" if source else "Python" for path, _ in iter_leaves(tree)}
    for override in overrides:
        _apply(run_type, override, tree, origins, hints, problems)
    _resolve(run_type, tree, problems)
    remember(tree)
    known = _select_known(run_type, tree, hints, problems)
    delete_empty_batch(known)
    origins |= fill_from_adapter(run_type.root, known, hints)
    problems += _import_external(run_type, known)
    config, invalid = _validate(run_type, known, problems)
    config = resolve_batching(resolve_asynchronous(config, hints, origins), origins)
    conflicts = checks.run_checks([find_missing, *run_type.conflicts] if complete else run_type.conflicts, config)
    # an invalid value was replaced by its default, so a conflict that names its key may not exist
    problems += [conflict for conflict in conflicts if not any(_names(conflict, key) for key in invalid)]
    hints += checks.run_checks(run_type.hints, config)
    return LoadedConfig(config, tuple(dict.fromkeys(hints)), point.sweep, origins)


def _import_external(run_type: RunType[C], tree: Tree) -> list[str]:
    """Import the modules of `external_lib`, whose engines are valid names afterwards; return why this failed."""
    default = run_type.root()
    assert isinstance(default, Config | SftConfig)
    section, _ = get_model_settings(default)
    given = get_path(tree, (*section.split("."), "external_lib"))
    modules = [given] if isinstance(given, str) else given or []
    try:  # a value of another type is reported with the other types
        import_external([name for name in modules if isinstance(name, str)], f"{section}.external_lib")
    except ConfigError as error:
        return error.problems
    return []


# --- overrides


def _apply(
    run_type: RunType[C],
    override: Override,
    tree: Tree,
    origins: dict[str, str],
    hints: list[str],
    problems: list[str],
) -> None:
    if override.is_hydra_override():
        hints.append(f"{override.input_line} has no effect: verl reads settings with Hydra but does not run under it")
        return
    path: Path = tuple(override.key_or_group.split("."))
    value = override.value()
    if override.is_delete():
        _delete(run_type, path, value, tree, hints, problems)
        _set_origin(origins, run_type.legacy.resolve_alias(path), None)
        return
    for spelled, leaf in iter_leaves(value, path) if isinstance(value, dict) and value else [(path, value)]:
        target, meant = run_type.legacy.canonicalize(spelled, leaf, hints)
        if override.is_add() and join_path(target) in collect_settings(run_type.root):
            hints.append(f"+{join_path(spelled)}: {join_path(target)} is a declared setting; the + is not needed")
        if run_type.legacy.is_default_choice(target, meant):
            hints.append(f"{join_path(spelled)}={meant} has no effect: there are no config groups")
        elif problem := run_type.legacy.find_refused_value(target, meant):
            problems.append(problem)
        elif not run_type.legacy.unsets(target, meant):
            set_path(tree, target, meant)
            origin = "command line" if target == spelled else f"command line, as {join_path(spelled)}"
            _set_origin(origins, target, origin)


def _set_origin(origins: dict[str, str], path: Path, origin: str | None) -> None:
    """Replace the origins of a setting and of the entries below it."""
    key = join_path(path)
    for name in [name for name in origins if f"{name}.".startswith(f"{key}.")]:
        del origins[name]
    if origin is not None:
        origins[key] = origin


def _delete(run_type: RunType[C], path: Path, value: Any, tree: Tree, hints: list[str], problems: list[str]) -> None:
    """Apply `~key`: reset a setting to its default, or remove an entry of an open dictionary."""
    target, _ = run_type.legacy.canonicalize(path, None, hints)
    setting, current, key = find_setting(target, run_type.root), get_path(tree, target), join_path(target)
    if setting is None and run_type.legacy.find_rule(target) is None:
        problems.append(_describe_unknown(run_type, target))
    elif setting is None:
        hints.append(f"~{key} has no effect: it is not a setting here")
    elif value is not None and value != current:
        problems.append(f"~{key}={format_value(value)}: the value is {format_value(current)}; write only ~{key}")
    elif not delete_path(tree, target) and setting.key != key:
        entries = ", ".join(get_path(tree, setting.path) or ()) or "nothing"
        problems.append(f"~{key}: does not exist, so it cannot be removed; {setting.key} contains {entries}")


# --- tree of settings


def _resolve(run_type: RunType[C], tree: Tree, problems: list[str]) -> None:
    """Resolve ${...} interpolations, which may refer to defaults too."""
    waiting = [(path, value) for path, value in iter_leaves(tree) if "${" in str(value)]
    if not waiting:
        return
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    whole: Tree = run_type.root().model_dump(mode="json")
    for path, value in iter_leaves(tree):
        set_path(whole, path, value)
    for alias, key in run_type.legacy.aliases.items():
        if "." not in alias:  # a section, as in ${rollout.n}
            whole.setdefault(alias, f"${{{key}}}")
    try:
        root = OmegaConf.create(whole)
    except OmegaConfBaseException as error:
        problems.append(f"{error.full_key}: cannot be read: {format_error(error)}; write ${{section.key}}")
        for path, _ in waiting:
            delete_path(tree, path)
        return
    for path, value in waiting:
        try:
            node: Any = root
            for name in path:
                node = node[name]
            set_path(tree, path, OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node)
        except OmegaConfBaseException as error:
            problems.append(
                f"{join_path(path)}: {format_value(value)} cannot be resolved: {format_error(error)}; write its value"
            )
            delete_path(tree, path)


def _select_known(run_type: RunType[C], tree: Tree, hints: list[str], problems: list[str]) -> Tree:
    """Return the declared part of the tree, without empty sections and `???`; report other keys."""
    known: Tree = {}
    for path, value in iter_leaves(tree):
        setting = find_setting(path, run_type.root)
        if setting is None and (rule := run_type.legacy.find_rule(path)) is not None:
            (problems if rule.refuses(value) else hints).append(rule.describe(join_path(path), value))
        elif problem := run_type.legacy.find_refused_value(path, value):
            problems.append(problem)
        elif setting is None:
            problems.append(_describe_unknown(run_type, path, value))
        elif setting.section is not None and setting.key == join_path(path):
            if value not in (None, {}):
                names = list(setting.section.model_fields)
                problems.append(
                    f"{setting.key}: {format_value(value)} must be a section with the keys {', '.join(names)}; set "
                    f"{setting.key}.{names[0]}=..."
                )
        elif value != MISSING:
            set_path(known, path, value)
    return known


def _describe_unknown(run_type: RunType[C], path: Path, value: Any = None) -> str:
    key = join_path(path)
    for other in RUN_TYPES:
        if other is not run_type and find_setting(path, other.root) is not None:
            return f"{key}: is a setting of `verl {other.command}`, not of `verl {run_type.command}`; remove it"

    near = suggest_key(key, run_type.root, run_type.legacy.aliases)
    if near is not None:
        given = "" if value is None else f"={format_value(value) if _accepts(run_type, near, value) else '...'}"
        return f"{key}: is not a setting; did you mean {near}? Set {near}{given}"
    parent = find_setting(path[:-1], run_type.root) if len(path) > 1 else None
    if parent is not None and parent.section is not None:
        return f"{key}: is not a setting; settings of {parent.key}: {', '.join(parent.section.model_fields)}"
    return f"{key}: is not a setting; run `verl config` to list all settings"


def _accepts(run_type: RunType[C], key: str, value: Any) -> bool:
    """Whether the setting, or alias of one, accepts the value."""
    tree: Tree = {}
    set_path(tree, *run_type.legacy.canonicalize(tuple(key.split(".")), value, []))
    try:
        run_type.root.model_validate(tree)
    except ValidationError:
        return False
    return True


def _validate(run_type: RunType[C], tree: Tree, problems: list[str]) -> tuple[C, set[str]]:
    """Return the config, and the keys of invalid values, which get their defaults so that validation can continue."""
    try:
        return run_type.root.model_validate(tree), set()
    except ValidationError as error:
        invalid: dict[str, str] = {}
        for item in error.errors(include_url=False):
            setting = _find_setting_of_error(run_type, item["loc"])
            invalid.setdefault(setting.key, _describe_invalid(setting, item))
    problems += invalid.values()
    for key in invalid:
        delete_path(tree, tuple(key.split(".")))
    return run_type.root.model_validate(tree), set(invalid)


def _names(text: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None


def _find_setting_of_error(run_type: RunType[C], loc: tuple[int | str, ...]) -> Setting:
    """Return the setting of a pydantic error, whose location may go on into list items and members of unions."""
    settings = collect_settings(run_type.root)
    keys = (".".join(str(part) for part in loc[:length]) for length in range(len(loc), 0, -1))
    return next(settings[key] for key in keys if key in settings)


_MEANT: dict[str, dict[str, str]] = {
    "trainer.device": {"gpu": "cuda"},
    "algorithm.adv_estimator": {"ppo": "gae", "dapo": "grpo", "dr_grpo": "grpo", "gspo": "grpo", "reinforce": "rloo"},
    "actor_rollout_ref.actor.policy_loss.loss_mode": {"ppo": "vanilla", "grpo": "vanilla", "dapo": "vanilla"},
}
"""Setting -> a name that users expect -> the choice that it stands for, where the most similar one is another thing."""
_RULES: dict[str, Callable[[Any], str]] = {
    "greater_than_equal": lambda context: f"must be at least {context['ge']}",
    "greater_than": lambda context: f"must be above {context['gt']}",
    "less_than_equal": lambda context: f"must be at most {context['le']}",
    "less_than": lambda context: f"must be below {context['lt']}",
    "value_error": lambda context: str(context["error"]),
}


def _describe_invalid(setting: Setting, item: Any) -> str:
    value, suggestion = format_value(item["input"]), setting.default
    if item["type"] in _RULES:
        rule = _RULES[item["type"]](item["ctx"])
    elif setting.choices:
        rule = f"must be one of {', '.join(str(choice) for choice in setting.choices)}"
        rule += f", or your own as {CUSTOM_FUNCTION}" if setting.takes_custom_function else ""
        meant = _MEANT.get(setting.key, {}).get(value)
        close = [meant] if meant else get_close_matches(value, [str(choice) for choice in setting.choices], n=1)
        if close and not isinstance(suggestion, list):
            suggestion = close[0]
    else:
        rule = f"must be {setting.type_name}"
    fix = "" if setting.required else f"; set {setting.key}={format_value(suggestion)}"
    return f"{setting.key}: {value} {rule}{fix}"
