"""One suite for every rollout engine: the fake, transformers, also in another Python environment, and vLLM.

VERL_TEST_ENGINES=sglang runs it for SGLang, and VERL_TEST_ENGINES=toy VERL_TEST_MODULES=tests.toy_rollout_engine for an
engine that a module registers.
"""

import asyncio
import copy
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rotation import rotate_rest
from tiny import tiny_qwen2
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from tests.fake_rollout_engine import FakeRolloutEngine
from tests.second_environment import make_environment
from tests.sglang_environment import make_sglang_environment
from verl.config.rollout_engines import RolloutCapabilities, get_rollout_engine
from verl.custom_functions import import_external
from verl.errors import WeightSyncError
from verl.rollout.engine import RolloutEngine, load_weights, make_engine
from verl.rollout.hf import HfEngine
from verl.rollout.settings import RolloutEngineSettings
from verl.rollout.sglang.settings import SglangSettings
from verl.rollout.vllm.engine import VllmEngine
from verl.rollout.vllm.settings import AdapterSettings, VllmSettings
from verl.training.kernels.logprobs import LastLayer, token_logprobs
from verl.types import Completion, SamplingParams
from verl.weights.bucket import pack
from verl.weights.sync import HostTransport
from verl.workers.weight_packer import WeightPacker

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

VOCABULARY = 64
PROMPT = [5, 6, 7, 8]


def make_model(embeddings: str, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_qwen2(
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        tie_word_embeddings=embeddings == "tied",
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make_model(request.param, tmp_path_factory.mktemp("model"))


SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 100}
VLLM = SMALL | {"max_logprobs": 200}
MAKERS: dict[str, Callable[[Path], Any]] = {
    "fake": lambda path: FakeRolloutEngine(VOCABULARY),
    "hf": lambda path: HfEngine(RolloutEngineSettings(str(path))),
    "vllm": lambda path: VllmEngine(VllmSettings(str(path), **VLLM)),
    "vllm_tp2": lambda path: VllmEngine(VllmSettings(str(path), **VLLM, tensor_parallel_size=2, cpu_cores="0|1")),
}


ENGINES = os.environ.get("VERL_TEST_ENGINES", "fake,hf,hf_isolated,vllm").split(",")
import_external(os.environ.get("VERL_TEST_MODULES", "").split())


def make_registered(name: str, path: Path, python: str | None = None) -> RolloutEngine:
    spec = get_rollout_engine(name)
    return make_engine(spec, spec.load(spec.settings)(str(path), dtype="float32", max_model_len=64), python)


def make_sglang(path: Path, folder: Path, cores: str = "0") -> RolloutEngine:
    sizes = SMALL | {"max_num_batched_tokens": 300}  # with fewer, requests that are retracted again and again take long
    settings = SglangSettings(str(path), **sizes, tensor_parallel_size=len(cores.split("|")), cpu_cores=cores)
    return make_engine(get_rollout_engine("sglang"), settings, make_sglang_environment(folder))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of another environment."""
    return make_environment(tmp_path_factory.mktemp("environment"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engine(
    request: pytest.FixtureRequest, model: PreTrainedModel, python: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RolloutEngine]:
    name, path = request.param, Path(model.name_or_path)
    if name == "fake" and model.config.tie_word_embeddings:
        pytest.skip("the fake has no embeddings to tie; it runs once")
    if name.startswith("sglang"):
        made = make_sglang(path, tmp_path_factory.mktemp("sglang"), "0|1" if name == "sglang_tp2" else "0")
    elif name.endswith("_isolated"):
        made = make_registered(name.removesuffix("_isolated"), path, python)
    else:
        made = MAKERS[name](path) if name in MAKERS else make_registered(name, path)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def capabilities(request: pytest.FixtureRequest) -> RolloutCapabilities:
    """What the engine of the test declares."""
    name = request.node.callspec.params["engine"].partition("_")[0]
    if name == "fake":
        return RolloutCapabilities(deterministic_devices=("cpu",))
    return get_rollout_engine(name).capabilities


def is_deterministic(capabilities: RolloutCapabilities) -> bool:
    return "cpu" in capabilities.deterministic_devices


async def sync(engine: RolloutEngine, model: PreTrainedModel, version: int) -> None:
    weights = dict(model.named_parameters())  # tied ones once
    await load_weights(engine, list(pack(weights.items(), max_bytes=20_000)), version)


def expected(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


async def test_the_version_is_the_last_one_loaded(engine: RolloutEngine, model: PreTrainedModel) -> None:
    for version in (0, 1, 7):
        await sync(engine, model, version)
        assert await engine.version() == version


async def test_every_token_carries_its_version_and_a_log_prob(engine: RolloutEngine, model: PreTrainedModel) -> None:
    await sync(engine, model, 3)
    answer = await engine.generate(PROMPT, SamplingParams(max_tokens=6))
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == 6
    assert answer.versions.tolist() == [3] * 6
    assert (answer.logprobs.dtype, answer.versions.dtype) == (np.float32, np.int32)
    assert all(logprob <= 0 for logprob in answer.logprobs)
    assert answer.finish_reason == "length"


async def test_an_answer_ends_with_the_stop_token_and_says_so(engine: RolloutEngine, model: PreTrainedModel) -> None:
    await sync(engine, model, 0)
    stops = tuple(range(0, VOCABULARY, 2))
    answer = await engine.generate(PROMPT, SamplingParams(max_tokens=40, stop_token_ids=stops))
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in stops
    assert not set(answer.token_ids[:-1]) & set(stops)


async def test_the_same_seed_draws_the_same_answer(
    engine: RolloutEngine, model: PreTrainedModel, capabilities: RolloutCapabilities
) -> None:
    if not is_deterministic(capabilities):
        pytest.skip("the engine ignores seeds")
    await sync(engine, model, 0)
    params = [SamplingParams(max_tokens=8, seed=seed) for seed in (1, 1, 2)]
    first, again, other = await asyncio.gather(*(engine.generate(PROMPT, one) for one in params))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_without_a_seed_random_numbers_depend_on_the_version(
    engine: RolloutEngine, model: PreTrainedModel, capabilities: RolloutCapabilities
) -> None:
    if not capabilities.continues_requests:
        pytest.skip("an engine of one request at a time draws new random numbers for each")
    sampling, answers = SamplingParams(max_tokens=16), []
    for version in (31, 32, 31):
        await sync(engine, model, version)
        answers.append([(await engine.generate(PROMPT, sampling)).token_ids for _ in range(3)])
    assert answers[0] == answers[2], "a restarted engine would go on differently"
    assert answers[0] != answers[1], "every version would repeat the same stream"


async def test_seeded_requests_are_answered_whose_prompts_do_not_fit_in_one_batch(
    engine: RolloutEngine, model: PreTrainedModel, capabilities: RolloutCapabilities
) -> None:
    await sync(engine, model, 0)
    requests = [(PROMPT * 14, SamplingParams(max_tokens=3, seed=k)) for k in range(6)]
    answers = await engine.generate_all(requests)
    assert [len(answer.token_ids) for answer in answers] == [3] * 6
    again = await engine.generate_all(requests)
    assert again == answers or not is_deterministic(capabilities)


async def test_requests_that_run_together_repeat_to_the_bit(
    engine: RolloutEngine, model: PreTrainedModel, capabilities: RolloutCapabilities
) -> None:
    await sync(engine, model, 0)
    requests = [(PROMPT[: 1 + k % 4], SamplingParams(max_tokens=3 + k % 7, seed=k)) for k in range(24)]
    first = await engine.generate_all(requests)
    await asyncio.gather(*(engine.generate(PROMPT, SamplingParams(max_tokens=8)) for _ in range(5)))  # history
    again = await engine.generate_all(requests)
    assert again == first or not is_deterministic(capabilities)
    assert [len(answer.token_ids) for answer in first] == [3 + k % 7 for k in range(24)]


async def test_greedy_answers_repeat(engine: RolloutEngine, model: PreTrainedModel) -> None:
    await sync(engine, model, 0)
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
        await sync(engine, model, version)
        assert (torch.tensor(await engine.compute_logprobs([PROMPT]))[0] - expected(model, PROMPT)).abs().max() < 1e-4
        answer = await engine.generate(PROMPT, SamplingParams(max_tokens=8))
        own = expected(model, PROMPT + answer.token_ids)[len(PROMPT) - 1 :]
        assert (torch.tensor(answer.logprobs) - own).abs().max() < 1e-4


class PackedModel:
    """The source of a weight sync, packed as by a train worker: a bucket while the engine loads the one before it."""

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        self._packer = WeightPacker(model.named_parameters, max_bytes=max_bytes, is_one_machine=True)
        self.buckets: list[str] = []  # the names of the weights in each

    async def pack_weights(self) -> AsyncGenerator[Any, None]:
        self._packer.start()
        bucket: Any = self._packer.pack_next()
        while bucket is not None:
            following = self._packer.pack_next()  # before the engine has loaded this one
            self.buckets.append(" ".join(slot.name for slot in bucket.slots))
            yield bucket
            bucket = following
        self._packer.finish()


async def test_a_layer_that_is_split_over_buckets_is_loaded_whole(
    engine: RolloutEngine, model: PreTrainedModel
) -> None:
    """vLLM reads the buckets of a layer when the last of them has arrived: none may have been written to again."""
    if isinstance(engine, FakeRolloutEngine):
        pytest.skip("the fake has no model")
    for version in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        source: Any = PackedModel(model, max_bytes=8_192)
        assert await HostTransport().send(source, [engine], version) == [None]
        assert sum(bool(re.search(r"layers\.0\.self_attn\.[qkv]_proj", names)) for names in source.buckets) > 2
        assert (torch.tensor(await engine.compute_logprobs([PROMPT]))[0] - expected(model, PROMPT)).abs().max() < 1e-4


async def test_new_weights_wake_an_engine_that_sleeps(
    engine: RolloutEngine, model: PreTrainedModel, capabilities: RolloutCapabilities
) -> None:
    await sync(engine, model, 0)
    params = SamplingParams(max_tokens=8, seed=1, temperature=1.0 if is_deterministic(capabilities) else 0.0)
    before = await engine.generate(PROMPT, params)
    for version in (1, 2):
        await engine.sleep()
        assert await engine.version() == version - 1  # it responds while it sleeps
        await sync(engine, model, version)
        after = await engine.generate(PROMPT, params)
        assert after.token_ids == before.token_ids
        np.testing.assert_allclose(
            after.logprobs, before.logprobs, rtol=0, atol=0 if is_deterministic(capabilities) else 1e-5
        )
        assert after.versions.tolist() == [version] * 8


@pytest.mark.parametrize("sleeps", [False, True])
async def test_running_requests_go_on_with_new_weights_after_the_probe(
    engine: RolloutEngine,
    model: PreTrainedModel,
    capabilities: RolloutCapabilities,
    sleeps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not capabilities.continues_requests:
        pytest.skip("the engine does not continue requests")
    steps = record_steps(engine, monkeypatch) if isinstance(engine, VllmEngine) else []
    start = copy.deepcopy(model.state_dict())
    await sync(engine, model, 0)
    models, responses = [copy.deepcopy(model)], list[Completion]()
    while not any(len(set(response.versions.tolist())) > 1 for response in responses):
        running = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=56))) for _ in range(24)]
        while not all(task.done() for task in running):  # 16 run at a time: the engine is full
            if sleeps:
                await engine.sleep()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            await sync(engine, model, len(models))
            models.append(copy.deepcopy(model))
            steps.clear()
            probed = torch.tensor(await engine.compute_logprobs([PROMPT]))[0]
            assert (probed - expected(model, PROMPT)).abs().max() < 1e-4
            if isinstance(engine, VllmEngine):
                assert "probe" in steps[0], "a request ran before the probe"
        responses += [await task for task in running]
    assert not any(response.preemptions for response in responses), "there was memory for all"
    for response in responses:
        versions = torch.from_numpy(response.versions)
        assert versions.tolist() == sorted(versions.tolist())
        for version in set(versions.tolist()):
            own = expected(models[version], PROMPT + response.token_ids)[len(PROMPT) - 1 :]
            gaps = (torch.tensor(response.logprobs) - own)[versions == version].abs()
            assert gaps.max() < 1e-4  # with a cache of older weights it would be far off
    model.load_state_dict(start)


def record_steps(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return what each of vLLM's steps answers, in their order, however late this process reads it."""
    steps: list[list[str]] = []
    process = engine._llm.output_processor.process_outputs

    def record(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        steps.append(["request" if each.new_prompt_logprobs_tensors is None else "probe" for each in outputs])
        return process(outputs, *args, **kwargs)

    monkeypatch.setattr(engine._llm.output_processor, "process_outputs", record)
    return steps


async def test_the_probe_does_not_wait_for_requests_that_wait_for_the_engine(
    engine: RolloutEngine, model: PreTrainedModel
) -> None:
    if not isinstance(engine, HfEngine):
        pytest.skip("the fake has no queue, vLLM's is tested above, and another process goes on meanwhile")
    await sync(engine, model, 0)
    waiting = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=24))) for _ in range(64)]
    await sync(engine, model, 1)
    await engine.compute_logprobs([PROMPT])
    assert sum(task.done() for task in waiting) <= 2
    await asyncio.gather(*waiting)


async def test_log_probs_are_of_the_distribution_drawn_from(engine: RolloutEngine, model: PreTrainedModel) -> None:
    if isinstance(engine, FakeRolloutEngine):
        pytest.skip("the fake has no model")
    await sync(engine, model, 0)
    answer = await engine.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.5))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1] / 0.5
    assert answer.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[answer.token_ids[0]]), abs=1e-4)


async def test_log_probs_belong_to_the_distribution_that_the_engine_declares(
    engine: RolloutEngine, model: PreTrainedModel, capabilities: RolloutCapabilities
) -> None:
    if isinstance(engine, FakeRolloutEngine):
        pytest.skip("the fake has no model")
    await sync(engine, model, 0)
    answer = await engine.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.7, top_p=0.8, top_k=5))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1] / 0.7
    full = logits.log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    is_renormalized = bool((torch.tensor(answer.logprobs) - full).max() > 1e-3)
    assert is_renormalized == capabilities.has_truncated_logprobs


async def test_an_update_that_was_not_finished_is_dropped(engine: RolloutEngine, model: PreTrainedModel) -> None:
    if isinstance(engine, FakeRolloutEngine):
        pytest.skip("the fake has no model")
    await sync(engine, model, 0)
    await engine.start_weight_update()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    await engine.load_bucket(next(pack(zeros.items(), max_bytes=20_000)))
    await sync(engine, model, 1)
    assert (torch.tensor(await engine.compute_logprobs([PROMPT]))[0] - expected(model, PROMPT)).abs().max() < 1e-4


async def test_the_mask_is_what_sampling_kept_and_log_probs_are_over_it(
    engine: RolloutEngine, model: PreTrainedModel, capabilities: RolloutCapabilities
) -> None:
    if not capabilities.returns_sampling_mask:
        pytest.skip("the engine returns no mask")
    await sync(engine, model, 0)
    widths = set()
    for sampling in (
        SamplingParams(max_tokens=24, temperature=0.7, top_p=0.8, top_k=12, seed=1, keep_sampling_mask=True),
        SamplingParams(max_tokens=4, top_k=200, seed=1, keep_sampling_mask=True),  # more than there are
    ):
        answer, plain, greedy = await asyncio.gather(
            *(
                engine.generate(PROMPT, replace(sampling, **changes))
                for changes in ({}, {"keep_sampling_mask": False}, {"keep_sampling_mask": False, "temperature": 0.0})
            )
        )
        assert (plain.token_ids, plain.kept_ids, greedy.kept_ids) == (answer.token_ids, None, None)
        np.testing.assert_allclose(plain.logprobs, answer.logprobs, atol=1e-5)
        assert answer.kept_ids is not None
        assert answer.kept_ids.dtype == np.int32
        assert answer.kept_ids[:, 0].tolist() == answer.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        kept = torch.from_numpy(answer.kept_ids).long()
        unit = torch.eye(VOCABULARY)  # hidden states that are the logits
        own, _ = token_logprobs(LastLayer(logits, unit, kept=kept), kept[:, 0], temperature=sampling.temperature)
        np.testing.assert_allclose(answer.logprobs, own, atol=1e-4)
        for row, ids in zip(logits / sampling.temperature, kept, strict=True):
            likely = row.topk(min(sampling.top_k, VOCABULARY))
            beyond = likely.values.softmax(-1).cumsum(-1) - likely.values.softmax(-1) >= sampling.top_p
            assert set(ids.tolist()) == set(likely.indices[~beyond].tolist())
            widths.add(len(set(ids.tolist())))
    assert len(widths) > 3
    assert max(widths) == VOCABULARY


ADAPTER = AdapterSettings(rank=4, alpha=8, targets="all-linear", max_rank=8)
ADAPTED: dict[str, Callable[[Path], Any]] = {
    "fake": lambda path: FakeRolloutEngine(VOCABULARY),
    "vllm": lambda path: VllmEngine(
        VllmSettings(str(path), dtype="float32", load_format="auto", max_model_len=64, max_num_seqs=16, adapter=ADAPTER)
    ),
}


@pytest.fixture(scope="module", params=rotate_rest(2, ["untied", "tied"]))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """The model of the adapters."""
    return make_model(request.param, tmp_path_factory.mktemp("base"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(ADAPTED))
async def adapted(request: pytest.FixtureRequest, base: PreTrainedModel) -> AsyncIterator[RolloutEngine]:
    """An engine that holds the model and gets adapters."""
    if request.param == "fake" and base.config.tie_word_embeddings:
        pytest.skip("the fake has no embeddings to tie; it runs once")
    made = ADAPTED[request.param](Path(base.name_or_path))
    await made.start()
    yield made
    await made.close()


@pytest.fixture(scope="module")
def peft_model(base: PreTrainedModel) -> PeftModel:
    fresh = AutoModelForCausalLM.from_pretrained(base.name_or_path, dtype=torch.float32)
    return get_peft_model(fresh, LoraConfig(r=ADAPTER.rank, lora_alpha=ADAPTER.alpha, target_modules="all-linear"))


async def sync_adapter(engine: RolloutEngine, peft_model: PeftModel, version: int, seed: int) -> None:
    """An adapter of its own for every seed."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    tensors = {name.replace(".default", ""): p for name, p in peft_model.named_parameters() if ".lora_" in name}
    await load_weights(engine, list(pack(tensors.items(), max_bytes=20_000)), version)


async def test_an_adapter_is_a_version_and_its_log_probs_are_pefts(
    adapted: RolloutEngine, peft_model: PeftModel
) -> None:
    for version in (0, 1, 5):
        await sync_adapter(adapted, peft_model, version, seed=version)
        assert await adapted.version() == version
        answers = [
            await adapted.generate(PROMPT, SamplingParams(max_tokens=8, seed=k)) for k in range(2)
        ]  # one from caches
        assert all(answer.versions.tolist() == [version] * 8 for answer in answers)
        if isinstance(adapted, FakeRolloutEngine):
            continue
        assert (
            torch.tensor(await adapted.compute_logprobs([PROMPT]))[0] - expected(peft_model, PROMPT)
        ).abs().max() < 1e-4
        for answer in answers:
            own = expected(peft_model, PROMPT + answer.token_ids)[len(PROMPT) - 1 :]
            assert (torch.tensor(answer.logprobs) - own).abs().max() < 1e-4


async def test_requests_with_an_adapter_that_run_together_repeat_to_the_bit(
    adapted: RolloutEngine, peft_model: PeftModel
) -> None:
    requests = [(PROMPT[: 1 + k % 4], SamplingParams(max_tokens=3 + k % 7, seed=k)) for k in range(24)]
    await sync_adapter(adapted, peft_model, 0, seed=0)
    first = await adapted.generate_all(requests)
    await sync_adapter(adapted, peft_model, 1, seed=1)
    other = await adapted.generate_all(requests)
    await sync_adapter(adapted, peft_model, 0, seed=0)
    assert await adapted.generate_all(requests) == first
    if not isinstance(adapted, FakeRolloutEngine):
        assert [answer.token_ids for answer in other] != [answer.token_ids for answer in first]


async def test_an_answer_on_its_way_goes_on_with_the_new_adapter_and_says_from_where(
    adapted: RolloutEngine, peft_model: PeftModel
) -> None:
    if isinstance(adapted, FakeRolloutEngine):
        pytest.skip("the fake's answers are of one version")
    await sync_adapter(adapted, peft_model, 0, seed=0)
    long = SamplingParams(max_tokens=56)
    answering = [asyncio.create_task(adapted.generate(PROMPT, long)) for _ in range(16)]
    await asyncio.sleep(0.05)
    await sync_adapter(adapted, peft_model, 1, seed=1)
    await adapted.compute_logprobs([PROMPT])  # now they go on
    for answer in await asyncio.gather(*answering):
        versions = answer.versions.tolist()
        assert versions == sorted(versions)
        assert versions[-1] in (0, 1)
        last = versions.index(1) if 1 in versions else None
        if last is not None:
            own = expected(peft_model, PROMPT + answer.token_ids)[len(PROMPT) - 1 :]
            gaps = (torch.tensor(answer.logprobs) - own)[last:].abs()
            assert gaps.max() < 1e-4  # with old caches it would be far off


async def test_weights_for_an_engine_that_only_loads_adapters_are_refused(
    adapted: RolloutEngine, base: PreTrainedModel
) -> None:
    if isinstance(adapted, FakeRolloutEngine):
        pytest.skip("the fake takes anything")
    with pytest.raises(WeightSyncError, match="only loads adapters"):
        await sync(adapted, base, 1)
