"""Imports every module of verl, and what a run on GPUs imports of vLLM; prints the failures as JSON."""

from __future__ import annotations

import importlib
import json
import pkgutil

from pretended_gpus import pretend

VLLM = (
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"),
    *("vllm.v1.attention.backends.flash_attn", "vllm.v1.engine.async_llm", "vllm.device_allocator.cumem"),
    *("vllm.distributed.weight_transfer.nccl_engine", "vllm.distributed.weight_transfer.ipc_engine"),
    *("vllm.model_executor.layers.quantization.fp8", "vllm.lora.worker_manager", "vllm.vllm_flash_attn"),
    *(f"vllm.model_executor.models.{name}" for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3", "mistral")),
)
OPTIONAL = ("megatron", "sglang", "wandb", "mlflow", "tensorboard", "trackio", "swanlab", "reasoning_gym")
"""Packages of extras that requirements-cuda.txt does not have: modules that import them at once are named."""


def main() -> None:
    pretend()
    import verl

    names = [module.name for module in pkgutil.walk_packages(verl.__path__, "verl.") if "__main__" not in module.name]
    imported, missing, without = [], {}, {}
    for name in (*names, *VLLM):
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - modules of vLLM may exit
            is_optional = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in OPTIONAL
            (without if is_optional else missing)[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            imported.append(name)
    print(json.dumps({"imported": len(imported), "without_extras": sorted(without), "missing": missing}))


if __name__ == "__main__":
    main()
