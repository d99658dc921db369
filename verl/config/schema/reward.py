"""`reward.*`: how responses are scored."""

from __future__ import annotations

from typing import Any, Literal

from verl.config.rollout_engines import DEFAULT_REWARD_ENGINE, PLANNED_ENGINES, list_rollout_engines
from verl.config.schema.base import Count, Positive, RegisteredName, Section, section, setting
from verl.config.schema.conditions import needs, needs_engine, needs_given, unless, unless_given

_IS_LOCAL = unless_given(".url", ": the remote service isolates programs")


class CustomRewardFunction(Section):
    path: str | None = setting(
        None, "File (or package.module) of your reward function; null: built-in scorers, by data source."
    )
    name: str = setting("compute_score", "Name of the function.", only_if=needs_given(".path"))
    reward_kwargs: dict[str, Any] = setting(
        {}, "Extra keyword arguments of the function.", only_if=needs_given(".path")
    )


class RewardManagerConfig(Section):
    name: Literal["naive", "prime", "dapo", "batch"] = setting(
        "naive", "How functions are called: in one process, in num_workers (prime), with lists (batch); dapo: naive."
    )


class RewardEngineName(RegisteredName):
    @classmethod
    def list_names(cls) -> list[str]:
        return [*list_rollout_engines(is_reward_model=True), *PLANNED_ENGINES]


class RewardRolloutConfig(Section):
    name: RewardEngineName = setting(
        DEFAULT_REWARD_ENGINE,
        "Engine of the reward model; hf: transformers, supports any model.",
        planned=PLANNED_ENGINES,
    )
    tensor_model_parallel_size: Count = setting(
        1, "Devices per engine, on one node.", unit="devices", only_if=needs_engine(".name")
    )
    gpu_memory_utilization: float = setting(
        0.5,
        "Fraction of an accelerator's memory.",
        gt=0,
        le=1,
        only_if=(needs_engine(".name"), unless("trainer.device", "cpu")),
    )


class RewardModelConfig(Section):
    enable: bool = setting(False, "Score responses with a trained reward model.")
    model_path: str | None = setting(
        None, "Hugging Face name or directory of the reward model; it must have one label."
    )
    weight: float = setting(1.0, "With a reward function: reward = function + weight * model.")
    replicas: Count = setting(1, "Processes that each hold a copy of the reward model.", unit="processes")
    micro_batch_size_per_gpu: Count = setting(16, "Responses that a replica scores at once.", unit="samples")
    rollout: RewardRolloutConfig = section(RewardRolloutConfig, "The engine of the reward model.")


class SandboxConfig(Section):
    url: str | None = setting(None, "Remote sandbox (SandboxFusion) that runs the programs; null: a local sandbox.")
    seconds: Positive = setting(
        10.0, "Time limit for one input of a program, or for all calls of a function.", unit="seconds"
    )
    memory_mb: int = setting(1024, "Memory limit of a program and its children.", unit="MB", ge=64)
    processes: Count = setting(32, "Maximum processes and threads of a program.", unit="processes", only_if=_IS_LOCAL)
    output_mb: Count = setting(8, "Maximum output of a program.", unit="MB")
    require: Literal["bubblewrap", "namespaces", "limits"] = setting(
        "namespaces",
        "Weakest isolation to accept: a run does not start on a machine that offers less.",
        only_if=_IS_LOCAL,
    )


class CodeConfig(Section):
    partial: bool = setting(False, "Score a program by the fraction of its tests that pass, instead of all or nothing.")


class OverlongBuffer(Section):
    enable: bool = setting(False, "Penalize responses that come close to max_response_length.")
    len: int = setting(0, "The penalty grows linearly over this many last tokens.", unit="tokens", ge=0)
    penalty_factor: float = setting(1.0, "The penalty at max_response_length.", ge=0)


class PrimeConfig(Section):
    enable: bool = setting(False, "Train an implicit process reward model (PRIME) and add its token rewards.")
    model_path: str | None = setting(None, "Its initial and reference model; null: the actor's.")
    lr: Positive = setting(1e-6, "Its learning rate (AdamW).")
    beta: Positive = setting(0.05, "A token's reward is beta times its log-ratio to the initial model.")
    coef: float = setting(5.0, "Weight of the process rewards, which are normalized over the batch.", ge=0)
    outcome_coef: float = setting(5.0, "Weight of the response's score.", ge=0)
    grad_clip: Positive = setting(10.0, "Maximum norm of its gradient.")


class RewardConfig(Section):
    custom_reward_function: CustomRewardFunction = section(
        CustomRewardFunction,
        "Your own reward function.",
        only_if=unless_given("reward.functions", ", and it lists all functions"),
    )
    functions: list[dict[str, Any]] = setting(
        [], "Several functions to add up, each {path, name, reward_kwargs, weight, clip: [low, high], label}."
    )
    num_workers: Count = setting(
        1, "Scoring processes (prime).", unit="processes", only_if=needs(".reward_manager.name", "prime")
    )
    batch_size: Count = setting(
        64, "Maximum responses per call.", unit="responses", only_if=needs(".reward_manager.name", "batch")
    )
    deadline_s: Positive = setting(60.0, "Time limit for scoring one response.", unit="seconds")
    memory_mb: int | None = setting(None, "Memory limit of a scoring process; null: none.", unit="MB", ge=64)
    max_failure_rate: float = setting(
        0.1, "Maximum fraction of a step's responses that may fail to be scored; failed ones are dropped.", ge=0, lt=1
    )
    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "How the reward function is called.")
    reward_model: RewardModelConfig = section(
        RewardModelConfig, "A trained reward model.", only_if=needs("reward.reward_model.enable")
    )
    sandbox: SandboxConfig = section(SandboxConfig, "Where and how generated programs run (code with tests).")
    code: CodeConfig = section(CodeConfig, "The built-in code scorer.")
    overlong_buffer: OverlongBuffer = section(
        OverlongBuffer, "Overlong reward shaping (DAPO).", only_if=needs("reward.overlong_buffer.enable")
    )
    prime: PrimeConfig = section(
        PrimeConfig, "Implicit process reward model (PRIME).", only_if=needs("reward.prime.enable")
    )
