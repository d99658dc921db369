"""The arguments that vLLM's engine gets: on accelerators its own defaults for throughput, on the CPU small ones."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import AsyncMock

import pytest
from vllm import AsyncEngineArgs
from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES, resolve_quantization_config
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from verl.config.load import load_dict
from verl.config.paths import with_changes
from verl.config.schema import Config, collect_settings
from verl.memory_plan.accelerators import DEVICES
from verl.rollout.vllm import engine
from verl.rollout.vllm.engine import VllmEngine, environment
from verl.rollout.vllm.settings import VllmSettings
from verl.workers.episode_pool import _sampling_params

pytestmark = pytest.mark.unit


def start(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[AsyncEngineArgs, UsageContext]:
    """Return what an engine passes to vLLM when it starts."""
    passed: dict[str, Any] = {}

    def from_engine_args(arguments: AsyncEngineArgs, usage_context: UsageContext) -> SimpleNamespace:
        passed.update(arguments=arguments, context=usage_context)
        return SimpleNamespace(shutdown=lambda: None, check_health=AsyncMock(), get_supported_tasks=AsyncMock())

    monkeypatch.setattr(AsyncLLM, "from_engine_args", from_engine_args)
    monkeypatch.setattr(engine, "environment", lambda settings: {})
    asyncio.run(VllmEngine(VllmSettings("model", **settings)).start())
    return passed["arguments"], passed["context"]


def test_on_accelerators_cuda_graphs_are_on_and_vllm_chooses_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, context = start(monkeypatch, device="cuda")
    assert (arguments.enforce_eager, arguments.max_num_seqs, arguments.max_num_batched_tokens) == (False, None, None)
    assert context is UsageContext.LLM_CLASS


def test_on_the_cpu_engines_are_eager_and_generate_256_sequences_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, context = start(monkeypatch)
    assert (arguments.enforce_eager, arguments.max_num_seqs, arguments.max_num_batched_tokens) == (True, 256, None)
    assert context is UsageContext.ENGINE_CONTEXT
    assert environment(VllmSettings("model"))["TORCH_COMPILE_DISABLE"] == "1"


def test_a_request_may_ask_for_the_log_probs_of_top_k_tokens_only_if_the_mask_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, _ = start(monkeypatch)
    assert plain.max_logprobs == AsyncEngineArgs("model").max_logprobs
    rollout = {"top_k": 64, "keep_sampling_mask": True}
    config = load_dict({"actor_rollout_ref": {"rollout": rollout}}, complete=False).config
    settings = VllmSettings.from_config(config, "cpu", 0)
    arguments, _ = start(monkeypatch, max_logprobs=settings.max_logprobs)
    assert arguments.max_logprobs == 64
    train, val = _sampling_params(config, ()).values()
    assert (train.keep_sampling_mask, val.keep_sampling_mask) == (True, False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_explicit_values_apply_on_every_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    for is_eager in (False, True):
        sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "enforce_eager": is_eager}
        arguments, _ = start(monkeypatch, device=device, **sizes)
        assert {name: getattr(arguments, name) for name in sizes} == sizes


def test_quantization_is_a_method_of_vllm_for_unquantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    quantization = get_args(collect_settings(Config)["actor_rollout_ref.rollout.quantization"].annotation)[0]
    config = load_dict({}, ["actor_rollout_ref.model.path=m", "data.train_files=p.parquet"]).config
    for name in get_args(quantization):
        rollout = {"actor_rollout_ref": {"rollout": {"quantization": name}}}
        settings = VllmSettings.from_config(with_changes(config, rollout), "cuda", 0)
        assert settings.dtype == "bfloat16"
        arguments, _ = start(monkeypatch, device="cuda", quantization=settings.quantization)
        assert arguments.quantization in ONLINE_QUANT_SHORTHAND_NAMES
        linear = resolve_quantization_config(arguments.quantization, None)
        assert linear is not None
        assert linear.linear is not None
    assert start(monkeypatch, device="cuda")[0].quantization is None


def test_default_sequences_do_not_exceed_batched_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, max_num_batched_tokens=100)[0].max_num_seqs == 100
    assert start(monkeypatch, max_num_batched_tokens=100, device="cuda")[0].max_num_seqs is None  # vLLM does it


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_the_estimate_knows_how_many_sequences_vllm_chooses(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    platform = SimpleNamespace(
        get_device_total_memory=lambda: device.memory,
        get_device_name=lambda: f"NVIDIA {device.name}-SXM",
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(1)
    assert sequences[UsageContext.LLM_CLASS] == device.vllm_sequences
    assert tokens[UsageContext.LLM_CLASS] >= 8192
