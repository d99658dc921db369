"""What stays out of a process: torch out of the controller until it reads data, everything heavy out of settings."""

import pkgutil
import subprocess
import sys

import pytest

import verl.models

pytestmark = pytest.mark.contract
MODELS = [module.name for module in pkgutil.iter_modules(verl.models.__path__, "verl.models.")]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("verl.trainer.build.rl_builder", ("torch", "transformers", "vllm")),
        ("verl.commands.train", ("torch", "transformers", "vllm", "ray")),
        ("verl.config.load", ("torch", "transformers", "vllm", "ray")),
        ("verl.commands.demo", ("torch", "transformers", "vllm", "ray")),
        *((module, ("torch", "transformers", "safetensors", "ray")) for module in MODELS),
    ],
)
def test_an_import_brings_nothing_that_it_should_not(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*(name for name in {absent!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
