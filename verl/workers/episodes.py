"""The episode workers: they read prompts, run episodes against the engines, score, and keep the samples.

What leaves them for the controller is a `SampleHandle` per sample: a reference and a few numbers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verl.cluster.device_pool import PlacementPool
from verl.cluster.group import call
from verl.cluster.handles import end, put
from verl.cluster.hangs.heartbeat import HeartbeatMonitor
from verl.cluster.hangs.pending_calls import DEFAULT_DEADLINES, MARGIN_S, CallTarget, Deadline, Deadlines
from verl.cluster.hangs.registry import register_actor, report_ended_stall
from verl.errors import ConfigError
from verl.rewards.overlong import OverlongPenalty
from verl.rewards.settings import RewardPoolSettings
from verl.types import Failed, Prompt, Sample, SampleHandle, SamplePreview, SamplingParams
from verl.workers.rewards import RemoteRewardModel, RewardModelPool
from verl.workers.rollout import RemoteEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.agents.deterministic_batcher import DeterministicBatcher
    from verl.agents.scoring import EpisodeScorer
    from verl.rewards.pool.pool import RewardClient
    from verl.rewards.result import RewardResult

__all__ = [
    "DatasetSettings",
    "EpisodePool",
    "EpisodeSettings",
    "EpisodeWorker",
    "GroupRequest",
    "ModelReward",
    "put_sample",
]

KIND = "episode worker"


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """Arguments of `PromptDataset`; `kept` are the rows that survived the controller's filter."""

    files: list[str]
    arguments: dict[str, Any]
    kept: npt.NDArray[np.int64] | range


@dataclass(frozen=True, slots=True)
class ModelReward:
    """A reward model's part in the reward; with `again`, prompts are written again by its own chat template."""

    path: str
    again: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What an episode worker builds itself from."""

    tokenizer_path: str
    datasets: dict[str, DatasetSettings]
    reward: RewardPoolSettings | None = None  # None: no function scores
    model_reward: ModelReward | None = None
    trust_remote_code: bool = False
    overlong: OverlongPenalty | None = None  # shapes the scores of training, never those of validation
    deadlines: Deadlines = DEFAULT_DEADLINES


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """The episodes of one prompt: one per seed (None draws freely), and with `greedy_baseline` a greedy one beside."""

    split: str
    row: int
    group: int
    seeds: Sequence[int | None]
    sampling: SamplingParams
    greedy_baseline: bool = False

    @property
    def episodes(self) -> int:
        return len(self.seeds) + self.greedy_baseline


class EpisodeWorker:
    """Runs many episodes at once on one event loop."""

    def __init__(
        self,
        settings: EpisodeSettings,
        engines: Sequence[RemoteEngine],
        reward_models: Sequence[RemoteRewardModel] = (),
    ) -> None:
        self._settings, self._engines, self._reward_models = settings, engines, reward_models
        self._latest: dict[tuple[str, str], tuple[Prompt, Sample]] = {}  # by split and data source

    async def start(self) -> None:
        """Read what the settings name; not done in the constructor, whose errors Ray would hide behind a dead actor."""
        from verl.agents.runner import EpisodeRunner
        from verl.data.chat import load_tokenizer
        from verl.data.dataset import PromptDataset
        from verl.rollout.replica_pool import EnginePool

        settings = self._settings
        tokenizer = load_tokenizer(settings.tokenizer_path, trust_remote_code=settings.trust_remote_code)
        self._datasets = {
            split: PromptDataset(data.files, tokenizer, **data.arguments, kept=data.kept)
            for split, data in settings.datasets.items()
        }
        self._pool = EnginePool(
            self._engines,
            stall_timeout_s=settings.deadlines.generation.seconds + MARGIN_S,
            reply_timeout_s=settings.deadlines.reply.seconds + MARGIN_S,
        )
        self._runner = EpisodeRunner(
            generate=self._pool.generate,
            score=await self._scoring(tokenizer),
            decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
        )

    async def _scoring(self, tokenizer: PreTrainedTokenizerBase) -> EpisodeScorer:
        """Who scores: a function in a pool of processes, the reward model, or both."""
        from verl.agents.scoring import score_by_function, score_by_model, weighted_sum
        from verl.data.chat import load_tokenizer
        from verl.rewards.models.tokenization import build_encoder
        from verl.rewards.pool.pool import open_rewards

        settings, model = self._settings, self._settings.model_reward
        if settings.reward is not None:
            functions = open_rewards(settings.reward)
            await functions.start()
            by_own = score_by_function(partial(self._scored, functions))
            if model is None:
                return by_own
        assert model is not None
        try:
            own = load_tokenizer(model.path, trust_remote_code=settings.trust_remote_code)
        except (OSError, ValueError) as error:
            place = f"reward.reward_model.model_path={model.path}"
            raise ConfigError([f"{place}: no tokenizer found; save it beside the model: {error}"]) from error
        example = next(iter(next(iter(self._datasets.values()))))
        read = build_encoder(tokenizer, own, example, model_path=model.path, retokenize=model.again)
        models = RewardModelPool(
            self._reward_models,
            heartbeat_s=settings.deadlines.reply.seconds,
            recovery_timeout_s=settings.deadlines.start.seconds + MARGIN_S,
        )
        by_reward_model = score_by_model(read, models.score)
        if settings.reward is None:
            return by_reward_model
        return weighted_sum(by_own, by_reward_model, model.weight)

    async def _scored(self, functions: RewardClient, *answer: Any) -> RewardResult:
        """A call that never ends is ended by the pool; it is told of now, for its group may have more of its kind."""
        outcome = await functions.score(*answer)
        if isinstance(outcome, Failed) and outcome.kind == "timeout":
            deadline = Deadline(functions.deadline_s, "reward.deadline_s")
            late = partial(
                report_ended_stall, "score an answer", CallTarget("reward function"), deadline, outcome.message
            )
            self._telling = asyncio.ensure_future(asyncio.to_thread(late))  # kept: the loop itself holds tasks weakly
        return outcome

    async def run(self, job: GroupRequest) -> list[SampleHandle] | None:
        """The samples of one prompt; None: the row is too long, which was found when it was read, and is left out."""
        prompt = self._datasets[job.split][job.row]
        return None if prompt is None else await self._answered(job, prompt)

    async def run_together(self, jobs: Sequence[GroupRequest]) -> list[list[SampleHandle] | None]:
        """As `run`, for all prompts of a round in lockstep: the same round always gives the same samples."""
        from verl.agents.deterministic_batcher import DeterministicBatcher

        prompts = [self._datasets[job.split][job.row] for job in jobs]
        episodes = sum(job.episodes for job, prompt in zip(jobs, prompts, strict=True) if prompt is not None)
        batcher = DeterministicBatcher(self._pool.generate_all, episodes)
        answered = iter(
            await asyncio.gather(
                *(
                    self._answered(job, prompt, batcher)
                    for job, prompt in zip(jobs, prompts, strict=True)
                    if prompt is not None
                )
            )
        )
        return [None if prompt is None else next(answered) for prompt in prompts]

    async def _answered(
        self, job: GroupRequest, prompt: Prompt, batcher: DeterministicBatcher | None = None
    ) -> list[SampleHandle]:
        samples = await self._runner.run(
            prompt,
            job.group,
            job.seeds,
            job.sampling,
            greedy_baseline=job.greedy_baseline,
            overlong=self._settings.overlong if job.split == "train" else None,
            batcher=batcher,
        )
        if scored := [sample for sample in samples if sample.failure is None]:
            self._latest[job.split, prompt.data_source] = prompt, scored[0]
        # In a thread: half of this worker's time would go into waiting for the object store.
        return await asyncio.to_thread(lambda: [put_sample(sample, index) for index, sample in enumerate(samples)])

    async def ping(self) -> bool:
        return True

    async def preview_sample(self, split: str, data_source: str | None) -> SamplePreview | None:
        """One of the latest answers, as its scorer saw it; None where there was none."""
        found = [pair for key, pair in self._latest.items() if key[0] == split and data_source in (None, key[1])]
        if not found:
            return None
        prompt, sample = found[-1]
        answer = self._runner.decode(sample.tokens[sample.mask].tolist())
        return SamplePreview(prompt.data_source, answer, prompt.ground_truth, sample.score)


def put_sample(sample: Sample, index: int = 0) -> SampleHandle:
    """Lay a sample into the object store; what the controller gets is the handle."""
    generated = sample.versions[sample.mask]
    return SampleHandle(
        ref=put(sample) if sample.failure is None else None,
        group=sample.group,
        tokens=len(sample.tokens),
        generated=len(generated),
        score=sample.score,
        version=int(generated.min()) if len(generated) else -1,
        finish_reason=sample.finish_reason,
        metrics=sample.metrics,
        baseline=sample.baseline,
        index=index,
        failure=sample.failure,
    )


class EpisodePool:
    """All episode workers as the trainer sees them: prompts in, handles out.

    `deterministic`: requests made in one turn of the event loop, such as all groups of a step, form one round, and
    rounds run one after the other, so that batch composition does not depend on timing. Needs a single worker.
    """

    def __init__(
        self, actors: Sequence[Any], *, deterministic: bool = False, deadlines: Deadlines = DEFAULT_DEADLINES
    ) -> None:
        self._actors, self._deadlines = list(actors), deadlines
        self._turn = itertools.cycle(range(len(self._actors)))
        self._heartbeats = [
            HeartbeatMonitor(partial(self._is_there, number), deadlines.reply.seconds)
            for number in range(len(self._actors))
        ]
        self._deterministic = deterministic
        self._asked: list[tuple[GroupRequest, asyncio.Future[list[SampleHandle] | None]]] = []
        self._one_round = asyncio.Lock()

    @classmethod
    def spawn(
        cls,
        pool: PlacementPool,
        count: int,
        settings: EpisodeSettings,
        engines: Sequence[RemoteEngine],
        reward_models: Sequence[RemoteRewardModel] = (),
        *,
        deterministic: bool = False,
    ) -> EpisodePool:
        actors = [
            pool.spawn(EpisodeWorker, settings, engines, reward_models, is_async=True)
            for _ in range(1 if deterministic else count)
        ]
        return cls(actors, deterministic=deterministic, deadlines=settings.deadlines)

    async def start(self) -> None:
        await asyncio.gather(*(self._start(number) for number in range(len(self._actors))))

    async def _start(self, number: int) -> None:
        actor, owner = self._actors[number], CallTarget(KIND, number)
        register_actor(actor, owner)
        await call(actor.start.remote(), action="start", target=owner, deadline=self._deadlines.start)

    async def run(self, job: GroupRequest) -> list[SampleHandle] | None:
        """The samples of one prompt, one per seed; with `greedy_baseline` each knows the score of the greedy answer.

        None: the row was found to be too long when it was read, and is left out.
        """
        if not self._deterministic:
            return await self._ask(next(self._turn), "run", job)
        if not self._asked:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._run_round()))
        answer: asyncio.Future[list[SampleHandle] | None] = asyncio.get_running_loop().create_future()
        self._asked.append((job, answer))
        return await answer

    async def _run_round(self) -> None:
        asked, self._asked = self._asked, []
        async with self._one_round:
            try:
                found = await self._ask(0, "run_together", [job for job, _ in asked])
            except Exception as error:  # noqa: BLE001 - it is theirs who asked
                for _, answer in asked:
                    if not answer.done():
                        answer.set_exception(error)
                return
        for (_, answer), samples in zip(asked, found, strict=True):
            if not answer.done():
                answer.set_result(samples)

    async def preview_sample(self, split: str, data_source: str | None = None) -> SamplePreview | None:
        """One of the latest answers of a split, and of a data source if it is named."""
        for number, actor in enumerate(self._actors):
            found: SamplePreview | None = await call(
                actor.preview_sample.remote(split, data_source),
                action="show an answer",
                target=CallTarget(KIND, number),
                deadline=self._deadlines.reply,
            )
            if found is not None:
                return found
        return None

    async def _ask(self, number: int, method: str, work: Any) -> Any:
        """Engines and rewards have deadlines of their own: the worker has only to be there."""
        reference = getattr(self._actors[number], method).remote(work)
        return await self._heartbeats[number].watch(call(reference, action=method, target=CallTarget(KIND, number)))

    async def _is_there(self, number: int) -> None:
        reference = self._actors[number].ping.remote()
        await call(
            reference, action="say that it is there", target=CallTarget(KIND, number), deadline=self._deadlines.reply
        )

    def close(self) -> None:
        for actor in self._actors:
            end(actor)
