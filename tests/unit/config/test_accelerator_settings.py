"""Settings that the device of a run cannot fulfill are refused before anything starts, with a fix."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl.config.accelerator_validation import INVARIANT_BACKENDS, check_capability
from verl.config.load import load, load_for_generation
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

R, M = "actor_rollout_ref.rollout", "reward.reward_model"
CUDA, DETERMINISTIC = "trainer.device=cuda", "trainer.deterministic=true"


def find_problems(*settings: str) -> list[str]:
    try:
        load([f"{R}.n=8", *settings], complete=False)
    except ConfigError as error:
        return error.problems
    return []


def test_vllm_on_gpus_can_be_deterministic() -> None:
    assert find_problems(CUDA, DETERMINISTIC) == []
    assert find_problems(CUDA, DETERMINISTIC, f"{M}.enable=true", f"{M}.model_path=rm", f"{M}.rollout.name=vllm") == []


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ([f"{R}.name=hf"], f"set {R}.name=vllm"),
        ([f"{M}.enable=true", f"{M}.model_path=rm"], f"set {M}.rollout.name=vllm"),
        ([f"{R}.engine_kwargs.vllm.attention_backend=FLASHINFER"], "vllm.attention_backend=FLASH_ATTN"),
        (
            [f"{R}.engine_kwargs.vllm.attention_config={{backend:flashinfer}}"],
            "vllm.attention_config.backend=FLASH_ATTN",
        ),
    ],
)
def test_what_cannot_be_deterministic_on_gpus_is_refused(settings: list[str], fix: str) -> None:
    [problem] = find_problems(CUDA, DETERMINISTIC, *settings)
    assert "trainer.deterministic=true" in problem
    assert fix in problem
    assert problem.endswith("or set trainer.deterministic=false")
    assert find_problems(CUDA, *settings) == []
    if "reward_model" not in settings[0] and "kwargs" not in settings[0]:
        assert find_problems("trainer.device=cpu", DETERMINISTIC, *settings) == []


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "triton_attn", "auto"])
def test_attention_that_is_batch_invariant_may_be_chosen(backend: str) -> None:
    assert find_problems(CUDA, DETERMINISTIC, f"{R}.engine_kwargs.vllm.attention_backend={backend}") == []


def test_generation_alone_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="has no batch-invariant mode on GPUs"):
        load_for_generation([CUDA, DETERMINISTIC, f"{R}.name=hf"])


def test_old_gpus_are_refused() -> None:
    check_capability((8, 0))
    check_capability((9, 0))
    with pytest.raises(ConfigError, match=r"8\.0 or later .* has 7\.5; set trainer\.deterministic=false"):
        check_capability((7, 5))


@pytest.mark.parametrize("name", INVARIANT_BACKENDS)
def test_vllm_calls_these_attention_backends_batch_invariant(name: str) -> None:
    registry = import_module("vllm.v1.attention.backends.registry")
    module, _, kind = registry.AttentionBackendEnum[name].get_path().rpartition(".")
    spec = find_spec(module)  # most cannot be imported without a GPU
    assert spec is not None
    assert spec.origin is not None
    [source] = [
        ast.unparse(node)
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == kind
    ]
    assert "def supports_batch_invariance(cls) -> bool:\n        return True" in source
