"""The Python files of functions and classes that settings name, with the modules that they import."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from verl.custom_functions import PICKLE, load_pickle

_NOT_OF_THE_USER = {*sys.stdlib_module_names, "verl"}


def find_code(name: str) -> Path | None:
    """Return the file of `file.py:function`, `package.module:function` or, in the Python API, `python:module`."""
    path, _, module = name.rpartition(":")
    if path == "python":
        return find_source_file(module)
    path = path or name
    file = Path(path).expanduser()
    if file.is_file():
        return file
    package, *rest = path.split(".")
    try:
        spec = importlib.util.find_spec(package)  # imports nothing, as that of a submodule would
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    module_path = Path(spec.origin).parent.joinpath(*rest) if rest else Path(spec.origin)
    places = (module_path, module_path.with_suffix(".py"), module_path / "__init__.py")
    return next((each for each in places if each.is_file()), None)


def find_source_file(module: str) -> Path | None:
    """Return the file of a module that has been imported; None in a notebook."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else Path(file)


def list_files(names: Iterable[str]) -> list[Path]:
    """Return the files of functions, each with its imports; of a YAML file of tools, also those of its classes."""
    files: dict[Path, None] = {}
    for name in names:
        if (file := find_code(name)) is None:
            continue
        if file.suffix == PICKLE:
            files |= dict.fromkeys(_list_pickled(file))
        elif file.suffix == ".py":
            files |= dict.fromkeys(list_modules(file))
        else:
            files |= dict.fromkeys([file, *list_files(_list_classes(file))])
    return list(files)


def list_modules(file: Path) -> list[Path]:
    """Return a Python file and the modules that it imports, directly or not, from its folder or its package."""
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    inside = file.parent if root == file.parent else root / file.relative_to(root).parts[0]
    found: dict[Path, None] = {}
    queue = [file]
    while queue:
        current = queue.pop()
        if current not in found and current.is_file() and current.is_relative_to(inside):
            found[current] = None
            queue += _list_imports(current, [file.parent, root])
    return list(found)


def _list_imports(file: Path, folders: list[Path]) -> Iterator[Path]:
    """Yield the files that the import statements of a file may mean, and that may not exist."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # reported where it is loaded
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, bases = [alias.name for alias in node.names], folders
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            bases = [*file.parents[node.level - 1 : node.level]] if node.level else folders
        else:
            continue
        for base in bases:
            for parts in (name.split(".") for name in names):
                if bases is folders and parts[0] in _NOT_OF_THE_USER:
                    continue
                for end in range(1, len(parts) + 1):
                    path = base.joinpath(*parts[:end])
                    yield from (path.with_suffix(".py"), path / "__init__.py")


def _list_classes(file: Path) -> list[str]:
    """Return the names of the classes in a YAML file of tools; a file that is wrong is reported where it is loaded."""
    try:
        specs = yaml.safe_load(file.read_text())["tools"]
        return [":".join(str(spec["class_name"]).rsplit(".", 1)) for spec in specs if spec.get("class_name")]
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _list_pickled(file: Path) -> Iterator[Path]:
    """Yield the files of objects that were passed to the Python API."""
    for value in load_pickle(file).values():
        for each in value if isinstance(value, list) else [value]:
            if (source := find_source_file(each.__module__)) is not None:
                yield from list_modules(source)
