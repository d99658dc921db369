"""The episode workers, which read prompts, run episodes against the engines, score them and store the samples.

The controller only gets a `SampleHandle` per sample: a reference and a few numbers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.agents.agent_episode import AgentEpisode
from verl.agents.deterministic_batcher import DeterministicBatcher
from verl.agents.episode import (
    EpisodeRunner,
    EpisodeScorer,
    refuse_to_score,
    score_by_function,
    score_by_model,
    single_turn,
    skip_scoring,
    weighted_sum,
)
from verl.child_process import keep_sigterm_blocked
from verl.cluster.hangs.pending_calls import (
    DEFAULT_TIMEOUTS,
    MARGIN_S,
    CallTarget,
    Timeout,
    Timeouts,
)
from verl.cluster.hangs.registry import report_failed_call
from verl.cluster.object_store import get_all, put
from verl.config.features import may_score_itself, scores_responses, uses_task_rewards
from verl.config.schema import Config
from verl.custom_functions import import_external
from verl.data.chat import load_tokenizer
from verl.data.dataset import DatasetSettings, PromptDataset
from verl.errors import ConfigError
from verl.rewards.final_answer import extract_final_answer
from verl.rewards.models.tokenization import build_encoder
from verl.rewards.pool.pool import RewardClient, open_rewards
from verl.rewards.result import RewardInput, RewardResult, make_failure
from verl.rewards.settings import OverlongPenalty, RewardFunctionSettings
from verl.rollout.engine import EngineView
from verl.rollout.replica_pool import EnginePool
from verl.types import Failed, Prompt, Sample, SampleHandle, SamplePreview, SamplingParams
from verl.workers.kept_responses import KeptResponses
from verl.workers.repetition import measure_repetition
from verl.workers.rewards import RemoteRewardModel, RewardModelPool
from verl.workers.sample_rows import SampleFile, SampleWriter, TokenValues

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """The settings of an episode worker."""

    config: Config
    datasets: dict[str, DatasetSettings]  # by split
    reward: RewardFunctionSettings | None = None  # None: no reward function
    components: Sequence[str] = ()  # numbers that the reward of every training response must have
    timeouts: Timeouts = DEFAULT_TIMEOUTS


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for the episodes of one prompt: one per seed (None: not seeded), and a greedy one if asked for."""

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
    """Runs many episodes concurrently on one event loop."""

    def __init__(
        self,
        settings: EpisodeSettings,
        engines: EngineView,
        reward_models: Sequence[RemoteRewardModel] = (),
    ) -> None:
        keep_sigterm_blocked()
        self._settings, self._engines, self._reward_models = settings, engines, reward_models
        config, shaping = settings.config, settings.config.reward.overlong_buffer
        self._scores_training = uses_task_rewards(config)
        self._overlong = None  # applied in training, never in validation
        if shaping.enable and self._scores_training:
            self._overlong = OverlongPenalty(shaping.len, shaping.penalty_factor, config.data.max_response_length)
        self._reader = ThreadPoolExecutor(1, "prompts")  # files are read by one thread
        self._latest: dict[tuple[str, str], tuple[Prompt, Sample]] = {}  # by split and data source
        self._kept = KeptResponses.from_config(config)

    async def start(self) -> None:
        """Load data and scorers; not in the constructor, whose errors Ray would hide behind a dead actor."""
        settings, config = self._settings, self._settings.config
        model, is_agentic = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.multi_turn.enable
        import_external(model.external_modules)
        load = partial(load_tokenizer, trust_remote_code=model.trust_remote_code)
        tokenizer = load(model.tokenizer_path or model.path)
        self._datasets = {
            split: PromptDataset(
                data.files,
                tokenizer,
                data.options,
                kept=data.kept,
                teacher=None if data.teacher is None else load(data.teacher),
            )
            for split, data in settings.datasets.items()
        }
        self._samples = SampleWriter(
            lambda tokens, keep_special: str(tokenizer.decode(list(tokens), skip_special_tokens=not keep_special))
        )
        limits = settings.timeouts
        # The trainer may use the devices first; then each attempt ends and starts an engine. The supervisor ends the
        # run earlier if no engine is left.
        restarts_s = config.trainer.faults.max_engine_restarts * 2 * (limits.start.seconds + MARGIN_S)
        self._pool = EnginePool(
            self._engines,
            stall_timeout_s=limits.generation.seconds + MARGIN_S,
            recovery_timeout_s=limits.generation.seconds + restarts_s,
            reply_timeout_s=limits.reply.seconds + MARGIN_S,
        )
        self._runner = EpisodeRunner(
            generate=self._pool.generate,
            score=await self._build_scorer(tokenizer),
            decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
            episode=AgentEpisode(config, tokenizer) if is_agentic else single_turn,
            start_episode=self._pool.start_episode,
        )

    async def _build_scorer(self, tokenizer: PreTrainedTokenizerBase) -> EpisodeScorer:
        """Return the scorer: a reward function in a pool of processes, the reward model, their sum, or none."""
        config, reward = self._settings.config, self._settings.reward
        has_model = config.reward.reward_model.enable and scores_responses(config)
        by_model = self._build_model_scorer(tokenizer) if has_model else None
        if reward is None and by_model is None and config.actor_rollout_ref.rollout.multi_turn.enable:
            return refuse_to_score
        if reward is None:
            return by_model or skip_scoring
        rewards = open_rewards(reward)
        await rewards.start()
        by_function = score_by_function(partial(self._score, rewards))
        weight = config.reward.reward_model.weight
        return by_function if by_model is None else weighted_sum(by_function, by_model, weight)

    def _build_model_scorer(self, tokenizer: PreTrainedTokenizerBase) -> EpisodeScorer:
        settings, config = self._settings, self._settings.config
        path, trust = config.reward.reward_model.model_path, config.actor_rollout_ref.model.trust_remote_code
        assert path is not None
        try:
            model_tokenizer = load_tokenizer(path, trust_remote_code=trust)
        except (OSError, ValueError) as error:
            setting = f"reward.reward_model.model_path={path}"
            raise ConfigError([f"{setting}: no tokenizer found; save it with the model: {error}"]) from error
        example = next(iter(next(iter(self._datasets.values()))))
        retokenize = config.data.return_raw_input_ids  # in the chat template of the reward model
        encode = build_encoder(tokenizer, model_tokenizer, example, model_path=path, retokenize=retokenize)
        models = RewardModelPool(
            self._reward_models,
            heartbeat_s=settings.timeouts.reply.seconds,
            recovery_timeout_s=settings.timeouts.start.seconds + MARGIN_S,
        )
        return score_by_model(encode, models.score)

    async def _score(self, rewards: RewardClient, *args: Any) -> RewardResult:
        """Score a response; report a timeout at once, since other responses of the run may hang, too."""
        result = await rewards.score(*args)
        if isinstance(result, Failed) and result.kind == "timeout":
            timeout = Timeout(rewards.timeout_s, "reward.deadline_s")
            report = partial(
                report_failed_call, "score a response", CallTarget("reward function"), timeout, result.message
            )
            self._reporting = asyncio.ensure_future(asyncio.to_thread(report))  # the loop keeps only weak references
        return result

    async def update_engines(self, view: EngineView) -> None:
        """Use these engines from now on; return when no request runs on an engine that left."""
        await self._pool.update(view)

    async def run(self, request: GroupRequest) -> list[SampleHandle] | None:
        """Return the samples of one prompt, or None if the prompt is too long and was dropped."""
        prompt = await self._read_prompt(request)
        return None if prompt is None else await self._run_group(request, prompt)

    async def run_round(self, requests: Sequence[GroupRequest]) -> list[list[SampleHandle] | None]:
        """Run several requests in deterministic batches: the same requests always return the same samples."""
        prompts = [await self._read_prompt(request) for request in requests]
        groups = [(request, prompt) for request, prompt in zip(requests, prompts, strict=True) if prompt is not None]
        batcher = DeterministicBatcher(self._pool.generate_all, sum(request.episodes for request, _ in groups))
        samples = iter(await asyncio.gather(*(self._run_group(*group, batcher) for group in groups)))
        return [None if prompt is None else next(samples) for prompt in prompts]

    async def _read_prompt(self, request: GroupRequest) -> Prompt | None:
        """Read and tokenize a prompt in a thread: prompts may be long, and the event loop serves all episodes."""
        read = self._datasets[request.split].__getitem__
        return await asyncio.get_running_loop().run_in_executor(self._reader, read, request.row)

    async def _run_group(
        self, request: GroupRequest, prompt: Prompt, batcher: DeterministicBatcher | None = None
    ) -> list[SampleHandle]:
        kept = self._kept if request.split == "train" else None
        if kept is not None and (samples := await asyncio.to_thread(kept.read, request.group, prompt)) is not None:
            return await self._finish_group(request, prompt, samples)
        samples = await self._runner.run(
            prompt,
            request.group,
            request.seeds,
            request.sampling,
            greedy_baseline=request.greedy_baseline,
            overlong=self._overlong if request.split == "train" else None,
            batcher=batcher,
            score=None if self._scores_training or request.split != "train" else skip_scoring,
        )
        if kept is not None:
            await asyncio.to_thread(kept.write, request.group, prompt, samples)
        return await self._finish_group(request, prompt, samples)

    async def _finish_group(self, request: GroupRequest, prompt: Prompt, samples: list[Sample]) -> list[SampleHandle]:
        """Put the samples of a prompt into the object store."""
        if request.split == "train" and self._settings.components:
            samples = [self._require_components(prompt, sample) for sample in samples]
        if scored := [sample for sample in samples if sample.failure is None]:
            self._latest[request.split, prompt.data_source] = prompt, scored[0]
        # In a thread: half of this worker's time would go into waiting for the object store.
        handles = await asyncio.to_thread(lambda: [put_sample(each, request.row) for each in samples])
        if request.split == "train" or len(samples) == 1:
            return handles
        answers = (extract_final_answer(self._decode_response(sample)) for sample in samples)
        return [replace(handle, final_answer=answer) for handle, answer in zip(handles, answers, strict=True)]

    async def write_samples(self, file: SampleFile) -> int:
        """Write finished samples to a file for people; return its size in bytes."""
        return await asyncio.to_thread(self._write_samples, file)

    def _write_samples(self, file: SampleFile) -> int:
        timeout_s = self._settings.timeouts.reply.seconds
        rows: list[tuple[Sample, Prompt, TokenValues | None]] = []
        for refs, values_ref in file.parts:
            samples: list[Sample] = get_all(refs, timeout_s)
            values: list[TokenValues | None] = [None] * len(samples)
            if values_ref is not None:
                [values] = get_all([values_ref], timeout_s)
            for sample, value in zip(samples, values, strict=True):
                prompt = self._reader.submit(self._datasets[file.split].__getitem__, file.rows[sample.group]).result()
                assert prompt is not None, "the prompt was read before"
                rows.append((sample, prompt, value))
        rows.sort(key=lambda row: (row[0].group, row[0].index))
        return self._samples.write(file, rows)

    def _require_components(self, prompt: Prompt, sample: Sample) -> Sample:
        """Return the sample, as a failed one if its reward lacks a component that the estimator needs.

        An episode that a limit has ended before its environment or agent could set a component gets 0 for it, as it
        does for a score.
        """
        numbers = {"score", *sample.metrics}
        missing = [name for name in self._settings.components if name not in numbers]
        if sample.failure is not None or not missing:
            return sample
        if may_score_itself(self._settings.config) and sample.finish_reason == "length":
            return replace(sample, metrics=sample.metrics | dict.fromkeys(missing, 0.0))
        fix = "Return it as a finite number for every response, in a dict next to 'score', or name another component"
        if may_score_itself(self._settings.config):
            fix += (
                ". An environment returns it in `Step.metrics` of its last step; an agent sets it in "
                "`model.transcript.metrics`, or returns None to leave its score to a reward function"
            )
        failure = make_failure(
            "invalid",
            f"algorithm.reward_components={missing[0]}",
            f"the reward of a response has no such number; it has {', '.join(sorted(numbers))}",
            RewardInput(prompt.data_source, self._decode_response(sample), prompt.ground_truth),
            fix,
        )
        return replace(sample, score=math.nan, metrics={}, failure=failure)

    def _decode_response(self, sample: Sample) -> str:
        return self._runner.decode(sample.tokens[sample.mask].tolist())

    async def ping(self) -> bool:
        return True

    async def preview_sample(self, split: str, data_source: str | None) -> SamplePreview | None:
        """Return one of the latest responses as its scorer saw it, if any."""
        latest = [pair for key, pair in self._latest.items() if key[0] == split and data_source in (None, key[1])]
        if not latest:
            return None
        prompt, sample = latest[-1]
        return SamplePreview(prompt.data_source, self._decode_response(sample), prompt.ground_truth, sample.score)


def put_sample(sample: Sample, row: int = -1) -> SampleHandle:
    """Put a sample into the object store and return its handle. A failed one is not stored."""
    return make_handle(sample, put(sample) if sample.failure is None else None, row)


def make_handle(sample: Sample, ref: Any, row: int = -1) -> SampleHandle:
    generated = sample.versions[sample.mask]
    return SampleHandle(
        ref=ref,
        group=sample.group,
        tokens=len(sample.tokens),
        generated=sample.episode_tokens or len(generated),
        score=sample.score,
        version=int(generated.min()) if len(generated) else -1,
        finish_reason=sample.finish_reason,
        metrics=sample.metrics,
        baseline=sample.baseline,
        index=sample.index,
        failure=sample.failure,
        prompt_tokens=int(sample.mask.argmax()) if len(generated) else len(sample.tokens),
        teacher_tokens=0 if sample.teacher_prompt is None else len(sample.teacher_prompt) + len(generated),
        engines=sample.engines,
        branches=sample.branches,
        versions=int(np.ptp(generated)) + 1 if len(generated) else 1,
        row=row,
        repetition=measure_repetition(sample.tokens, sample.mask),
        preemptions=sample.preemptions,
    )
