"""One suite for every rollout engine: the fake, transformers and vLLM keep the same promises."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tiny import tiny_qwen2
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from verl.rollout.engine import RolloutEngine
from verl.rollout.fake import FakeRolloutEngine
from verl.rollout.hf import HfEngine
from verl.rollout.vllm import VllmEngine, VllmSettings
from verl.types import SamplingParams
from verl.weights.parcel import pack

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

VOCABULARY = 64
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_qwen2(
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        tie_word_embeddings=request.param == "tied",
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "fake": lambda path: FakeRolloutEngine(VOCABULARY),
    "hf": lambda path: HfEngine(str(path)),
    "vllm": lambda path: VllmEngine(VllmSettings(str(path), dtype="float32", max_model_len=64, max_num_seqs=16)),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(MAKERS))
async def engine(request: pytest.FixtureRequest, model: PreTrainedModel) -> AsyncIterator[RolloutEngine]:
    if request.param == "fake" and model.config.tie_word_embeddings:
        pytest.skip("the fake has no embeddings to tie; it runs once")
    made = MAKERS[request.param](Path(model.name_or_path))
    await made.start()
    yield made
    await made.close()


async def publish(engine: RolloutEngine, model: PreTrainedModel, version: int) -> None:
    weights = dict(model.named_parameters())  # tied ones once
    await engine.load_weights(list(pack(weights.items(), max_bytes=20_000)), version)


def expected(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


async def test_the_version_is_the_last_one_loaded(engine: RolloutEngine, model: PreTrainedModel) -> None:
    for version in (0, 1, 7):
        await publish(engine, model, version)
        assert await engine.version() == version


async def test_every_token_carries_its_version_and_a_log_prob(engine: RolloutEngine, model: PreTrainedModel) -> None:
    await publish(engine, model, 3)
    answer = await engine.generate(PROMPT, SamplingParams(max_tokens=6))
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == 6
    assert answer.versions == [3] * 6
    assert all(logprob <= 0 for logprob in answer.logprobs)
    assert answer.finish_reason == "length"


async def test_an_answer_ends_with_the_stop_token_and_says_so(engine: RolloutEngine, model: PreTrainedModel) -> None:
    await publish(engine, model, 0)
    stops = tuple(range(0, VOCABULARY, 2))
    answer = await engine.generate(PROMPT, SamplingParams(max_tokens=40, stop_token_ids=stops))
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in stops
    assert not set(answer.token_ids[:-1]) & set(stops)


async def test_the_same_seed_draws_the_same_answer(engine: RolloutEngine, model: PreTrainedModel) -> None:
    await publish(engine, model, 0)
    params = [SamplingParams(max_tokens=8, seed=seed) for seed in (1, 1, 2)]
    first, again, other = await asyncio.gather(*(engine.generate(PROMPT, one) for one in params))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_requests_that_run_together_repeat_to_the_bit(engine: RolloutEngine, model: PreTrainedModel) -> None:
    await publish(engine, model, 0)
    requests = [(PROMPT[: 1 + k % 4], SamplingParams(max_tokens=3 + k % 7, seed=k)) for k in range(24)]
    first = await engine.generate_all(requests)
    await asyncio.gather(*(engine.generate(PROMPT, SamplingParams(max_tokens=8)) for _ in range(5)))  # history
    assert await engine.generate_all(requests) == first
    assert [len(answer.token_ids) for answer in first] == [3 + k % 7 for k in range(24)]


async def test_greedy_answers_repeat(engine: RolloutEngine, model: PreTrainedModel) -> None:
    await publish(engine, model, 0)
    greedy = SamplingParams(max_tokens=8, temperature=0)
    assert (await engine.generate(PROMPT, greedy)).token_ids == (await engine.generate(PROMPT, greedy)).token_ids


async def test_log_probs_are_the_models_own_also_after_new_weights(
    engine: RolloutEngine, model: PreTrainedModel
) -> None:
    if isinstance(engine, FakeRolloutEngine):
        pytest.skip("the fake has no model")
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        await publish(engine, model, version)
        assert (torch.tensor(await engine.score(PROMPT)) - expected(model, PROMPT)).abs().max() < 1e-4
        answer = await engine.generate(PROMPT, SamplingParams(max_tokens=8))
        own = expected(model, PROMPT + answer.token_ids)[len(PROMPT) - 1 :]
        assert (torch.tensor(answer.logprobs) - own).abs().max() < 1e-4


async def test_log_probs_are_of_the_distribution_drawn_from(engine: RolloutEngine, model: PreTrainedModel) -> None:
    if isinstance(engine, FakeRolloutEngine):
        pytest.skip("the fake has no model")
    await publish(engine, model, 0)
    answer = await engine.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.5))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1] / 0.5
    assert answer.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[answer.token_ids[0]]), abs=1e-4)
