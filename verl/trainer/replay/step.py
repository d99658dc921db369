"""A recorded step of a run, and the update that is run again from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import Totals
from verl.algorithms.objective import ModelOutput
from verl.checkpoint.save import load_folders
from verl.cluster.local import detect_local_device
from verl.config.load import load_for_replay
from verl.config.paths import set_path
from verl.config.schema import Config
from verl.data.flat_batch import FlatBatch
from verl.errors import VerlError
from verl.trainer.build.worker_settings import train_settings
from verl.trainer.records.replay import RESULT, get_step_folder
from verl.training.engine import Loss
from verl.training.policy.recorded_step import RecordedBatch, read_batch
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import close_process_group, init_process_group
from verl.training.settings import EngineSettings
from verl.workers.train_settings import TrainSettings, build_policy

_ONE_PROCESS = {
    "sequence_parallel_size": 1,
    "expert_parallel_size": 1,
    "context_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "first_stage_layers": None,
    "last_stage_layers": None,
    "fsdp_size": -1,
    "param_offload": False,
    "optimizer_offload": False,
    "offload_policy": False,
}
"""Settings of a model that distribute it, which changes no result."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step in the folder of a run, with the settings that it was trained with."""

    folder: Path
    config: Config
    total_steps: int
    batch: RecordedBatch
    metrics: Mapping[str, float]

    def find(self, group: int, index: int, branch: int = 0) -> int:
        """Return the sample of a response, or of a branch of it, as a position in the batch."""
        samples = self.batch.samples
        found = [k for k, sample in enumerate(samples) if (sample.group, sample.index) == (group, index)]
        if branch < len(found):
            return found[branch]
        groups = sorted({sample.group for sample in samples})
        raise VerlError(
            f"{self.folder}: has no sample {group}/{index}; its groups are {', '.join(map(str, groups[:20]))}"
            f"{', ...' if len(groups) > 20 else ''}, with responses from 0 on"
        )

    def settings(self, device: str) -> TrainSettings:
        """Return the models of the step for one process. They compute in the data types that the run had."""
        settings = train_settings(self.config, self.total_steps, self.batch.device)

        def fit(model: EngineSettings) -> EngineSettings:
            known = {each.name for each in fields(model)}
            changes: dict[str, Any] = {name: value for name, value in _ONE_PROCESS.items() if name in known}
            return replace(model, device=device, compile=model.compile and device != "cpu", **changes)

        values = {each.name: getattr(settings, each.name) for each in fields(settings)}
        models: dict[str, Any] = {
            name: fit(value) for name, value in values.items() if isinstance(value, EngineSettings)
        }
        return replace(settings, **models)


def list_steps(run: Path) -> list[int]:
    """Return the recorded steps of a run."""
    return sorted(int(path.parent.name.removeprefix("step_")) for path in run.glob(f"replay/step_*/{RESULT}"))


def open_step(run: Path, step: int, overrides: Sequence[str] = ()) -> RecordedStep:
    """Read a recorded step; `overrides` change its settings, such as the path of a model that is elsewhere here."""
    folder = get_step_folder(run, step)
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except OSError as error:
        steps = ", ".join(map(str, list_steps(run))) or "none"
        raise VerlError(
            f"{run}: step {step} is not recorded (recorded: {steps}). Set trainer.replay.steps=[{step}] before the step"
        ) from error
    settings, total_steps = read_settings(run, step)
    return RecordedStep(
        folder, load_for_replay(settings, overrides), total_steps, read_batch(folder), result["metrics"]
    )


def read_settings(run: Path, step: int) -> tuple[dict[str, Any], int]:
    """Return the settings of the start that has trained a step, and the number of steps of the run."""
    path = run / "starts.jsonl"
    try:
        starts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise VerlError(f"{path}: cannot be read: {error}; a replay needs it for the settings of the run") from error
    start = [start for start in starts if start["step"] < step][-1]
    tree: dict[str, Any] = {}
    for key, setting in start["settings"].items():
        set_path(tree, tuple(key.split(".")), setting["value"])
    return tree, start["total_steps"]


@contextmanager
def open_policy(recorded: RecordedStep, device: str | None = None) -> Iterator[PolicyTrainer]:
    """Load the models as they were before the step, in this process."""
    device = device or (
        detect_local_device() if recorded.config.trainer.device == "auto" else recorded.config.trainer.device
    )
    settings = recorded.settings(device)
    init_process_group(0, 1, "127.0.0.1", 0, device)
    try:
        torch.manual_seed(settings.seed)
        policy = build_policy(settings)
        policy.load_states(load_folders(policy.states(), recorded.folder))
        yield policy
    finally:
        close_process_group()


def update(policy: PolicyTrainer, batch: RecordedBatch, trace: Trace | None = None) -> dict[str, float]:
    """Update a policy that has prepared the batch; return the metrics."""
    if trace is not None:
        trace.observe(policy, batch)
    return policy.update(batch.plan)


@dataclass(frozen=True, slots=True)
class TracedUpdate:
    """What one optimizer step has seen of a sample; tensors [T] over its tokens.

    Args:
        update: The index of the update in the step.
        tokens, mask: The sample.
        rollout, old, reference: Log-probs of the engine, of the policy before the step, and of the reference.
        current: Log-probs of the policy before this update.
        advantages: One per token.
        gradients: The derivative of the loss by the log-prob of each token: negative ones are made more likely.
        loss: The sample's share of the loss of its mini-batch.
    """

    update: int
    tokens: Tensor
    mask: Tensor
    rollout: Tensor | None
    old: Tensor
    reference: Tensor | None
    current: Tensor
    advantages: Tensor
    gradients: Tensor
    loss: float


class Trace:
    """Records what becomes of one sample in the updates of a step."""

    def __init__(self, sample: int) -> None:
        self._sample = sample
        self.updates: list[TracedUpdate] = []

    def observe(self, policy: PolicyTrainer, batch: RecordedBatch) -> None:
        """Watch the next update of a policy that has prepared the batch."""
        objective = policy.objective
        parts = iter([(update, part) for update, parts in enumerate(batch.plan.policy) for part in parts if part])

        def watch(output: ModelOutput, micro_batch: FlatBatch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
            update, part = next(parts)
            if self._sample in part:
                self.updates.append(_trace(objective, output, micro_batch, totals, update, part.index(self._sample)))
            return objective(output, micro_batch, totals)

        policy.objective = watch


def _trace(
    objective: Loss[ModelOutput], output: ModelOutput, batch: FlatBatch, totals: Totals, update: int, k: int
) -> TracedUpdate:
    """Return what the objective makes of the sample `k` of a micro-batch alone: shares of a loss add up."""
    part = slice(*batch.offsets[k : k + 2].tolist())
    own = batch.select([k])
    columns: list[Any] = [None if each is None else each[part].detach() for each in output]
    mine = ModelOutput(*columns)
    current = mine.logprobs.requires_grad_()
    with torch.enable_grad():
        loss, _ = objective(mine._replace(logprobs=current), own, totals)
        [gradients] = torch.autograd.grad(loss, current)
    assert own.old_logprobs is not None
    assert own.advantages is not None
    return TracedUpdate(
        update,
        own.tokens.cpu(),
        own.mask.cpu(),
        own.rollout_logprobs,
        own.old_logprobs,
        own.ref_logprobs,
        current.detach(),
        own.advantages,
        gradients,
        float(loss.detach()),
    )
