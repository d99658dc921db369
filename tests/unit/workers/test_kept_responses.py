"""`skip.rollout`: a run trains on the responses that an earlier one kept, exactly as they were, and on no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.agents.episode import EpisodeRunner
from verl.agents.transcript import Transcript
from verl.config.load import load
from verl.errors import ConfigError
from verl.rollout.engine import EngineView
from verl.types import Completion, Failed, Prompt, Sample, SamplingParams, Scored
from verl.workers.episodes import EpisodeSettings, EpisodeWorker, GroupRequest
from verl.workers.kept_responses import KeptResponses

pytestmark = pytest.mark.unit

PROMPT = Prompt(row=0, token_ids=[1, 2], data_source="sums", ground_truth="46")


def sample(index: int = 0, **changes: Any) -> Sample:
    made = Sample(
        group=3,
        tokens=np.array([1, 2, 7, 9], np.int32),
        mask=np.array([0, 0, 1, 1], bool),
        logprobs=np.array([0, 0, -0.5, -0.25], np.float32),
        versions=np.array([-1, -1, 4, 4], np.int32),
        score=0.5,
        metrics={"format": 1.0},
        engines=frozenset({1}),
        turn_rewards=((2, 0.5),),
        times=(1.0, 2.0, 3.0),
        index=index,
    )
    return replace(made, **changes)


def differ(ours: Sample, theirs: Sample) -> list[str]:
    """Return the fields with other values or types."""
    pairs = {each.name: (getattr(ours, each.name), getattr(theirs, each.name)) for each in fields(Sample)}
    return [
        name
        for name, (mine, other) in pairs.items()
        if type(mine) is not type(other)
        or not np.array_equal(mine, other)
        or getattr(mine, "dtype", None) != getattr(other, "dtype", None)
    ]


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    kept = KeptResponses(tmp_path, 4)
    assert kept.read(3, PROMPT) is None
    written = [sample(0), sample(1, routed_experts=np.ones((3, 2, 1), np.uint8), score=-1.0)]
    kept.write(3, PROMPT, written)
    read = kept.read(3, PROMPT)
    assert read is not None
    assert [differ(ours, theirs) for ours, theirs in zip(written, read, strict=True)] == [[], []]


def test_other_prompts_failures_and_other_steps_are_not_kept(tmp_path: Path) -> None:
    kept = KeptResponses(tmp_path, 2, frozenset({2}))
    kept.write(2, PROMPT, [sample()])
    assert kept.read(2, PROMPT) is not None
    assert kept.read(2, replace(PROMPT, token_ids=[1, 3])) is None
    kept.write(3, PROMPT, [sample(failure=Failed("error", "broken"))])
    kept.write(4, PROMPT, [sample()])
    assert (kept.read(3, PROMPT), kept.read(4, PROMPT)) == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["00000002.pt"]


async def test_a_worker_generates_only_what_was_not_kept(tmp_path: Path) -> None:
    generated: list[int] = []

    async def generate(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        generated.append(sampling.seed or 0)
        return Completion([5, 9], np.full(2, -0.5, np.float32), np.zeros(2, np.int32), "stop")

    async def score(prompt: Prompt, transcript: Transcript, response: str) -> Scored:
        return Scored(0.25, {})

    settings = ["skip.rollout.enable=True", f"skip.rollout.dump_dir={tmp_path}"]
    config = load(settings, complete=False)[0].config
    scores = []
    for _ in range(2):
        worker = EpisodeWorker(EpisodeSettings(config, {}), EngineView.of([]))
        prompts: Any = [PROMPT]
        worker._datasets = {"train": prompts, "val": prompts}
        worker._runner = EpisodeRunner(generate, score, lambda tokens: str(tokens[0]))
        handles = await worker.run(GroupRequest("train", 0, 8, [5, 6], SamplingParams(max_tokens=4)))
        assert handles is not None
        scores.append([(handle.index, handle.score) for handle in handles])
    assert generated == [5, 6]
    assert scores[0] == scores[1] == [(0, 0.25), (1, 0.25)]
    assert await worker.run(GroupRequest("val", 0, 8, [7], SamplingParams(max_tokens=4)))
    assert generated == [5, 6, 7]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("trainer.max_staleness=1", "responses of another run are as old as the weights of their step"),
        ("trainer.deterministic=True", "responses of another run are not a function of the settings"),
        ("skip.rollout.action=repeat", "training on the responses of another step again, which is not supported yet"),
        ("skip.async_rollout.enable=True", "skip.rollout.enable"),
        ("actor_rollout_ref.rollout.trace.backend=weave", "traces in Weave, which is not supported yet"),
    ],
)
def test_what_is_not_possible_says_why(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(["skip.rollout.enable=True", setting])
    assert reason in str(raised.value)
