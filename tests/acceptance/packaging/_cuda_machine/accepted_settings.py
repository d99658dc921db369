"""Gives vLLM's CUDA platform every engine setting of verl, up to where an engine would start, and prints the results.

vLLM builds and checks its whole configuration before it touches a device. Expected values are those that a setting
stands for: a setting that vLLM accepts and ignores is a failure as well.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretended_gpus import pretend

SMALL, LARGE, MOE = "Qwen2.5-7B", "Qwen2.5-72B", "Qwen3-30B-A3B"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TRANSFER = "weight_transfer_config.backend"
SNAPSHOT = {
    "v2": "use_v2_model_runner",
    "graphs": "compilation_config.cudagraph_mode",
    "tokens": "scheduler_config.max_num_batched_tokens",
    "sequences": "scheduler_config.max_num_seqs",
    "sleep": "model_config.enable_sleep_mode",
    "executor": "parallel_config.distributed_executor_backend",
    "dtype": "model_config.dtype",
}
"""What is printed of every configuration."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "defaults": (
        SMALL,
        {},
        {
            "model_config.enable_sleep_mode": True,
            "model_config.logprobs_mode": "processed_logprobs",
            "load_config.load_format": "dummy",
            "cache_config.gpu_memory_utilization": 0.5,
            TRANSFER: "verl_host",
        },
    ),
    "tensor parallel": (
        LARGE,
        {f"{ROLLOUT}.tensor_model_parallel_size": 4},
        {"parallel_config.tensor_parallel_size": 4, "parallel_config.distributed_executor_backend": "mp"},
    ),
    "pipeline parallel": (
        SMALL,
        {f"{ROLLOUT}.pipeline_model_parallel_size": 2},
        {"parallel_config.pipeline_parallel_size": 2},
    ),
    "expert parallel": (
        MOE,
        {
            f"{ROLLOUT}.tensor_model_parallel_size": 2,
            f"{ROLLOUT}.data_parallel_size": 2,
            f"{ROLLOUT}.expert_parallel_size": 4,
        },
        {
            "parallel_config.tensor_parallel_size": 2,
            "parallel_config.data_parallel_size": 2,
            "parallel_config.enable_expert_parallel": True,
        },
    ),
    "awake": (SMALL, {f"{ROLLOUT}.free_cache_engine": False}, {"model_config.enable_sleep_mode": False}),
    "memory": (
        SMALL,
        {f"{ROLLOUT}.gpu_memory_utilization": 0.7},
        {"cache_config.gpu_memory_utilization": 0.7},
    ),
    "sizes": (
        SMALL,
        {
            f"{ROLLOUT}.max_num_seqs": 96,
            f"{ROLLOUT}.max_num_batched_tokens": 4096,
            f"{ROLLOUT}.max_model_len": 3000,
        },
        {
            "scheduler_config.max_num_seqs": 96,
            "scheduler_config.max_num_batched_tokens": 4096,
            "model_config.max_model_len": 3000,
        },
    ),
    "eager": (SMALL, {f"{ROLLOUT}.enforce_eager": True}, {"model_config.enforce_eager": True}),
    "graphs": (SMALL, {f"{ROLLOUT}.enforce_eager": False}, {"model_config.enforce_eager": False}),
    "safetensors": (SMALL, {f"{ROLLOUT}.load_format": "safetensors"}, {"load_config.load_format": "safetensors"}),
    "files": (SMALL, {f"{ROLLOUT}.load_format": "auto"}, {"load_config.load_format": "auto"}),
    **{
        dtype: (SMALL, {f"{ROLLOUT}.dtype": dtype}, {"model_config.dtype": f"torch.{dtype}"})
        for dtype in ("bfloat16", "float16", "float32")
    },
    "dtype fp8": (SMALL, {f"{ROLLOUT}.dtype": "fp8"}, {"model_config.quantization": "fp8_per_block"}),
    "fp8": (SMALL, {f"{ROLLOUT}.quantization": "fp8"}, {"model_config.quantization": "fp8_per_block"}),
    **{
        name: (SMALL, {f"{ROLLOUT}.quantization": name}, {"model_config.quantization": name})
        for name in ("fp8_per_block", "fp8_per_channel", "fp8_per_tensor")
    },
    "ipc": (SMALL, {f"{ROLLOUT}.weight_transport": "ipc"}, {TRANSFER: "verl_ipc"}),
    "nccl": (
        SMALL,
        {
            f"{ROLLOUT}.weight_transport": "nccl",
            "actor_rollout_ref.hybrid_engine": False,
            f"{ROLLOUT}.n_gpus_per_node": 4,
            "trainer.n_gpus_per_node": 4,
        },
        {TRANSFER: "nccl", "model_config.enable_sleep_mode": False},
    ),
    "lora": (SMALL, {f"{ACTOR}.peft.lora_rank": 32}, {"lora_config.max_lora_rank": 32}),
    "float32 head": (
        SMALL,
        {"actor_rollout_ref.model.fp32_lm_head": True},
        {"model_config.head_dtype": "torch.float32"},
    ),
    "routed experts": (
        MOE,
        {f"{ACTOR}.router_replay.mode": "R3"},
        {"aux_output_config.enable_return_routed_experts": True},
    ),
    "sampling mask": (
        SMALL,
        {f"{ROLLOUT}.keep_sampling_mask": True, f"{ROLLOUT}.top_k": 50},
        {"model_config.max_logprobs": 50},
    ),
    "vLLM's own": (
        SMALL,
        {f"{ROLLOUT}.engine_kwargs.vllm": "{block_size: 32}"},
        {"cache_config.block_size": 32},
    ),
    "deterministic": (SMALL, {"trainer.deterministic": True}, {}),  # last: it sets an environment variable
}


class Accepted(Exception):
    """vLLM has built its configuration."""


def main() -> None:
    pretend()
    from public_models import MODELS
    from vllm.v1.engine.async_llm import AsyncLLM

    def stop_at(arguments: Any, usage_context: Any = None, **_: Any) -> None:
        raise Accepted(arguments.create_engine_config(usage_context))

    AsyncLLM.from_engine_args = staticmethod(stop_at)
    found, problems = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        for name, (model, settings, expected) in CASES.items():
            folder = Path(directory, model)
            folder.mkdir(exist_ok=True)
            config = MODELS[model] | {"architectures": [ARCHITECTURES[MODELS[model]["model_type"]]]}
            (folder / "config.json").write_text(json.dumps(config))
            try:
                configuration = build(folder, settings)
            except Exception as error:  # noqa: BLE001 - any refusal is what is looked for
                problems[name] = f"{type(error).__name__}: {error}"[:600]
                continue
            found[name] = {title: read(configuration, path) for title, path in SNAPSHOT.items()}
            wrong = {path: (value, read(configuration, path)) for path, value in expected.items()}
            if wrong := {path: pair for path, pair in wrong.items() if str(pair[0]) != pair[1]}:
                problems[name] = f"expected and found: {wrong}"
            print(name, found[name], problems.get(name, ""), file=sys.stderr, flush=True)
    print(json.dumps({"cases": len(CASES), "problems": problems, "uncovered": find_uncovered(), "found": found}))


ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}


def build(model: Path, settings: Mapping[str, Any]) -> Any:
    """Return vLLM's configuration for the settings of a run."""
    from verl.config.load import load
    from verl.config.rollout_engines import get_rollout_engine
    from verl.rollout.engine import make_engine
    from verl.trainer.build.worker_settings import engine_settings

    base = {
        "actor_rollout_ref.model.path": model,
        "trainer.device": "cuda",
        "trainer.n_gpus_per_node": 8,
        "data.max_response_length": 1024,
    }
    [loaded] = load([f"{key}={value}" for key, value in {**base, **settings}.items()], complete=False)
    engine = make_engine(get_rollout_engine("vllm"), engine_settings(loaded.config, "cuda", 0))
    try:
        asyncio.run(engine.start())
    except BaseException as error:
        while error is not None:  # `start` wraps what it catches
            if isinstance(error, Accepted):
                return error.args[0]
            error = error.__cause__
        raise
    raise AssertionError("the engine has started")


def read(configuration: Any, path: str) -> str:
    value = configuration
    for part in path.split("."):
        value = getattr(value, part, "no such attribute")
    return str(value)


def find_uncovered() -> list[str]:
    """Return engine settings that no case gives a value."""
    from verl.config.rollout_engines import get_rollout_engine

    given = {key.removeprefix(f"{ROLLOUT}.") for _, settings, _ in CASES.values() for key in settings}
    capabilities = get_rollout_engine("vllm").capabilities
    return sorted(capabilities.settings - given - {"cpu_cache_gib"})


if __name__ == "__main__":
    main()
