"""A stand-in for torchvision, of which PyPI has CUDA builds only; they cannot be imported with a CPU build of torch.

SGLang imports it for images. Every submodule and name can be imported, and every object raises when it is created.
"""

import enum
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.28.0"

InterpolationMode = enum.Enum(
    "InterpolationMode", ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"]
)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def create(self: object, *args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"torchvision: {name} is a stand-in")

        value = InterpolationMode if name == "InterpolationMode" else type(name, (), {"__init__": create})
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are made when they are asked for."""


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Module
