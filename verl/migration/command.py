"""Turns a run of a launch script into a `verl` command, and says what became of each changed key."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl.config.checks.ignored import find_unmet_condition
from verl.config.command_line import parse_overrides
from verl.config.legacy.legacy_keys import OtherDefault
from verl.config.load import GENERATE, AnyRunType, RunType, load_run
from verl.config.paths import find_setting, iter_leaves, join_path
from verl.errors import ConfigError
from verl.migration.capture import restore_variables
from verl.migration.launches import LaunchCommand, write_value
from verl.redaction import redact


class Change(NamedTuple):
    """What became of one key: the key as written, its outcome, and the reason."""

    key: str
    outcome: str
    reason: str


@dataclass(slots=True)
class Migration:
    """The command of verl that does what a launch script does, and what was changed."""

    launch: LaunchCommand
    settings: dict[str, str] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Settings that are refused; they are not in the command."""
    notes: list[str] = field(default_factory=list)
    output: str | None = None

    @property
    def run_type(self) -> AnyRunType:
        """The type of the run."""
        return self.launch.run_type

    @property
    def is_complete(self) -> bool:
        """Whether the command has everything that the script asks for."""
        return not self.problems

    def command(self) -> list[str]:
        """Return the arguments of the command, unquoted."""
        options = ["--output", self.output] if self.output else []
        arguments = [*options, *(f"{key}={text}" for key, text in self.settings.items())]
        return ["verl", self.run_type.command, *map(restore_variables, arguments)]

    def find_unknown(self, text: str) -> list[str]:
        """Return the variables in a text that the shell expands; `${NAME}` of others interpolates settings."""
        return [name for name in re.findall(r"\$\{(\w+)\}", text) if name in self.launch.open_variables]


def migrate(launch: LaunchCommand) -> Migration:
    """Return the command for a launch script; what it cannot express is in `problems`."""
    result = Migration(launch, notes=list(launch.notes))
    for text in launch.overrides:
        _migrate_override(text, result)
    result.problems += _check(result)
    if launch.run_type is not GENERATE:
        for key, other in launch.run_type.legacy.defaults.items():
            if other.is_kept and key not in result.settings:
                _add_default(key, other, result)
    return result


def _add_default(key: str, other: OtherDefault, result: Migration) -> None:
    """Set the default of the script's origin, if it has an effect and fits the other settings."""
    result.settings[key] = other.value
    config, problems = _load(result)
    if problems or find_unmet_condition(config, key) is not None:
        del result.settings[key]
    else:
        result.changes.append(Change(key, f"added: {key}={other.value}", f"other default: {other.reason}"))


def _migrate_override(text: str, result: Migration) -> None:
    raw_key, _, raw_value = text.lstrip("+").partition("=")
    if result.run_type is GENERATE and raw_key == "data.output_path":
        result.output = raw_value
        result.changes.append(Change(raw_key, "renamed to --output", ""))
        return
    if (unknown := result.find_unknown(raw_value)) and not raw_key.startswith("~"):
        result.notes.append(f"{raw_key}: is not checked: the script does not set {', '.join(unknown)}")
        _place(tuple(raw_key.split(".")), None, raw_value, result)
        return
    problems: list[str] = []
    for override in parse_overrides([text], problems):
        path = tuple(override.key_or_group.split("."))
        if override.is_hydra_override() or override.is_delete():
            result.changes.append(Change(text, "dropped", "nothing to change: verl has no such default"))
            continue
        value = override.value()
        leaves = iter_leaves(value, path) if isinstance(value, dict) and value else [(path, value)]
        for spelled, leaf in leaves:
            _place(spelled, leaf, write_value(leaf), result)
    result.problems += problems


def _place(path: tuple[str, ...], value: Any, text: str, result: Migration) -> None:
    """Put one setting into the command, or note why it is not there; `value` is None if it is not known yet."""
    run_type, key, hints = result.run_type, join_path(path), list[str]()
    target, meant = run_type.legacy.canonicalize(path, value, hints)
    rule = run_type.legacy.find_rule(target)
    if run_type.legacy.is_default_choice(target, meant):
        result.changes.append(Change(key, "dropped", "there are no config groups"))
    elif text == "null" and run_type.legacy.unsets(target, meant):
        result.changes.append(Change(key, "dropped", "null means that it is not set"))
    elif problem := run_type.legacy.find_refused_value(target, meant):
        result.problems.append(problem)
    elif find_setting(target, run_type.root) is not None:
        result.settings[join_path(target)] = text if meant == value else write_value(meant)
        if target != path or meant != value:
            outcome = f"{join_path(target)}={result.settings[join_path(target)]}"
            reason = "passed on to vLLM" if ".engine_kwargs.vllm." in join_path(target) else "another name"
            result.changes.append(Change(key, outcome, reason if target != path else "another name of the value"))
    elif rule is None:
        result.settings[key] = text  # the check below says what is wrong with it
    elif rule.refuses(value if value is not None else text):
        result.problems.append(rule.describe(join_path(target), text))
    else:
        result.changes.append(Change(key, "dropped", rule.text if rule.kind != "needs" else f"no {rule.text} needed"))


def _check(result: Migration) -> list[str]:
    """Return what is wrong with the settings of the command, and take these settings out of it."""
    problems = _load(result)[1]
    for problem in problems:
        result.settings.pop(problem.split(":")[0], None)
    return problems


def _load(result: Migration) -> tuple[Any, list[str]]:
    """Return the settings of the command as a run would have them, and what is wrong with them.

    Modules of `external_lib` are not imported: migrating a script runs none of its code.
    """
    arguments = [
        f"{key}={text}"
        for key, text in result.settings.items()
        if not result.find_unknown(text) and not key.endswith("model.external_lib")
    ]
    run_type: RunType[Any] = result.run_type
    try:
        return load_run(run_type, arguments, complete=False)[0].config, []
    except ConfigError as error:
        return None, error.problems


def render(result: Migration) -> str:
    """Return a shell script: the command, and what became of changed keys as comments."""
    program, command, *arguments = result.command()
    launch = result.launch
    lines = [f"cd {_quote(launch.folder, result)}"] if launch.folder else []
    exports = {name: f"export {name}={_quote(value, result)}" for name, value in launch.exports.items()}
    secrets = [name for name, line in exports.items() if redact(line) != line]
    lines += [line for name, line in exports.items() if name not in secrets]
    lines.append(" \\\n  ".join([f"{program} {command}", *(_quote(argument, result) for argument in arguments)]))
    lines += comment("Changed", _table(result.changes))
    lines += comment("Refused, and not in the command", [f"- {problem}" for problem in result.problems])
    notes = [*result.notes, *(f"{name} is a secret that the script exports; set it yourself" for name in secrets)]
    lines += comment("Notes", [f"- {note}" for note in notes])
    return "\n".join(lines) + "\n"


def _quote(text: str, result: Migration) -> str:
    """Return one word for the shell, which expands nothing but `${NAME}` of variables that are left to it."""
    text = restore_variables(text)
    names = result.find_unknown(text)
    if not names:
        return shlex.quote(text)
    parts = re.split(rf"(\$\{{(?:{'|'.join(names)})\}})", text)
    parts[::2] = [re.sub(r'(["$`\\])', r"\\\1", part) for part in parts[::2]]
    return '"' + "".join(parts) + '"'


def comment(title: str, paragraphs: Sequence[str]) -> Iterator[str]:
    """Yield a list as comments of a shell script; each line of a paragraph is a comment."""
    if paragraphs:
        text = restore_variables("\n".join(paragraphs))
        yield from ("", f"# {title}:")
        yield from (f"# {line}".rstrip() for line in text.splitlines())


def _table(changes: list[Change]) -> list[str]:
    width = max((len(change.key) for change in changes), default=0)
    middle = max((len(change.outcome) for change in changes), default=0)
    return [f"{change.key:<{width}}  {change.outcome:<{middle}}  {change.reason}".rstrip() for change in changes]
