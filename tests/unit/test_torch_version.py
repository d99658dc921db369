"""The lower bound of torch is the release with the newest of the names that verl uses, and all of these exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
NEWEST = {
    "torch.nn.attention.varlen.varlen_attn": "2.10",
    "torch.nn.attention.varlen.varlen_attn(enable_gqa)": "2.12",
}
"""Names, or parameters of functions, that torch 2.9 did not have, with the release that brought them."""
OPTIONAL = {"torch.utils.tensorboard.SummaryWriter"}  # needs the package tensorboard


def list_names(file: Path) -> Iterator[str]:
    """Yield the names of torch that a module imports or reads from a module of torch."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "torch":
                    yield each.name
                    aliases[each.asname or "torch"] = each.name if each.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torch":
            for each in node.names:
                yield f"{node.module}.{each.name}"
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in aliases and parts:
            yield ".".join([aliases[node.id], *reversed(parts)])


def resolve(name: str) -> Any:
    """Return what a dotted name refers to, importing modules on the way; stop at what is not a module or a class."""
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        if not inspect.ismodule(found) and not inspect.isclass(found):
            return found  # an attribute of a value
        path = f"{path}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


@pytest.mark.parametrize("file", sorted(ROOT.glob("verl/**/*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_torch_that_is_used_exists(file: Path) -> None:
    for name in set(list_names(file)) - OPTIONAL:
        resolve(name)


def test_a_name_that_does_not_exist_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import torch.distributed as dist\nfrom torch.nn import attention\ndist.no_such\nattention.varlen.f\n"
    )
    names = set(list_names(file))
    assert names >= {"torch.distributed.no_such", "torch.nn.attention", "torch.nn.attention.varlen.f"}
    with pytest.raises(ModuleNotFoundError):
        resolve("torch.distributed.no_such")


def test_the_lower_bound_is_the_release_of_the_newest_name() -> None:
    used = {name for file in ROOT.glob("verl/**/*.py") for name in list_names(file)}
    for entry in NEWEST:
        name, _, parameter = entry.rstrip(")").partition("(")
        assert name in used, f"{name} is no longer used"
        assert not parameter or parameter in inspect.signature(resolve(name)).parameters
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [bound] = [r for r in map(Requirement, project["dependencies"]) if r.name == "torch"]
    assert str(bound.specifier) == f">={max(NEWEST.values(), key=Version)}"
    assert Version(torch.__version__) in bound.specifier
