"""Rollout engines by name: what each of them supports, and where its code is. No engine is imported here.

The engines of verl are registered below. A module of the user, named in `actor_rollout_ref.model.external_lib`,
registers its own with `register_rollout_engine`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

PLANNED_REWARD_ENGINES = ("sglang",)
"""Engines of reward models that are answered as not supported yet."""

DEFAULT_ENGINE, IN_PROCESS_ENGINE, DEFAULT_REWARD_ENGINE = "vllm", "hf", "hf"
"""The engines of a run, of a run in a single process, and of reward models, unless others are chosen."""

PARALLEL_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("data_parallel_size", "expert_parallel_size"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCapabilities:
    """What a rollout engine supports. Settings that need more are refused before a run starts.

    Attributes:
        settings: Settings of `actor_rollout_ref.rollout`, and of a reward model's `rollout`, that have an effect.
            Settings of every engine are not listed.
        accelerator_settings: Those of `settings` that are not supported on the CPU.
        deterministic_devices: Device types on which `generate_all` and reward models repeat their results to the bit.
        device_transports: Values of `weight_transport` besides host memory, for which the engine has a weight sender.
        max_lora_rank: The largest rank of an adapter that is loaded without its base model; 0: full models only.
        returns_routed_experts: Responses of an MoE come with the experts of every token.
        returns_sampling_mask: Responses that were sampled with `keep_sampling_mask` come with `kept_ids`.
        has_truncated_logprobs: With `top_p` or `top_k`, log-probs belong to the truncated distribution, from which the
            token was drawn; else to the full distribution at the same temperature.
        continues_requests: Requests that run during a weight update go on with the new weights; else the update waits.
        selects_device: The engine can use an accelerator other than the first visible one.
    """

    settings: frozenset[str] = frozenset()
    accelerator_settings: frozenset[str] = frozenset()
    deterministic_devices: tuple[str, ...] = ()
    device_transports: tuple[str, ...] = ()
    max_lora_rank: int = 0
    returns_routed_experts: bool = False
    returns_sampling_mask: bool = False
    has_truncated_logprobs: bool = True
    continues_requests: bool = False
    selects_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineSpec:
    """A rollout engine. Its code is named as `package.module:name` and imported when it is used.

    Attributes:
        name: The value of `actor_rollout_ref.rollout.name`.
        title: The name in messages.
        capabilities: What the engine supports.
        engine: A `verl.rollout.engine.RolloutEngine`, called with its settings.
        settings: A subclass of `verl.rollout.settings.RolloutEngineSettings`: a record of the engine's settings.
        weight_sender: A `verl.weights.sender.WeightSender` for `device_transports`.
        reward_model: A `verl.rewards.models.interface.RewardModel`, called with a `RewardModelSettings`; None: the
            engine cannot run reward models.
        find_problem: A function without arguments that returns why the installed packages do not suffice, or "".
        find_conflicts: A function of the settings that yields conflicts only this engine has.
        needs_own_process: The engine changes its process: signal handlers, child processes, how they are started. It
            then always runs in another one.
    """

    name: str
    title: str
    engine: str
    settings: str = "verl.rollout.settings:RolloutEngineSettings"
    capabilities: RolloutCapabilities = field(default_factory=RolloutCapabilities)
    weight_sender: str | None = None
    reward_model: str | None = None
    find_problem: str | None = None
    find_conflicts: str | None = None
    needs_own_process: bool = False

    def load(self, path: str) -> Any:
        """Return what `path`, one of the attributes, names."""
        return resolve_name(path)


_ENGINES: dict[str, RolloutEngineSpec] = {}


def register_rollout_engine(spec: RolloutEngineSpec) -> None:
    """Make an engine available under its name.

    Raises:
        ValueError: Another engine has that name.
    """
    if _ENGINES.setdefault(spec.name, spec) != spec:
        raise ValueError(f"a rollout engine {spec.name!r} is registered already, by {_ENGINES[spec.name]}")


def get_rollout_engine(name: str) -> RolloutEngineSpec:
    """Return a registered engine."""
    return _ENGINES[name]


def list_rollout_engines(*, supporting: str | None = None, is_reward_model: bool = False) -> list[str]:
    """Return the names of the registered engines, or of those that support a setting or run reward models."""
    return [
        spec.name
        for spec in _ENGINES.values()
        if (supporting is None or supporting in spec.capabilities.settings)
        and (not is_reward_model or spec.reward_model is not None)
    ]


register_rollout_engine(
    RolloutEngineSpec(
        name="vllm",
        title="vLLM",
        engine="verl.rollout.vllm.engine:VllmEngine",
        settings="verl.rollout.vllm.settings:VllmSettings",
        capabilities=RolloutCapabilities(
            settings=frozenset(
                (
                    *PARALLEL_SIZES,
                    *("gpu_memory_utilization", "cpu_cache_gib", "max_num_seqs", "max_num_batched_tokens"),
                    *("max_model_len", "enforce_eager", "quantization", "load_format", "engine_kwargs.vllm"),
                )
            ),
            accelerator_settings=frozenset((*PARALLEL_SIZES[1:], "quantization")),
            deterministic_devices=("cpu", "cuda"),
            device_transports=("nccl", "ipc"),
            max_lora_rank=512,  # the last of `LORA_RANKS`
            returns_routed_experts=True,
            returns_sampling_mask=True,
            continues_requests=True,
        ),
        weight_sender="verl.rollout.vllm.sender:VllmSender",
        reward_model="verl.rollout.vllm.reward_model:VllmRewardModel",
        find_problem="verl.rollout.vllm.checks:find_problem",
        find_conflicts="verl.rollout.vllm.checks:find_conflicts",
    )
)
register_rollout_engine(
    RolloutEngineSpec(
        name="sglang",
        title="SGLang",
        engine="verl.rollout.sglang.engine:SglangEngine",
        settings="verl.rollout.sglang.settings:SglangSettings",
        capabilities=RolloutCapabilities(
            settings=frozenset(
                (
                    *("tensor_model_parallel_size", "expert_parallel_size"),
                    *("gpu_memory_utilization", "cpu_cache_gib", "max_num_seqs", "max_num_batched_tokens"),
                    *("max_model_len", "enforce_eager", "load_format", "engine_kwargs.sglang"),
                )
            ),
            accelerator_settings=frozenset(("expert_parallel_size",)),
            has_truncated_logprobs=False,
            continues_requests=True,
        ),
        find_problem="verl.rollout.sglang.checks:find_problem",
        find_conflicts="verl.rollout.sglang.checks:find_conflicts",
        needs_own_process=True,
    )
)
register_rollout_engine(
    RolloutEngineSpec(
        name="hf",
        title="transformers",
        engine="verl.rollout.hf:HfEngine",
        capabilities=RolloutCapabilities(
            deterministic_devices=("cpu",), selects_device=True, returns_sampling_mask=True
        ),
        reward_model="verl.rewards.models.hf:HfRewardModel",
    )
)
