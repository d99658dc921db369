"""The public surface against a snapshot: settings, commands with their options, public names. Nothing may disappear.

make show-surface [ARGS="[--short] [--write]"]

A setting is compared by name, type and default, a command by the options that its help lists, a public module by its
`__all__`. What the snapshot has and the code has not, or has differently, fails; what is new is listed. `--write` takes
a new snapshot.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

from _common import finish

SNAPSHOT = Path(__file__).with_name("_surface.json")
MODULES = ("verl", "verl.trainer", "verl.workers")


def settings(root: type, above: str = "") -> dict[str, list[str]]:
    """Dotted key -> [type, default] of every setting below a section."""
    from pydantic import BaseModel

    result = {}
    for name, field in root.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            result |= settings(kind, f"{above}{name}.")
        else:
            result[f"{above}{name}"] = [spell(kind), repr(field.get_default(call_default_factory=True))]
    return result


def spell(annotation: Any) -> str:
    """A type without the names that we gave it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return spell(parts[0])
    if hasattr(annotation, "list_names"):  # of a registry
        return " | ".join(map(repr, annotation.list_names()))
    if origin is typing.Literal:
        return " | ".join(map(repr, parts))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(spell, parts))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(spell, parts))}]"
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def commands() -> dict[str, list[str]]:
    """Command -> the options in its help."""
    found = {}
    for line in help_of().split("commands:")[1].splitlines():
        if name := re.match(r"  ([a-z-]+)  ", line):
            found[name[1]] = sorted(set(re.findall(r"(?<![\w-])--?[a-z][a-z_-]*", help_of(name[1]))))
    return found


def help_of(*command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "verl", *command, "--help"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def surface() -> dict[str, dict[str, Any]]:
    from verl.config.schema import Config, SftConfig

    return {
        "settings": settings(Config),
        "sft_settings": settings(SftConfig),
        "commands": commands(),
        "modules": {name: sorted(importlib.import_module(name).__all__) for name in MODULES},
    }


def compare(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(what is gone or different, what is new)"""
    lost, added = [], []
    for part, entries in before.items():
        for key, value in entries.items():
            if key not in now[part]:
                lost.append(f"{part}: {key} is gone")
            elif part in ("commands", "modules"):
                lost += [f"{part}: {key} {name} is gone" for name in value if name not in now[part][key]]
                added += [f"{part}: {key} {name}" for name in now[part][key] if name not in value]
            elif now[part][key] != value:
                lost.append(f"{part}: {key} was {value}, is {now[part][key]}")
        added += [f"{part}: {key}" for key in now[part] if key not in entries]
    return lost, added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--write", action="store_true", help="take a new snapshot")
    now = surface()
    if parser.parse_args().write:
        SNAPSHOT.write_text(json.dumps(now, indent=1) + "\n")
    lost, added = compare(json.loads(SNAPSHOT.read_text()), now)
    for line in lost:
        print(line)
    counts = {part: len(entries) for part, entries in now.items()}
    finish("surface", not lost, **counts, lost=len(lost), added=added)


if __name__ == "__main__":
    main()
