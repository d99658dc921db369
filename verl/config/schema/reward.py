"""`reward.*`: how answers are scored."""

from __future__ import annotations

from typing import Any, Literal

from verl.config.schema.base import Section, section, setting

__all__ = ["RewardConfig"]


class CustomRewardFunction(Section):
    path: str | None = setting(
        None, "File (or package.module) of your reward function; null: shipped scorers, by data source."
    )
    name: str = setting("compute_score", "Name of the function in it.")
    reward_kwargs: dict[str, Any] = setting({}, "Passed to the function as further keyword arguments.")


class RewardManagerConfig(Section):
    name: Literal["naive", "prime", "dapo", "batch"] = setting(
        "naive", "How the function is called: in one process, in num_workers of them (prime), with lists (batch)."
    )


class RewardRolloutConfig(Section):
    name: Literal["hf", "vllm", "sglang"] = setting(
        "hf", "Engine that runs the reward model; hf is transformers, and takes any.", planned=("sglang",)
    )
    tensor_model_parallel_size: int = setting(1, "Devices that share one engine.", unit="devices", ge=1, planned=True)
    gpu_memory_utilization: float = setting(0.5, "Share of an accelerator's memory.", unit="share", gt=0, le=1)


class RewardModelConfig(Section):
    enable: bool = setting(False, "Score answers by a trained reward model.")
    model_path: str | None = setting(None, "Hugging Face name or directory of the reward model, which has one label.")
    weight: float = setting(1.0, "Beside a reward function: reward = function + weight * model.")
    replicas: int = setting(1, "Processes that each hold the reward model.", unit="processes", ge=1)
    micro_batch_size_per_gpu: int = setting(16, "Answers that one of them scores at once.", unit="samples", ge=1)
    rollout: RewardRolloutConfig = section(RewardRolloutConfig, "The engine that runs it.")


class SandboxConfig(Section):
    url: str | None = setting(None, "A remote sandbox (SandboxFusion) that runs the programs; null: this machine's.")
    seconds: float = setting(
        10.0, "Time for one input of a program, or for all calls of a function.", unit="seconds", gt=0
    )
    memory_mb: int = setting(1024, "Memory for one program and what it starts.", unit="MB", ge=64)
    processes: int = setting(32, "Processes and threads that one program may have.", unit="processes", ge=1)
    output_mb: int = setting(8, "What one program may print.", unit="MB", ge=1)
    require: Literal["bubblewrap", "namespaces", "limits"] = setting(
        "limits", "The weakest walls to run programs in: a run on a machine with less does not start."
    )


class CodeConfig(Section):
    partial: bool = setting(False, "Score a program by the share of its tests that pass, instead of all or nothing.")


class OverlongBuffer(Section):
    enable: bool = setting(False, "Punish answers that come close to max_response_length.")
    len: int = setting(0, "The last so many tokens, over which the penalty grows linearly.", unit="tokens", ge=0)
    penalty_factor: float = setting(1.0, "The penalty at the very end.", ge=0)


class PrimeConfig(Section):
    enable: bool = setting(False, "Train an implicit process reward model along (PRIME), and add its token rewards.")
    model_path: str | None = setting(None, "Model that it starts from and is compared with; null: the actor's.")
    lr: float = setting(1e-6, "Learning rate of its AdamW.", gt=0)
    beta: float = setting(0.05, "A token's reward is beta times its log-ratio to the model it started from.", gt=0)
    coef: float = setting(5.0, "Weight of the process rewards; the score of the answer has weight 1.", ge=0)
    grad_clip: float = setting(10.0, "Largest norm of its gradient.", gt=0)


class RewardConfig(Section):
    custom_reward_function: CustomRewardFunction = section(CustomRewardFunction, "Your own reward function.")
    functions: list[dict[str, Any]] = setting(
        [], "Several functions, added up, each {path, name, reward_kwargs, weight, clip: [low, high], label}."
    )
    num_workers: int = setting(1, "Processes that score answers in parallel (prime).", unit="processes", ge=1)
    batch_size: int = setting(64, "Answers in one call of a batched function, at most.", unit="answers", ge=1)
    deadline_s: float = setting(60.0, "How long scoring one answer may take, from its start.", unit="seconds", gt=0)
    memory_mb: int | None = setting(None, "Memory that a scoring process may take; null: all.", unit="MB", ge=64)
    max_failure_rate: float = setting(
        0.1,
        "Answers that could not be scored are left out and counted; above this share of a step the run stops.",
        unit="share",
        ge=0,
        lt=1,
    )
    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "How the reward function is called.")
    reward_model: RewardModelConfig = section(RewardModelConfig, "A trained reward model.")
    sandbox: SandboxConfig = section(SandboxConfig, "Where and how the programs of answers run (code with tests).")
    code: CodeConfig = section(CodeConfig, "The shipped scorer of code.")
    overlong_buffer: OverlongBuffer = section(OverlongBuffer, "Overlong shaping (DAPO).")
    prime: PrimeConfig = section(PrimeConfig, "An implicit process reward model, trained along (PRIME).")
