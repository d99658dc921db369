"""Requests to the episode workers: groups of samples for training and validation, and previews for messages."""

from __future__ import annotations

import hashlib

from verl.config.schema.root import Config
from verl.rewards.failures import FailureTracker
from verl.rewards.resolve import resolve_scorer
from verl.rewards.result import truncate
from verl.rollout.supervisor import EngineSupervisor
from verl.trainer.worker_settings import algorithm_settings
from verl.types import SampleHandle, SamplingParams
from verl.workers.episode_pool import EpisodePool
from verl.workers.episodes import GroupRequest


class EpisodeClient:
    """Runs groups of episodes. A request fails with the engines: when none is left, nobody waits for a response."""

    def __init__(
        self,
        config: Config,
        pool: EpisodePool,
        supervisor: EngineSupervisor,
        failures: FailureTracker,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._config, self._pool, self._supervisor, self.failures = config, pool, supervisor, failures
        self._sampling = _sampling_params(config, stop_token_ids)
        self._greedy_baseline = algorithm_settings(config).estimator == "remax"

    async def run_group(self, position: int, row: int) -> list[SampleHandle] | None:
        """Return the scored samples of one training prompt; None if the prompt is too long."""
        handles = await self._run("train", row, position, self._config.actor_rollout_ref.rollout.n)
        return None if handles is None else self.failures.keep_scored(handles)

    async def run_validation(self, row: int) -> list[SampleHandle]:
        """Return the samples of one validation prompt."""
        handles = await self._run("val", row, row, self._config.actor_rollout_ref.rollout.val_kwargs.n)
        assert handles is not None, "validation prompts that are too long are dropped before the start"
        return handles

    async def preview_validation(self, data_source: str) -> str:
        return await self.preview("val", data_source)

    async def preview(self, split: str, data_source: str | None = None) -> str:
        """Describe one of the latest responses and its score; empty if there is none."""
        sample = await self._pool.preview_sample(split, data_source)
        if sample is None:
            return ""
        scorer = resolve_scorer(self._config, sample.data_source)
        return (
            f"{scorer} gave {sample.score:g} to the response {truncate(sample.response)}; the ground truth is "
            f"{truncate(sample.ground_truth)}"
        )

    async def _run(self, split: str, row: int, group: int, count: int) -> list[SampleHandle] | None:
        seeds = [self._seed(split, group, index) for index in range(count)]
        greedy_baseline = split == "train" and self._greedy_baseline
        request = GroupRequest(split, row, group, seeds, self._sampling[split], greedy_baseline)
        return await self._supervisor.run_while_available(self._pool.run(request))

    def _seed(self, split: str, group: int, index: int) -> int | None:
        if not self._config.trainer.deterministic:
            return None
        text = f"{self._config.trainer.seed}/{split}/{group}/{index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _sampling_params(config: Config, stop_token_ids: tuple[int, ...]) -> dict[str, SamplingParams]:
    train, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    temperatures = {"train": train.temperature, "val": 0.0 if val.do_sample is False else val.temperature}
    return {
        split: SamplingParams(
            max_tokens=config.data.max_response_length,
            temperature=temperatures[split],
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=stop_token_ids,
        )
        for split, sampling in (("train", train), ("val", val))
    }
