"""How to install optional packages. The name `verl` on PyPI belongs to another project, so hints name this checkout."""

from __future__ import annotations


def format_install_hint(extra: str) -> str:
    """Return the command that installs an extra of `pyproject.toml`, and where to run it."""
    return f'pip install -e ".[{extra}]" in the verl checkout'


def format_requirement_hint(requirement: str) -> str:
    """Return the command that installs another version of a dependency."""
    return f'pip install "{requirement}"'


def format_vllm_hint() -> str:
    """Return the command that installs verl with vLLM, and where to run it."""
    return "pip install --no-deps -r requirements.txt -e . in the verl checkout (with CUDA: requirements-cuda.txt)"


def format_cuda_hint() -> str:
    """Return the command that installs verl with builds for CUDA, and where to run it."""
    return "pip install --no-deps -r requirements-cuda.txt -e . in the verl checkout"


def format_sglang_hint() -> str:
    """Return how to install SGLang, which pins other versions of torch than verl."""
    return (
        'install it in an environment of its own, with verl (pip install "sglang>=0.5.23" and pip install --no-deps -e '
        ". in the verl checkout), and set actor_rollout_ref.rollout.python to its interpreter"
    )
