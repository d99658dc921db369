"""Functions and modules that settings name: built-in ones, or the user's."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pickle
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from verl.errors import ConfigError
from verl.private_files import check_owner

F = TypeVar("F", bound=Callable[..., Any])
PICKLE = ".pkl"  # suffix of files that the Python API writes
_CHANGED = "__verl_changed__"  # attribute of a module: modification time of its file
FILE_MODULE = "verl_custom_"  # prefix of modules that were loaded from a file


def load_function(name: str, known: Mapping[str, F], setting: str) -> F:
    """Return the function `name` of `known`, or import `package.module:function` or `file.py:function`."""
    if name in known:
        return known[name]
    if ":" not in name:
        names = f"one of {', '.join(known)}, nor " if known else ""
        raise ValueError(f"{setting}: {name!r} is not {names}package.module:function")
    return _import_function(name, setting)  # type: ignore[return-value]


def import_external(modules: Sequence[str], setting: str = "model.external_lib") -> None:
    """Import modules of the user, which register engines or models of their own. A repeated import is a no-op.

    Args:
        modules: Names as in an import statement.
        setting: The setting that names them, for messages.

    Raises:
        ConfigError: A module cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                [
                    f"{setting}: {module} cannot be imported: {error}; give the name of a module that is importable "
                    "where the run starts (add its folder to PYTHONPATH)"
                ]
            ) from error


@cache
def _import_function(name: str, setting: str) -> Callable[..., Any]:
    path, _, attribute = name.rpartition(":")
    try:
        function = _find_function(path, attribute)
    except (ImportError, AttributeError, KeyError, OSError) as error:
        raise ValueError(
            f"{setting}: {name!r} cannot be imported: {error}; it must be file.py:function or package.module:function, "
            "importable where the run starts (add its folder to PYTHONPATH)"
        ) from error
    if not callable(function):
        raise ValueError(f"{setting}: {name!r} is {type(function).__name__}, it must be a function")
    return function


def _find_function(path: str, attribute: str) -> Any:
    if path.endswith(PICKLE):
        return load_pickle(Path(path))[attribute]
    module = load_file(Path(path).expanduser()) if path.endswith(".py") else importlib.import_module(path)
    if not hasattr(module, attribute):
        defined = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise AttributeError(f"{path} has no {attribute!r}; it has {', '.join(defined) or 'no functions'}")
    return getattr(module, attribute)


def load_file(file: Path) -> ModuleType:
    """Import a Python file under a unique name: one called `math.py` shadows nothing. It is executed once.

    It can import modules next to it. Installed modules come first: a file `random.py` next to it shadows nothing.
    """
    name = f"{FILE_MODULE}{hashlib.sha1(str(file.resolve()).encode()).hexdigest()[:12]}"
    changed = file.stat().st_mtime_ns
    known = sys.modules.get(name)
    if known is not None and known.__dict__.get(_CHANGED) == changed:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__[_CHANGED] = changed
    sys.modules[name] = module  # so that its classes can be pickled
    if (folder := str(file.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # also for imports inside of functions
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def pickle_by_value(value: Any, functions: Sequence[Any]) -> bytes:
    """Pickle `value` with the code of the modules that define `functions`: they need not be importable elsewhere."""
    import cloudpickle

    names = {getattr(function, "__module__", None) or "" for function in functions} - {"__main__"}
    modules = [module for name in names if (module := sys.modules.get(name)) is not None and not _is_installed(module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


@cache
def load_pickle(file: Path) -> dict[str, Any]:
    """Return the objects in a file that the Python API wrote. A file that another user may have planted is refused."""
    check_owner(file)
    objects: dict[str, Any] = pickle.loads(file.read_bytes())
    return objects


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    installed = [Path(path).resolve() for path in set(sysconfig.get_paths().values())]
    return file is None or any(Path(file).resolve().is_relative_to(path) for path in installed)
