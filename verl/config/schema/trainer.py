"""`trainer.*` and `ray_kwargs.*`: duration, devices, checkpoints, logging, fault tolerance, Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from verl.config.schema.base import Count, Interval, OneOrMany, Positive, Section, section, setting
from verl.config.schema.conditions import HAS_ADVANTAGES, HAS_CRITIC, OnlyIf, needs, needs_given, unless, unless_given

Sink = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio", "swanlab", "none"]
Sinks = Annotated[list[Sink], OneOrMany]
ProfileTool = Literal["torch", "memory", "nsys"]

_MODE = "trainer.v1.trainer_mode"
_IS_ASYNCHRONOUS = needs(_MODE, "colocate_async", "separate_async")
_SAVES = unless(".save_freq", -1, reason="{section}.save_freq=-1 saves no checkpoints")


class PrometheusConfig(Section):
    enable: bool = setting(False)
    """Serve the metrics of the run and of its vLLM engines at http://HOST:PORT/metrics, for Prometheus."""
    port: int = setting(9090, ge=1, le=65535, only_if=needs(".enable"))
    """Port of the metrics; a Prometheus server on the same machine uses 9090 itself by default."""
    host: str = setting("127.0.0.1", only_if=needs(".enable"))
    """Address to listen on; 0.0.0.0: all of the machine. Anyone who reaches it reads the metrics."""


class DeadlinesConfig(Section):
    devices: Positive = setting(300.0, unit="seconds")
    """Time limit for reserving the cluster's devices."""
    start: Positive = setting(1800.0, unit="seconds")
    """Time limit for a process to start and load its model."""
    generation: Positive = setting(1800.0, unit="seconds")
    """Maximum time between finished responses of a busy engine."""
    train: Positive = setting(3600.0, unit="seconds")
    """Time limit for a train worker's log-probs and advantages, or its update."""
    weights: Positive = setting(900.0, unit="seconds")
    """Time limit for gathering weights, loading them into an engine, or probing it."""
    checkpoint: Positive = setting(3600.0, unit="seconds")
    """Time limit for a train worker to save or load a checkpoint."""
    reply: Positive = setting(60.0, unit="seconds")
    """Time limit for a short reply from an idle process."""
    close: Positive = setting(30.0, unit="seconds")
    """Time limit for a process to exit before it is killed."""


class FaultsConfig(Section):
    max_restarts: int = setting(3, unit="restarts", ge=0)
    """Maximum consecutive restarts from a checkpoint after a lost worker or machine."""
    max_engine_restarts: Count = setting(5, unit="restarts")
    """Maximum consecutive restarts of a failed engine; then the run continues without it."""
    max_skipped_steps: Count = setting(20, unit="steps")
    """Maximum consecutive optimizer steps without a finite gradient, which are skipped; then the run stops."""
    on_lost_node: Literal["wait", "shrink"] = setting("wait")
    """After losing a machine: wait until the cluster has as many devices again, or shrink to the rest."""
    node_wait: float = setting(1800.0, unit="seconds", ge=0)
    """Maximum wait for a lost machine to be replaced."""


class ProfileConfig(Section):
    enable: bool = setting(True)
    """Profile the steps below; false: none."""
    steps: Annotated[list[Count], OneOrMany] | None = setting(None, only_if=needs(".enable"))
    """Steps of the train workers to profile, counted from 1; null: none."""
    tools: Annotated[list[ProfileTool], OneOrMany] = setting(["torch"])
    """torch: traces with the phases of a step; memory: snapshots of GPU memory; nsys: Nsight Systems, on GPUs."""
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], OneOrMany] = setting([0], only_if=unless(".all_ranks", True))
    """Train ranks to profile."""
    all_ranks: bool = setting(False)
    """Profile all train ranks."""
    directory: str | None = setting(None)
    """Where profiles are written; null: the folder profiles of the checkpoint directory."""


class SamplesConfig(Section):
    per_step: int = setting(16, unit="responses", ge=0)
    """Responses that are recorded of each step and of each validation, in whole groups; 0: none."""
    max_gib: Positive = setting(2.0, unit="GiB", only_if=unless(".per_step", 0))
    """Size of the folder of samples from which on no more are recorded."""


class ReplayConfig(Section):
    steps: Annotated[list[Count], OneOrMany] | None = setting(None)
    """Steps to record for verl replay, counted from 1; null: none."""


class RunConfig(Section):
    """The settings of every run."""

    nnodes: Count = setting(1, unit="machines")
    """Machines."""
    n_gpus_per_node: Count = setting(8, unit="devices")
    """Accelerators per machine; on a machine without any: train ranks (processes)."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto")
    """Device to train on; auto: cuda if available."""
    total_epochs: Count = setting(1, unit="epochs", only_if=unless_given(".total_training_steps"))
    """Passes over the training data."""
    total_training_steps: Count | None = setting(None, unit="steps")
    """Steps of the run; null: determined by total_epochs."""
    save_freq: Interval | None = setting(None, unit="steps")
    """Steps between checkpoints, and one after the last step; null: only the last; -1: none."""
    test_freq: Interval = setting(-1, unit="steps")
    """Steps between validations; -1: none."""
    val_before_train: bool = setting(True, only_if=needs_given("data.val_files"))
    """Validate before the first step, if val_files is given."""
    save_hf: bool | None = setting(None, only_if=_SAVES)
    """Also save the model for from_pretrained (actor/huggingface) in every checkpoint; null: in the last (not LoRA)."""
    max_ckpts_to_keep: Count | None = setting(None, unit="checkpoints", only_if=_SAVES)
    """Number of newest checkpoints to keep; null: all."""
    max_hours: Positive | None = setting(None, unit="hours")
    """Save and stop within this time; null: before the end of the Slurm job, if any."""
    stop_margin: float = setting(60.0, unit="seconds", ge=0)
    """Safety margin of max_hours, in addition to the longest step and save so far."""
    default_local_dir: str | None = setting(None)
    """Checkpoint directory; null: checkpoints/<project_name>/<experiment_name>."""
    resume_mode: Literal["auto", "disable", "path"] = setting("auto")
    """auto: resume from the newest checkpoint; disable: start over; path: from resume_from_path."""
    resume_from_path: str | None = setting(None, only_if=needs(".resume_mode", "path"))
    """A checkpoint: .../global_step_<N>."""
    logger: Sinks = setting(["console"])
    """Metric loggers; metrics.jsonl is always written."""
    project_name: str = setting("verl")
    """Project name, for trackers and the checkpoint directory."""
    experiment_name: str = setting("default")
    """Run name, for trackers and the checkpoint directory."""
    wandb_proxy: str | None = setting(
        None, only_if=OnlyIf((".logger",), lambda sinks: "wandb" in sinks, "trainer.logger does not include wandb")
    )
    """Proxy for wandb."""
    seed: int = setting(1, ge=0)
    """Random seed of the run."""
    local: bool = setting(False)
    """Run in this process, without Ray, for debugging with breakpoints; one train rank and one engine."""
    faults: FaultsConfig = section(FaultsConfig, "Recovery from lost processes and machines.")
    deadlines: DeadlinesConfig = section(
        DeadlinesConfig, "Time limits for calls between processes; a call that exceeds its limit is reported and fails."
    )
    profile: ProfileConfig = section(ProfileConfig, "Profiles of single steps.", only_if=needs_given(".profile.steps"))
    prometheus: PrometheusConfig = section(PrometheusConfig, "Metrics for Prometheus and Grafana.")

    @property
    def checkpoint_dir(self) -> Path:
        """The checkpoint directory: default_local_dir, or by project and experiment."""
        if self.default_local_dir is not None:
            return Path(self.default_local_dir).expanduser()
        return Path("checkpoints", self.project_name, self.experiment_name)

    @property
    def profile_steps(self) -> frozenset[int]:
        """The steps to profile."""
        return frozenset(self.profile.steps or ()) if self.profile.enable else frozenset()


class SamplerConfig(Section):
    max_off_policy_threshold: Count = setting(8, unit="versions", only_if=_IS_ASYNCHRONOUS)
    """The value of trainer.max_staleness that an asynchronous trainer_mode sets."""


class ColocateConfig(Section):
    num_warmup_batches: int = setting(1, unit="batches", ge=0, only_if=needs(_MODE, "colocate_async"))
    """The value of async_training.staleness_threshold that trainer_mode sets."""


class SeparateConfig(Section):
    num_warmup_batches: int = setting(1, unit="batches", ge=0, only_if=needs(_MODE, "separate_async"))
    """The value of async_training.staleness_threshold that trainer_mode sets."""


class TrainerModeConfig(Section):
    trainer_mode: Literal["sync", "colocate_async", "separate_async"] | None = setting(None)
    """Sets actor_rollout_ref.hybrid_engine, trainer.max_staleness and async_training.staleness_threshold, if given."""
    sampler: SamplerConfig = section(SamplerConfig, "Staleness of an asynchronous trainer.")
    colocate_async: ColocateConfig = section(ColocateConfig, "Engines on the devices of the train workers.")
    separate_async: SeparateConfig = section(SeparateConfig, "Engines on devices of their own.")


class TrainerConfig(RunConfig):
    critic_warmup: int = setting(0, unit="steps", ge=0, only_if=(HAS_ADVANTAGES, HAS_CRITIC))
    """First steps, in which only the critic is trained."""
    ref_update_freq: Interval = setting(-1, unit="steps")
    """Steps between updates of the reference to the current policy (SPIN); -1: none."""
    ref_update_ratio: float = setting(1.0, gt=0, le=1, only_if=unless(".ref_update_freq", -1))
    """Weight of the policy in an update of the reference; 1: copy the policy; below 1: moving average (EMA)."""
    max_staleness: int = setting(0, unit="versions", ge=0)
    """Maximum weight versions that a response may lag; 0: synchronous."""
    validation_share: float = setting(0.5, gt=0, le=1, only_if=unless(".max_staleness", 0))
    """Responses of a validation at once, as a share of those generated for training: both share the engines."""
    val_only: bool = setting(False, only_if=needs_given("data.val_files"))
    """Validate the model, or the checkpoint that the run would resume from, and end."""
    samples: SamplesConfig = section(SamplesConfig, "Recorded samples, in the folder samples of the run.")
    replay: ReplayConfig = section(ReplayConfig, "Steps that can be run again on another machine.")
    rollout_data_dir: str | None = setting(None)
    """Folder for all responses of training: one JSONL file per step; null: none."""
    validation_data_dir: str | None = setting(None, only_if=needs_given("data.val_files"))
    """Folder for all responses of validation: one JSONL file each; null: none."""
    log_val_generations: int = setting(
        0,
        unit="responses",
        ge=0,
        only_if=OnlyIf(
            (".logger",),
            lambda sinks: bool({"wandb", "mlflow"} & {*sinks}),
            "trainer.logger has neither wandb nor mlflow",
        ),
    )
    """Responses of each validation to show as a table in wandb and mlflow; 0: none."""
    v1: TrainerModeConfig = section(TrainerModeConfig, "Names of launch scripts for the settings of asynchronous runs.")
    deterministic: bool = setting(False)
    """Bitwise reproducible: seeded responses, fixed batches; on GPUs deterministic kernels of torch and vLLM."""


class AsyncTrainingConfig(Section):
    staleness_threshold: float | None = setting(
        None, unit="batches", ge=0, only_if=unless("trainer.max_staleness", 0, reason="trainer.max_staleness=0")
    )
    """How far generation runs ahead; without trainer.max_staleness, sets it to this, rounded up, plus 1; null: 1."""
    require_batches: Count | None = setting(None, unit="mini-batches")
    """Factor of data.train_batch_size = this x trigger_parameter_sync_step x ppo_mini_batch_size; null: 1."""
    trigger_parameter_sync_step: Count | None = setting(None, unit="updates")
    """Factor of data.train_batch_size; null: 1. If neither factor is given, data.train_batch_size is what it is."""


class SkipRolloutConfig(Section):
    enable: bool = setting(False)
    """Reuse responses of an earlier run, with their scores, where there are any; keep new ones for the next run."""
    dump_dir: str = setting("~/.verl/rollout_dump", only_if=needs("skip.rollout.enable"))
    """Folder of the kept responses; all machines with episode workers have to see it."""
    steps: list[Count] = setting([], only_if=needs("skip.rollout.enable"))
    """Steps whose responses are reused and kept, counted from 1; []: all."""
    action: Literal["cache"] = setting("cache", only_if=needs("skip.rollout.enable"))
    """cache: reuse the responses of the same step only."""


class SkipConfig(Section):
    rollout: SkipRolloutConfig = section(SkipRolloutConfig, "Responses of an earlier run, instead of new ones.")


class RayInit(Section):
    """Arguments of `ray.init`; undeclared ones are passed on unchanged."""

    model_config = ConfigDict(extra="allow")

    num_cpus: Count | None = setting(None, unit="cores")
    """CPUs that Ray may use; set it where Slurm restricts them. null: all."""
    address: str | None = setting(None)
    """Cluster to join; local: a new one; null: RAY_ADDRESS, else a cluster on this machine, else a new one."""

    def arguments(self) -> dict[str, Any]:
        """Return the given arguments, for `ray.init(**arguments)`."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class RayConfig(Section):
    ray_init: RayInit = section(RayInit, "Arguments of ray.init.")
    timeline_json_file: str | None = setting(None)
    """File for Ray's timeline with the phases of the steps, written at the end, for Perfetto."""
