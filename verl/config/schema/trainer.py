"""`trainer.*` and `ray_kwargs.*`: how long, on how much, what is kept and who is told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from verl.config.schema.base import Interval, OneOrMany, Section, section, setting

__all__ = ["DeadlinesConfig", "RayConfig", "RunConfig", "TrainerConfig"]

Sink = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio", "none"]
Sinks = Annotated[list[Sink], OneOrMany]


class PrometheusConfig(Section):
    enable: bool = setting(False, "Serve the metrics to Prometheus.")
    port: int = setting(9090, "On this port.", ge=1, le=65535)


class DeadlinesConfig(Section):
    devices: float = setting(300.0, "Until the cluster's devices are reserved for the run.", unit="seconds", gt=0)
    start: float = setting(1800.0, "Until a process is up, with its model loaded.", unit="seconds", gt=0)
    generation: float = setting(
        1800.0, "In which an engine must finish an answer, if it has any to write.", unit="seconds", gt=0
    )
    train: float = setting(
        3600.0,
        "Of a train worker, for its part of one step: log-probs and advantages, or the update.",
        unit="seconds",
        gt=0,
    )
    weights: float = setting(
        900.0, "To gather weights, to load them into an engine, or to probe it.", unit="seconds", gt=0
    )
    checkpoint: float = setting(3600.0, "Of a train worker, to save or to load a checkpoint.", unit="seconds", gt=0)
    reply: float = setting(
        60.0, "For a short answer of a process that should be free to give it.", unit="seconds", gt=0
    )
    close: float = setting(30.0, "For an orderly end of a process, before it is killed.", unit="seconds", gt=0)


class FaultsConfig(Section):
    max_restarts: int = setting(
        3,
        "After a train worker or a machine is lost the run begins again from its last checkpoint, so often in a row.",
        unit="restarts",
        ge=0,
    )
    max_engine_restarts: int = setting(
        5, "So often in a row is a lost engine restarted; then the run goes on without it.", unit="restarts", ge=1
    )
    on_lost_node: Literal["wait", "shrink"] = setting(
        "wait", "A machine is gone: wait until the cluster has as many devices again, or go on with those left."
    )
    node_wait: float = setting(1800.0, "Longest wait for a lost machine to be replaced.", unit="seconds", ge=0)


class RunConfig(Section):
    """What a run has, whatever it trains by."""

    nnodes: int = setting(1, "Machines.", unit="machines", ge=1)
    n_gpus_per_node: int = setting(
        8, "Accelerators per machine; on a machine without any: train ranks (processes).", unit="devices", ge=1
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where to train; auto: cuda if there is one.")
    total_epochs: int = setting(1, "Passes over the training data.", unit="epochs", ge=1)
    total_training_steps: int | None = setting(
        None, "Steps of the run, whatever the epochs; null: total_epochs decides.", unit="steps", ge=1
    )
    save_freq: Interval | None = setting(
        -1, "A checkpoint every so many steps, and after the last; null: after the last alone; -1: never.", unit="steps"
    )
    test_freq: Interval = setting(-1, "A validation every so many steps; -1: never.", unit="steps")
    val_before_train: bool = setting(True, "Validate before the first step, if there are val_files.")
    save_hf: bool = setting(
        False,
        "Every checkpoint also holds the model for from_pretrained, in actor/huggingface; as verl merge makes it.",
    )
    max_ckpts_to_keep: int | None = setting(
        None, "Older checkpoints are deleted; null: all are kept.", unit="checkpoints", ge=1
    )
    max_hours: float | None = setting(
        None, "The run saves and ends in time for this; null: for the end of the Slurm job, if any.", unit="hours", gt=0
    )
    stop_margin: float = setting(
        60.0, "Time to spare then, beyond the longest step and the longest save so far.", unit="seconds", ge=0
    )
    default_local_dir: str | None = setting(
        None, "Where checkpoints go; null: checkpoints/<project_name>/<experiment_name>."
    )
    resume_mode: Literal["auto", "disable", "path"] = setting(
        "auto", "auto: go on from the newest checkpoint; disable: start anew; path: from resume_from_path."
    )
    resume_from_path: str | None = setting(None, "A checkpoint: .../global_step_<N>.")
    logger: Sinks = setting(["console"], "Who is told the metrics.", planned=("mlflow", "trackio"))
    project_name: str = setting("verl", "Project, for trackers and the checkpoint directory.")
    experiment_name: str = setting("default", "Run, for trackers and the checkpoint directory.")
    wandb_proxy: str | None = setting(None, "Proxy for wandb alone.")
    seed: int = setting(1, "Seed of everything random in the run.", ge=0)
    local: bool = setting(
        False, "All in this process, without Ray, so that a breakpoint just works; one train rank and one engine."
    )
    faults: FaultsConfig = section(FaultsConfig, "What happens when a process or a machine is lost.")
    deadlines: DeadlinesConfig = section(
        DeadlinesConfig, "How long one process waits for another before it is named, reported and given up."
    )
    prometheus: PrometheusConfig = section(PrometheusConfig, "Metrics for Prometheus and Grafana.", planned=True)

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints go: default_local_dir, or by project and experiment."""
        if self.default_local_dir is not None:
            return Path(self.default_local_dir).expanduser()
        return Path("checkpoints", self.project_name, self.experiment_name)


class TrainerConfig(RunConfig):
    critic_warmup: int = setting(0, "First steps, in which only the critic is trained.", unit="steps", ge=0)
    ref_update_freq: Interval = setting(
        -1, "The reference becomes the current policy every so many steps (SPIN); -1: never.", unit="steps"
    )
    max_staleness: int = setting(
        0, "How many weight versions behind an answer may be; 0: synchronous.", unit="versions", ge=0, planned=True
    )
    deterministic: bool = setting(
        False, "Repeatable to the bit: every answer has a seed, and the engines get the requests of a step all at once."
    )


class RayInit(Section):
    """Arguments of `ray.init`: what is not declared here is passed as it is."""

    model_config = ConfigDict(extra="allow")

    num_cpus: int | None = setting(
        None, "CPUs that Ray may use; set it where Slurm restricts them. null: all.", unit="cores", ge=1
    )
    address: str | None = setting(
        None, "Cluster to join; null: RAY_ADDRESS, else what `ray start` made here, else a new one; local: a new one."
    )

    def arguments(self) -> dict[str, Any]:
        """What was given, for `ray.init(**arguments)`."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class RayConfig(Section):
    ray_init: RayInit = section(RayInit, "Arguments of ray.init, passed as they are.")
    timeline_json_file: str | None = setting(None, "Write Ray's timeline here at the end, for Perfetto.")
