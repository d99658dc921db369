"""Settings that the device of a run cannot fulfill are refused before anything starts, with a fix."""

from __future__ import annotations

import ast
from contextlib import AsyncExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl.config.checks.device_support import check_capability
from verl.config.load import load, load_for_generation
from verl.errors import ConfigError
from verl.rollout.vllm.checks import INVARIANT_BACKENDS
from verl.tracking.console import Console
from verl.trainer.build.runtime import RunBuilder
from verl.trainer.restarts import RestartTracker

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
    with pytest.raises(ConfigError, match="hf does not repeat results to the bit on cuda"):
        load_for_generation([CUDA, DETERMINISTIC, f"{R}.name=hf"])


@pytest.mark.parametrize(("setting", "off"), [("dtype=fp8", "dtype=auto"), ("quantization=fp8", "quantization=null")])
def test_quantized_engines_need_vllm_and_accelerators(setting: str, off: str) -> None:
    assert find_problems(CUDA, f"{R}.{setting}") == find_problems(f"{R}.{setting}") == []
    for other, reason in (("trainer.device=cpu", "no FP8 kernels for the CPU"), (f"{R}.name=hf", f"{R}.name=vllm")):
        [problem] = find_problems(f"{R}.{setting}", other)
        assert problem.startswith(f"{R}.{setting.replace('=', ': ')} requires ")
        assert reason in problem
        assert problem.endswith(f"set {R}.{off}")
    with pytest.raises(ConfigError, match="no FP8 kernels"):
        load_for_generation(["trainer.device=cpu", f"{R}.{setting}"])


def test_quantized_engines_compute_in_16_bits() -> None:
    [problem] = find_problems(CUDA, f"{R}.quantization=fp8", f"{R}.dtype=float32")
    assert f"set {R}.dtype=bfloat16" in problem
    assert find_problems(CUDA, f"{R}.quantization=fp8", f"{R}.dtype=float16") == []


def test_quantized_engines_should_have_rollout_correction() -> None:
    def hints(*settings: str) -> list[str]:
        [loaded] = load([f"{R}.n=8", CUDA, *settings], complete=False)
        return [hint for hint in loaded.hints if "rollout_correction" in hint]

    for setting, key in (("dtype=fp8", "dtype"), ("quantization=fp8_per_tensor", "quantization")):
        [hint] = hints(f"{R}.{setting}")
        assert hint.startswith(f"{R}.{key}: quantized engines")
        assert hint.endswith("set algorithm.rollout_correction.preset=tis")
        for preset in ("tis", "mis", "bypass"):
            assert hints(f"{R}.{setting}", f"algorithm.rollout_correction.preset={preset}") == []
    assert hints() == []


def test_device_checks_are_repeated_once_the_device_is_known(tmp_path: Path) -> None:
    settings = ["actor_rollout_ref.model.path=policy", "data.train_files=prompts.parquet", f"{R}.dtype=fp8"]
    [loaded] = load([*settings, f"trainer.default_local_dir={tmp_path}"])
    builder = RunBuilder(loaded.config, Console(), RestartTracker(Console()), AsyncExitStack())
    builder.device = "cuda"
    builder._check_device()
    builder.device = "cpu"
    with pytest.raises(ConfigError, match="no FP8 kernels"):
        builder._check_device()


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
