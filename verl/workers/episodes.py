"""The episode workers: they read prompts, run episodes against the engines, score, and keep the samples.

What leaves them for the controller is a `SampleHandle` per sample: a reference and a few numbers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from verl.cluster.group import call
from verl.rewards.overlong import Overlong
from verl.types import Sample, SampleHandle, SamplingParams
from verl.workers.rollout import RemoteEngine

__all__ = ["DatasetSettings", "EpisodePool", "EpisodeSettings", "EpisodeWorker", "deposit"]

START_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """Arguments of `PromptDataset`; `kept` are the rows that survived the controller's filter."""

    files: list[str]
    arguments: dict[str, Any]
    kept: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What an episode worker builds itself from."""

    tokenizer_path: str
    datasets: dict[str, DatasetSettings]
    reward: dict[str, Any] = field(default_factory=dict)  # arguments of ScorePool
    trust_remote_code: bool = False
    overlong: Overlong | None = None  # shapes the scores of training, never those of validation


class EpisodeWorker:
    """Runs many episodes at once on one event loop."""

    def __init__(self, settings: EpisodeSettings, engines: Sequence[RemoteEngine]) -> None:
        self._settings, self._engines = settings, engines

    async def start(self) -> None:
        """Read what the settings name; not done in the constructor, whose errors Ray would hide behind a dead actor."""
        from transformers import AutoTokenizer

        from verl.agents.runner import EpisodeRunner
        from verl.agents.scoring import by_function
        from verl.data.dataset import PromptDataset
        from verl.rewards.pool import ScorePool
        from verl.rollout.pool import EnginePool

        settings = self._settings
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_path, trust_remote_code=settings.trust_remote_code)
        self._datasets = {
            split: PromptDataset(data.files, tokenizer, **data.arguments, kept=data.kept)
            for split, data in settings.datasets.items()
        }
        scores = ScorePool(**settings.reward)
        await scores.start()
        self._runner = EpisodeRunner(
            generate=EnginePool(self._engines).generate,
            score=by_function(scores.score),
            decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
        )

    async def run(
        self,
        split: str,
        row: int,
        group: int,
        seeds: Sequence[int | None],
        sampling: SamplingParams,
        greedy_baseline: bool = False,
    ) -> list[SampleHandle]:
        samples = await self._runner.run(
            self._datasets[split][row],
            group,
            seeds,
            sampling,
            greedy_baseline=greedy_baseline,
            overlong=self._settings.overlong if split == "train" else None,
        )
        # In a thread: half of this worker's time would go into waiting for the object store.
        return await asyncio.to_thread(lambda: [deposit(sample, number) for number, sample in enumerate(samples)])


def deposit(sample: Sample, number: int = 0) -> SampleHandle:
    """Lay a sample into the object store; what the controller gets is the handle."""
    generated = sample.versions[sample.mask]
    return SampleHandle(
        ref=ray.put(sample) if sample.failure is None else None,
        group=sample.group,
        tokens=len(sample.tokens),
        generated=len(generated),
        score=sample.score,
        version=int(generated.min()) if len(generated) else -1,
        finish_reason=sample.finish_reason,
        metrics=sample.metrics,
        baseline=sample.baseline,
        number=number,
        failure=sample.failure,
    )


class EpisodePool:
    """All episode workers as the trainer sees them: prompts in, handles out."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self._turn = itertools.cycle(self._actors)

    @classmethod
    def place(cls, count: int, settings: EpisodeSettings, engines: Sequence[RemoteEngine]) -> EpisodePool:
        worker = ray.remote(EpisodeWorker).options(num_cpus=0, max_concurrency=100_000)
        return cls([worker.remote(settings, engines) for _ in range(count)])

    async def start(self) -> None:
        for number, actor in enumerate(self._actors):
            await call(actor.start.remote(), what=f"episode worker {number}: start", deadline_s=START_DEADLINE_S)

    async def run(
        self,
        split: str,
        row: int,
        group: int,
        seeds: Sequence[int | None],
        sampling: SamplingParams,
        *,
        greedy_baseline: bool = False,
    ) -> list[SampleHandle]:
        """The samples of one prompt, one per seed; with `greedy_baseline` each knows the score of the greedy answer."""
        reference = next(self._turn).run.remote(split, row, group, seeds, sampling, greedy_baseline)
        return await call(reference, what=f"the episodes of prompt {group}")  # engines and rewards have deadlines

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
