"""GRPO runs of a small model, as a user would start them from Python: they have to learn, to save and to resume."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from verl.config.load import load
from verl.config.rollout_engines import IN_PROCESS_ENGINE
from verl.gpu_check.stage import Checks, Context, StageSkipped
from verl.memory_plan.accelerators import GIB, Device, find_device
from verl.memory_plan.run_plan import get_workload, plan_memory
from verl.memory_plan.step_time import Cluster, estimate_seconds
from verl.trainer.api import GRPOTrainer, TrainingConfig

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
PROMPTS, GROUP, PROMPT, RESPONSE = 16, 8, 16, 8
LEARNING_RATES = {"tiny": 3e-3, "given": 1e-5}
RESUMED = 2  # steps after the resume
RISE = 0.05
FEW_STEPS = 4
FP8_CAPABILITY = (8, 9)
OTHERS = ("engine weights", "kv cache", "reserved")  # memory that is not the train worker's own


def score_digits(response: str) -> float:
    """Return the share of digits, which a model learns to raise within a few steps."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def check_host(context: Context, checks: Checks) -> None:
    """Check a run whose weights go to the engines through host memory."""
    _check_learning(context, checks, "host")


def check_ipc(context: Context, checks: Checks) -> None:
    """Check a run whose weights go to the engines by CUDA IPC, on the same devices."""
    context.require_gpus(1)
    _check_learning(context, checks, "ipc")


def check_nccl(context: Context, checks: Checks) -> None:
    """Check a run whose weights go to the engines by NCCL, to other devices."""
    context.require_gpus(2)
    engines = context.gpus - context.gpus // 2
    _check_learning(context, checks, "nccl", _send_by_nccl(engines), devices=context.gpus // 2)


def _send_by_nccl(devices: int) -> dict[str, Any]:
    """Return the settings of engines on devices of their own."""
    return {
        "actor_rollout_ref.hybrid_engine": False,
        f"{ROLLOUT}.n_gpus_per_node": devices,
        f"{ROLLOUT}.weight_transport": "nccl",
    }


def check_tensor_parallel(context: Context, checks: Checks) -> None:
    """Check engines of two devices; on the CPU, of two cores."""
    if context.device == "cuda":
        context.require_gpus(2)
    if context.engine == IN_PROCESS_ENGINE:
        raise StageSkipped(f"needs vLLM: the engine {context.engine} has one device")
    devices, wide = 2, {f"{ROLLOUT}.tensor_model_parallel_size": 2}
    if context.device == "cuda":
        devices = context.gpus - context.gpus % 2
        _check_few_steps(context, checks, wide | {f"{ROLLOUT}.weight_transport": "ipc"}, devices)
    if context.gpus > 2:
        _check_few_steps(context, checks, wide | _send_by_nccl(2), 1)
    _check_few_steps(context, checks, wide, devices)


def check_offload(context: Context, checks: Checks) -> None:
    """Check weights and optimizer state in host memory between their uses."""
    context.require_gpus(1)  # on the CPU they are there anyway
    section = f"{ACTOR}.fsdp_config"
    _check_few_steps(context, checks, {f"{section}.param_offload": True, f"{section}.optimizer_offload": True})


def check_lora(context: Context, checks: Checks) -> None:
    """Check an adapter, which is all that is trained and sent."""
    if context.engine == IN_PROCESS_ENGINE:
        raise StageSkipped(f"needs vLLM: the engine {context.engine} loads no adapters")
    _check_few_steps(context, checks, {f"{ACTOR}.peft.lora_rank": 8})


def check_fp8(context: Context, checks: Checks) -> None:
    """Check engines that quantize the weights they receive."""
    import torch

    context.require_gpus(1)
    capability = torch.cuda.get_device_capability(0)
    if capability < FP8_CAPABILITY:
        raise StageSkipped(f"needs compute capability 8.9, this device has {capability[0]}.{capability[1]}")
    _check_few_steps(context, checks, {f"{ROLLOUT}.quantization": "fp8"})


def _check_learning(
    context: Context,
    checks: Checks,
    transport: str,
    settings: Mapping[str, Any] | None = None,
    devices: int | None = None,
) -> None:
    """Check that the reward rises, and that the run goes on from its checkpoint."""
    folder = context.folder / f"run-{transport}"
    settings = {**(settings or {}), f"{ROLLOUT}.weight_transport": transport}
    metrics = _train(context, folder, context.steps, settings, devices)
    check_steps(metrics, context.steps, checks)
    if device := _find_device(context):
        checks.figures |= estimate(device, context.get_model(), devices or context.gpus, settings)
    rewards = _read_rewards(metrics)
    quarter = max(1, len(rewards) // 4)
    first, last = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
    checks.figures |= {"reward": [first, last]}
    checks.require(last > first + RISE, f"the reward does not rise: {first:.3f} at first, {last:.3f} at last")
    metrics = _train(context, folder, context.steps + RESUMED, settings | {"trainer.resume_mode": "auto"}, devices)
    check_steps(metrics, context.steps + RESUMED, checks)
    resumed = _read_rewards(metrics)[-1]
    checks.figures |= {"after resume": resumed}
    checks.require(
        resumed > (first + last) / 2,
        f"the run resumed another model: reward {resumed:.3f} after {last:.3f}",
    )


def _read_rewards(metrics: Sequence[Mapping[str, Any]]) -> list[float]:
    return [line["reward/mean"] for line in metrics if "reward/mean" in line]


def _check_few_steps(context: Context, checks: Checks, settings: Mapping[str, Any], devices: int | None = None) -> None:
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=context.folder))
    check_steps(_train(context, folder, FEW_STEPS, settings, devices), FEW_STEPS, checks)


def _train(
    context: Context, folder: Path, steps: int, settings: Mapping[str, Any], devices: int | None
) -> list[dict[str, Any]]:
    """Run GRPO to a step; return the metrics of all steps."""
    config = TrainingConfig(
        total_steps=steps,
        batch_size=PROMPTS,
        group_size=GROUP,
        learning_rate=LEARNING_RATES["tiny" if context.model is None else "given"],
        max_prompt_length=PROMPT,
        max_response_length=RESPONSE,
        devices=devices or max(1, context.gpus),
        settings={
            "trainer.device": context.device,
            f"{ROLLOUT}.name": context.engine,
            f"{ROLLOUT}.weight_transport": "host",  # whatever earlier checks have found
            "ray_kwargs.ray_init.address": "local",  # this machine, whatever cluster the environment names
            **({f"{ROLLOUT}.gpu_memory_utilization": 0.4} if context.device == "cuda" else {}),
            **settings,
        },
    )
    trainer = GRPOTrainer(
        context.get_model(),
        config=config,
        reward=score_digits,
        prompts=[f"{a}+{b}=" for a, b in product(range(10, 18), repeat=2)],
        folder=folder,
        local=context.engine == IN_PROCESS_ENGINE,
    )
    return trainer.train().metrics


def _find_device(context: Context) -> Device | None:
    """Return the figures of this machine's accelerators, if they are known."""
    import torch

    return find_device(torch.cuda.get_device_name(0)) if context.device == "cuda" else None


def estimate(device: Device, model: str, devices: int, settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the estimates of `verl plan` for a run: peak GiB of the train worker, and tokens per second."""
    from verl.trainer.build.worker_settings import train_settings

    values = {
        "actor_rollout_ref.model.path": model,
        "trainer.device": "cuda",
        "trainer.n_gpus_per_node": devices,
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": RESPONSE,
        f"{ACTOR}.ppo_mini_batch_size": PROMPTS,
        f"{ROLLOUT}.n": GROUP,
        **settings,
    }
    [loaded] = load([f"{key}={value}" for key, value in values.items()], complete=False)
    plan = plan_memory(loaded.config, train_settings)
    update = dict(plan.phases(device.memory)["update"].items())
    seconds = estimate_seconds(plan, Cluster(device, 1, devices), get_workload(loaded.config))
    tokens = PROMPTS * GROUP * (PROMPT + RESPONSE)
    return {
        "estimated GiB": sum(size for part, size in update.items() if part not in OTHERS) / GIB,
        "estimated tokens/s": tokens / sum(value for phase, value in seconds.items() if phase != "save"),
    }


def check_steps(metrics: Sequence[Mapping[str, Any]], count: int, checks: Checks) -> None:
    """Check the metrics of each step: it trained, and the engines had its weights, which a probe has verified."""
    steps = {int(line["step"]): line for line in metrics if "timing_s/step" in line}
    checks.require(list(steps) == list(range(1, count + 1)), f"steps {list(steps)} instead of 1 to {count}")
    for step, line in steps.items():
        for name in ("actor/grad_norm", "weights/probe_gap", "weights/version", "reward/mean"):
            checks.require(name in line, f"step {step}: no {name}")
        norm, gap, tolerance = line["actor/grad_norm"], line["weights/probe_gap"], line["weights/probe_tolerance"]
        has_signal = line.get("reward/groups_without_signal", 0) < 1  # a model that has learned may get equal rewards
        checks.require(norm > 0 if has_signal else norm == 0, f"step {step}: no gradient: actor/grad_norm is {norm}")
        checks.require(gap <= tolerance, f"step {step}: the probe found {gap:.3g}, more than {tolerance:.3g}")
        version = line["weights/version"]
        checks.require(version == step, f"step {step}: the engines hold version {version:.0f} of the weights")
    last = steps[count]
    checks.figures |= {"grad_norm": last["actor/grad_norm"], "probe gap": last["weights/probe_gap"]}
    checks.figures |= {
        name: last[key]
        for name, key in (
            ("sync s", "timing_s/sync"),
            ("tokens/s", "perf/throughput"),
            ("GiB", "perf/max_memory_allocated_gib"),
        )
        if key in last
    }
