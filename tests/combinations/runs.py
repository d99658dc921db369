"""Trains one combination in this process, as `verl train` with trainer.local=true does, and on its ranks.

The local run has one rank and transformers as the engine. Its samples are then trained on by the `TrainWorker` of the
combination itself, on as many gloo ranks as it has, and by one rank without packing.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console as Screen

from tests.combinations.factors import PROMPTS, RESPONSES, Combination, list_overrides, plain
from verl.config.load import load_dict
from verl.config.paths import Tree, set_path
from verl.config.schema import Config
from verl.data.plan import Plan, Planner, RankPlan
from verl.tracking.console import Console
from verl.tracking.phases import PHASES
from verl.trainer.build.preflight import check_files
from verl.trainer.build.rl_builder import build_trainer
from verl.trainer.build.worker_settings import build_planner, train_settings
from verl.trainer.launcher import run
from verl.training.fsdp.engine import FsdpEngine
from verl.training.layout import RankLayout
from verl.types import Sample, SampleHandle
from verl.workers.train import TrainSettings, TrainWorker

STEPS, LIMIT = 2, 1e-5
UNCOMPARED = ("perf/", "timing_s/")
PLAIN = ("shared prompts", "activation checkpointing", "offload", "dtype", "packing")
ONE_RANK = {"HSDP": "FSDP", "Ulysses": "FSDP", "experts": "experts, one rank"}
"""Factors that must not change the gradient in float32: the reference has their plain level."""


class BrokenInvariantError(AssertionError):
    """What a combination must hold, and does not."""


@dataclass
class Job:
    """The steps of one combination for the ranks that train it."""

    config: Config
    handles: list[list[SampleHandle]]
    """Of each step, with their samples as `LocalRef`."""


@dataclass
class Trained:
    """What training gave: metrics of each step, gradients of each model's first update, and digests of the weights."""

    metrics: list[dict[str, float]]
    gradients: dict[str, torch.Tensor]
    weights: str
    resumed: str = ""


def load(combination: Combination, folder: Path, **changes: Any) -> Config:
    """Return the settings as a run reads them; raise a `ConfigError` that names what is refused."""
    tree: Tree = {}
    for key, value in {**list_overrides(combination, folder), **changes}.items():
        set_path(tree, tuple(key.split(".")), value)
    config = load_dict(tree).config
    check_files(config)
    return config


def to_local(combination: Combination) -> Combination:
    """Return the combination with one rank, and transformers as the engine."""
    local = combination | {"ranks": "1", "engine": "hf"}
    local["layout"] = ONE_RANK.get(combination["layout"], combination["layout"])
    if combination["LoRA"] == "adapter":
        local["LoRA"] = "merged"
    return local


def to_reference(combination: Combination) -> Combination:
    """Return what must have the same gradients, on one rank without packing, in float32."""
    local = to_local(combination)
    return local | {factor: level for factor, level in plain().items() if factor in PLAIN}


def run_locally(config: Config) -> list[list[SampleHandle]]:
    """Train two steps in this process; return the samples of each step."""
    handles: list[list[SampleHandle]] = []
    plan = Planner.plan

    def record(planner: Planner, samples: Sequence[SampleHandle]) -> Plan:
        handles.append(list(samples))
        return plan(planner, samples)

    screen = io.StringIO()
    console = Console(Screen(file=screen))
    with patch.object(Planner, "plan", record), redirect_stderr(screen):
        code = asyncio.run(
            run(config, console, lambda config, restarts: build_trainer(config, console, restarts=restarts))
        )
    if code:
        raise BrokenInvariantError(f"the run ended with code {code}: {screen.getvalue()[-2000:]}")
    return handles


def check_run(folder: Path, handles: Sequence[Sequence[SampleHandle]], first: int = 0) -> None:
    """Check that metrics are finite and count episodes, and that the weights of an episode sum to one."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    _require(len(steps) == STEPS - first, f"{len(steps)} steps")
    for line, samples in zip(steps, handles, strict=True):
        check_finite({name: value for name, value in line.items() if isinstance(value, float)})
        episodes: dict[tuple[int, int], list[SampleHandle]] = defaultdict(list)
        for handle in samples:
            episodes[handle.group, handle.index].append(handle)
        _require(len(episodes) == PROMPTS * RESPONSES, f"{len(episodes)} episodes")
        _require(all(len(each) == each[0].branches for each in episodes.values()), "branches are missing")
        scores = [each[0].score for each in episodes.values()]
        _require(math.isclose(line["reward/mean"], sum(scores) / len(scores), abs_tol=1e-9), "reward/mean")
        lengths = [each[0].generated for each in episodes.values()]
        _require(math.isclose(line["response_length/mean"], sum(lengths) / len(lengths)), "response_length/mean")
        for each in episodes.values():
            counted = sum(float(_shares(handle.ref.get()).sum()) for handle in each)
            _require(math.isclose(counted, each[0].generated, rel_tol=1e-5), f"an episode weighs {counted}")


def check_finite(metrics: Mapping[str, float]) -> None:
    """Check that metrics are finite. In float16 a norm may overflow: the step is skipped, and the loss scale halved."""
    allowed = [name.replace("loss_scale", "grad_norm") for name in metrics if name.endswith("/loss_scale")]
    infinite = [name for name, value in metrics.items() if not math.isfinite(value) and name not in allowed]
    _require(not infinite, f"not finite: {infinite}")


def _shares(sample: Sample) -> Any:
    return sample.mask * (1.0 if sample.shares is None else sample.shares)


def train_on_rank(
    job: Job, folder: Path, rank: int, ranks: int, ports: Iterator[int], *, resumes: bool = True
) -> Trained:
    """Train the steps of a job with the train worker of one rank, with `resumes` also from a checkpoint."""
    settings = train_settings(job.config, STEPS, "cpu")
    if settings.prime is not None:  # it is scored after its update; else AdamW makes whole steps of rounding
        settings = replace(settings, prime=replace(settings.prime, eps=0.1))
    layout = settings.actor.layout(ranks)
    steps = [own_plan(job, handles, layout, rank) for handles in job.handles]
    checkpoint = str(folder / "global_step_1")
    gradients: dict[str, torch.Tensor] = {}
    with record_gradients(gradients):
        worker = start(settings, rank, ranks, next(ports))
        metrics = [train(worker, steps[0])]
    if resumes:
        worker.save(checkpoint, {})
        worker.poll_save(True)
    metrics.append(train(worker, steps[1]))
    trained = Trained(metrics, gradients, digest(worker))
    worker.leave()
    if resumes:
        worker = start(settings, rank, ranks, next(ports))
        worker.load(checkpoint)
        train(worker, steps[1])
        trained.resumed = digest(worker)
        worker.leave()
    return trained


def own_plan(job: Job, handles: Sequence[SampleHandle], layout: RankLayout, rank: int) -> RankPlan:
    plan = build_planner(job.config, layout.data_size).plan(handles)
    return layout.spread(plan.ranks)[rank]


def start(settings: TrainSettings, rank: int, ranks: int, port: int) -> TrainWorker:
    worker = TrainWorker(rank, ranks)
    worker.start(("127.0.0.1", port), settings)
    return worker


def train(worker: TrainWorker, plan: RankPlan) -> dict[str, float]:
    """Do a step, and return its metrics."""
    replies = worker.prepare(plan) | worker.update()
    return {name: value for name, value in replies.items() if name != PHASES}


def digest(worker: TrainWorker) -> str:
    """Return a hash of all weights that are trained, and of the state of their optimizers, on this rank."""
    sums = hashlib.sha256()
    for folder, state in sorted(worker._policy.states().items()):
        for part in ("model", "optimizer"):
            for name, value in sorted(state.get(part, {}).items(), key=lambda item: str(item[0])):
                local = value.to_local() if hasattr(value, "to_local") else value
                raw = (
                    local.detach().contiguous().view(-1).view(torch.uint8) if isinstance(local, torch.Tensor) else None
                )
                sums.update(f"{folder} {part} {name} {value if raw is None else ''}".encode())
                sums.update(b"" if raw is None else raw.numpy().tobytes())
    return sums.hexdigest()


@contextmanager
def record_gradients(gradients: dict[str, torch.Tensor]) -> Iterator[None]:
    """Record the gradient of each model's first update, before it is clipped, in full and in the order of names."""
    step = FsdpEngine._step

    def record(engine: FsdpEngine, lr: float, *, has_tokens: bool) -> tuple[float, bool]:
        if engine.settings.role not in gradients:
            parts = [
                torch.zeros(0) if parameter.grad is None else _to_full(parameter.grad).float().flatten()
                for _, parameter in sorted(engine.model.named_parameters())
            ]
            gradients[engine.settings.role] = torch.cat(parts).clone()
        return step(engine, lr, has_tokens=has_tokens)

    with patch.object(FsdpEngine, "_step", record):
        yield


def _to_full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def compare(ours: Trained, expected: Trained) -> None:
    """Check losses, gradients and other metrics of the first step against those of one rank without packing."""
    mine, theirs = (
        {name: value for name, value in each.metrics[0].items() if not name.startswith(UNCOMPARED)}
        for each in (ours, expected)
    )
    _require(mine.keys() == theirs.keys(), f"metrics differ: {sorted(mine.keys() ^ theirs.keys())}")
    for name, value in theirs.items():
        gap = abs(mine[name] - value) / max(1.0, abs(value))
        _require(gap <= LIMIT, f"{name} is {mine[name]:.8g} instead of {value:.8g}")
    _require(ours.gradients.keys() == expected.gradients.keys(), "other models were trained")
    for role, gradient in expected.gradients.items():
        gap = float((ours.gradients[role] - gradient).norm()) / max(1e-3, float(gradient.norm()))
        _require(gap <= LIMIT, f"the gradient of {role} differs by {gap:.2g}")


def check_trained(trained: Trained) -> None:
    for metrics in trained.metrics:
        check_finite(metrics)
    _require(trained.resumed in ("", trained.weights), "a resumed worker has other weights")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise BrokenInvariantError(problem)


def hash_model(run: Path) -> str:
    """Return the hash of the model that a run has exported with its last checkpoint."""
    weights = run / f"global_step_{STEPS}" / "actor" / "huggingface"
    files = sorted(file for file in weights.iterdir() if file.suffix == ".safetensors")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
