"""A stand-in for `sgl_kernel`, of which PyPI has CUDA builds only.

SGLang imports names of this package where it uses none of them on the CPU: every name can be imported, and its use
raises. It has no submodules: SGLang catches that ImportError, and falls back to torch.
"""

from typing import Any, NoReturn

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in")

    return globals().setdefault(name, call)
