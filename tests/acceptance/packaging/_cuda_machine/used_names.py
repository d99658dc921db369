"""Looks for every name of torch.cuda and vLLM that the source of verl uses, and prints those that do not exist.

A name is what is imported (`from vllm.x import y`), or what an attribute chain from an imported module spells
(`torch.cuda.memory._dump_snapshot`).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pretended_gpus import pretend

PREFIXES = ("torch.cuda", "vllm")
OBJECTS = {"self._llm": "vllm.v1.engine.async_llm.AsyncLLM"}
"""Attributes that hold an object of vLLM."""


def find_names(tree: ast.AST) -> Iterator[str]:
    """Yield full names with one of the prefixes."""
    modules: dict[str, str] = {}  # local name -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := spell(node)):
            first, _, rest = name.partition(".")
            if first in modules:
                yield f"{modules[first]}.{rest}"
            for prefix, kind in OBJECTS.items():
                if name.startswith(f"{prefix}."):
                    yield f"{kind}.{name.removeprefix(prefix)[1:].partition('.')[0]}"


def spell(node: ast.expr) -> str:
    """Return the dotted name of an attribute chain; empty if it begins with something else than a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := spell(node.value)):
        return f"{value}.{node.attr}"
    return ""


def exists(name: str) -> bool:
    """Return whether a module, or an attribute of the longest module in front of it, has this name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(value, part):
                return has_field(value, part) and part == parts[-1]
            value = getattr(value, part)
        return True
    return False


def has_field(owner: object, name: str) -> bool:
    """Return whether a class declares a field without a default, or sets an attribute in its methods."""
    if not isinstance(owner, type):
        return False
    declares = any(name in vars(base).get("__annotations__", {}) for base in owner.__mro__)
    return declares or f"self.{name} = " in inspect.getsource(owner)


def main() -> None:
    pretend()
    root = Path(sys.argv[1])
    used: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        for name in find_names(ast.parse(path.read_text(encoding="utf-8"))):
            if name.startswith(tuple(f"{prefix}." for prefix in PREFIXES)):
                used.setdefault(name, str(path.relative_to(root)))
    missing = {name: file for name, file in used.items() if not exists(name)}
    print(json.dumps({"names": len(used), "missing": missing, "used": sorted(used)}))


if __name__ == "__main__":
    main()
