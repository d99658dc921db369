"""`reward.*`: how responses are scored."""

from __future__ import annotations

from typing import Any, Literal

from verl.config.rollout_engines import DEFAULT_REWARD_ENGINE, PLANNED_REWARD_ENGINES, list_rollout_engines
from verl.config.schema.base import Count, Positive, RegisteredName, Section, section, setting
from verl.config.schema.conditions import needs, needs_engine, needs_given, unless, unless_given

_IS_LOCAL = unless_given(".url", ": the remote service isolates programs")


class CustomRewardFunction(Section):
    path: str | None = setting(None)
    """File (or package.module) of your reward function; null: built-in scorers, by data source."""
    name: str = setting("compute_score", only_if=needs_given(".path"))
    """Name of the function."""
    reward_kwargs: dict[str, Any] = setting({}, only_if=needs_given(".path"))
    """Extra keyword arguments of the function."""


class RewardManagerConfig(Section):
    name: Literal["naive", "prime", "dapo", "batch"] = setting("naive")
    """How functions are called: in one process, in num_workers (prime), with lists (batch); dapo: naive."""


class RewardEngineName(RegisteredName):
    @classmethod
    def list_names(cls) -> list[str]:
        return [*list_rollout_engines(is_reward_model=True), *PLANNED_REWARD_ENGINES]


class RewardRolloutConfig(Section):
    name: RewardEngineName = setting(DEFAULT_REWARD_ENGINE, planned=PLANNED_REWARD_ENGINES)
    """Engine of the reward model; hf: transformers, supports any model."""
    tensor_model_parallel_size: Count = setting(1, unit="devices", only_if=needs_engine(".name"))
    """Devices per engine, on one node."""
    gpu_memory_utilization: float = setting(
        0.5, gt=0, le=1, only_if=(needs_engine(".name"), unless("trainer.device", "cpu"))
    )
    """Fraction of an accelerator's memory."""


class RewardModelConfig(Section):
    enable: bool = setting(False)
    """Score responses with a trained reward model."""
    model_path: str | None = setting(None)
    """Hugging Face name or directory of the reward model; it must have one label."""
    weight: float = setting(1.0)
    """With a reward function: reward = function + weight * model."""
    replicas: Count = setting(1, unit="processes")
    """Processes that each hold a copy of the reward model."""
    micro_batch_size_per_gpu: Count = setting(16, unit="samples")
    """Responses that a replica scores at once; on the CPU one with trainer.deterministic=true."""
    rollout: RewardRolloutConfig = section(RewardRolloutConfig, "The engine of the reward model.")


class SandboxConfig(Section):
    url: str | None = setting(None)
    """Remote sandbox (SandboxFusion) that runs the programs; null: a local sandbox."""
    seconds: Positive = setting(10.0, unit="seconds")
    """Time limit for one input of a program, or for all calls of a function."""
    memory_mb: int = setting(1024, unit="MB", ge=64)
    """Memory limit of a program and its children."""
    processes: Count = setting(32, unit="processes", only_if=_IS_LOCAL)
    """Maximum processes and threads of a program."""
    output_mb: Count = setting(8, unit="MB")
    """Maximum output of a program."""
    max_programs: Count | None = setting(None, unit="programs")
    """Programs of the Python tool that your runs on a machine run at once, others wait; null: 2 per core."""
    require: Literal["bubblewrap", "namespaces", "limits"] = setting("namespaces", only_if=_IS_LOCAL)
    """Weakest isolation to accept: a run does not start on a machine that offers less."""


class CodeConfig(Section):
    partial: bool = setting(False)
    """Score a program by the fraction of its tests that pass, instead of all or nothing."""


class OverlongBuffer(Section):
    enable: bool = setting(False)
    """Penalize responses that come close to max_response_length."""
    len: int = setting(0, unit="tokens", ge=0)
    """The penalty grows linearly over this many last tokens."""
    penalty_factor: float = setting(1.0, ge=0)
    """The penalty at max_response_length."""


class PrimeConfig(Section):
    enable: bool = setting(False)
    """Train an implicit process reward model (PRIME) and add its token rewards."""
    model_path: str | None = setting(None)
    """Initial and reference model of the process reward model; null: the actor's."""
    lr: Positive = setting(1e-6)
    """Learning rate of the process reward model (AdamW)."""
    beta: Positive = setting(0.05)
    """A token's reward is beta times its log-ratio to the initial model."""
    coef: float = setting(5.0, ge=0)
    """Weight of the process rewards, which are normalized over the batch."""
    outcome_coef: float = setting(5.0, ge=0)
    """Weight of the response's score."""
    grad_clip: Positive = setting(10.0)
    """Maximum norm of the process reward model's gradient."""


class RewardConfig(Section):
    custom_reward_function: CustomRewardFunction = section(
        CustomRewardFunction,
        "Your own reward function.",
        only_if=unless_given("reward.functions", ", and it lists all functions"),
    )
    functions: list[dict[str, Any]] = setting([])
    """Several functions to add up, each {path, name, reward_kwargs, weight, clip: [low, high], label}."""
    num_workers: Count = setting(1, unit="processes", only_if=needs(".reward_manager.name", "prime"))
    """Scoring processes (prime)."""
    batch_size: Count = setting(64, unit="responses", only_if=needs(".reward_manager.name", "batch"))
    """Maximum responses per call."""
    deadline_s: Positive = setting(60.0, unit="seconds")
    """Time limit for scoring one response."""
    memory_mb: int | None = setting(None, unit="MB", ge=64)
    """Memory limit of a scoring process; null: none."""
    max_failure_rate: float = setting(0.1, ge=0, lt=1)
    """Maximum fraction of a step's responses that may fail to be scored; failed ones are dropped."""
    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "How the reward function is called.")
    reward_model: RewardModelConfig = section(
        RewardModelConfig, "A trained reward model.", only_if=needs("reward.reward_model.enable")
    )
    sandbox: SandboxConfig = section(
        SandboxConfig, "Where and how generated programs run (tests of code, the Python tool)."
    )
    code: CodeConfig = section(CodeConfig, "The built-in code scorer.")
    overlong_buffer: OverlongBuffer = section(
        OverlongBuffer, "Overlong reward shaping (DAPO).", only_if=needs("reward.overlong_buffer.enable")
    )
    prime: PrimeConfig = section(
        PrimeConfig, "Implicit process reward model (PRIME).", only_if=needs("reward.prime.enable")
    )
