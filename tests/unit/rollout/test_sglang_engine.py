"""What SGLang is asked for, in which order, and what is made of its replies; SGLang itself is not installed here."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from verl.errors import EngineError, WeightSyncError
from verl.rollout.sglang.engine import SglangEngine, read_completion
from verl.rollout.sglang.settings import CONTEXT_MARGIN, SglangSettings
from verl.rollout.sglang.weight_loader import load_message, write_bucket
from verl.types import SamplingParams
from verl.weights.bucket import pack, share

pytestmark = pytest.mark.unit

SAMPLING = SamplingParams(max_tokens=2)


class Message(SimpleNamespace):
    """Any request to SGLang."""


class MessageModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return type(name, (Message,), {})


class FakeManager:
    """SGLang's tokenizer manager: holds requests back while it is paused, and records what it sends on."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.rid_to_state: dict[str, Any] = {}
        self.is_pause_cond, self.is_pause = asyncio.Condition(), False
        self.runs = asyncio.Event()
        self.runs.set()
        self.refuses = ""

    async def pause_generation(self, request: Message) -> None:
        self.is_pause = True
        self.runs.clear()
        self.sent.append(f"pause {request.mode}")

    async def continue_generation(self, request: Message) -> None:
        self.sent.append("continue")
        self.runs.set()

    async def generate_request(self, request: Any) -> Any:
        state = self.rid_to_state[request.rid] = SimpleNamespace(dispatched=False)
        async with self.is_pause_cond:
            await self.is_pause_cond.wait_for(lambda: not self.is_pause)
        await asyncio.sleep(0.01)  # other work before it is sent
        state.dispatched = True
        self.sent.append("probe" if request.__dict__.get("priority") else "request")
        await self.runs.wait()
        yield output()

    async def get_internal_state(self) -> list[dict[str, str]]:
        return [{"weight_version": "4"}]

    async def flush_cache(self) -> Message:
        self.sent.append("flush")
        return Message(success=self.refuses != "flush")

    async def update_weight_version(self, request: Message) -> None:
        assert not request.abort_all_requests
        self.sent.append(f"version {request.new_version}")

    async def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        for payload in request.serialized_named_tensors:
            message = json.loads(payload[0][0])
            self.sent.append("seed" if "seed" in message else "bucket")
            if self.refuses == "load":
                for process in ("1", "2"):
                    Path(message["errors"], process).write_text("AssertionError: shape")
        return True, "Success"

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(request: Any) -> tuple[bool, str]:
            tags = " ".join(request.__dict__.get("tags", []))
            self.sent.append(f"{method} {tags}".strip())
            return self.refuses != method, "it is closed"

        return call


def output(**changes: Any) -> dict[str, Any]:
    info = {
        "finish_reason": {"type": "length"},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
        "output_token_logprobs": [(-0.5, 7, None), (-1.5, 8, None)],
        "input_token_logprobs": [(None, 1, None), (-0.25, 2, None)],
        "num_retractions": 1,
    }
    return {"output_ids": [7, 8], "meta_info": info | changes}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for the modules of SGLang; the folder of errors."""
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", MessageModule("io_struct"))
    utils: Any = ModuleType("utils")
    utils.MultiprocessingSerializer = SimpleNamespace(serialize=lambda named: named)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)
    return tmp_path


def make_engine(folder: Path, **settings: Any) -> tuple[SglangEngine, FakeManager]:
    engine: Any = SglangEngine(SglangSettings("model", **settings))
    manager = engine._manager = FakeManager()
    engine._errors = folder
    return engine, manager


def bucket() -> Any:
    return next(pack([("weight", torch.ones(2, 3))], max_bytes=100))


def test_the_probe_reaches_the_scheduler_before_it_continues(folder: Path) -> None:
    async def update() -> list[str]:
        engine, manager = make_engine(folder)
        running = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0.05)
        await engine.start_weight_update()
        waiting = asyncio.create_task(engine.generate([1], SAMPLING))
        await engine.load_bucket(bucket())
        await engine.finish_weight_update(4)
        assert await engine.compute_logprobs([[1, 2]]) == [[-0.25]]
        await asyncio.gather(running, waiting)
        return manager.sent

    sent = asyncio.run(update())
    begin = ["request", "pause retract", "begin_weight_update", "bucket", "seed", "end_weight_update"]
    assert sent[:8] == [*begin, "flush", "version 4"]
    assert sorted(sent[8:10]) == ["probe", "request"]
    assert sent[10:] == ["continue"]


def test_an_engine_wakes_as_far_as_an_update_needs(folder: Path) -> None:
    async def update() -> list[str]:
        engine, manager = make_engine(folder)
        await engine.sleep()
        for _ in range(2):  # the first one is not finished
            await engine.start_weight_update()
        await engine.finish_weight_update(1)
        return [each for each in manager.sent if "memory" in each or "weight_update" in each]

    assert asyncio.run(update()) == [
        "release_memory_occupation weights kv_cache cuda_graph",
        "resume_memory_occupation weights",
        "begin_weight_update",
        "end_weight_update",
        "resume_memory_occupation kv_cache cuda_graph",
    ]


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        ("begin_weight_update", "could not begin a weight update: it is closed"),
        ("load", "cannot load the weights: AssertionError: shape"),
        ("end_weight_update", "could not finish a weight update: it is closed"),
        ("flush", "could not drop the cache of old weights"),
    ],
)
def test_failures_that_sglang_returns_are_raised(folder: Path, refuses: str, words: str) -> None:
    async def update() -> None:
        engine, manager = make_engine(folder)
        manager.refuses = refuses
        await engine.start_weight_update()
        await engine.load_bucket(bucket())
        await engine.finish_weight_update(1)

    with pytest.raises(WeightSyncError, match=words):
        asyncio.run(update())


def test_an_update_after_one_that_two_processes_could_not_load_succeeds(folder: Path) -> None:
    async def update() -> list[str]:
        engine, manager = make_engine(folder)
        await engine.start_weight_update()
        manager.refuses = "load"
        with pytest.raises(WeightSyncError):
            await engine.load_bucket(bucket())
        manager.refuses = ""
        await engine.start_weight_update()
        await engine.load_bucket(bucket())
        await engine.finish_weight_update(1)
        return manager.sent

    assert asyncio.run(update())[-1] == "version 1"


def test_memory_that_is_released_is_not_released_again(folder: Path) -> None:
    async def sleep() -> list[str]:
        engine, manager = make_engine(folder)
        await engine.sleep()
        await engine.sleep()
        await engine.start_weight_update()
        await engine.sleep()
        return [each for each in manager.sent if each.startswith("release")]

    assert asyncio.run(sleep()) == [
        "release_memory_occupation weights kv_cache cuda_graph",
        "release_memory_occupation weights",
    ]


def test_a_canceled_request_before_an_update_does_not_leave_the_engine_paused(folder: Path) -> None:
    async def update() -> list[str]:
        engine, manager = make_engine(folder)
        await engine.start_weight_update()
        await engine.finish_weight_update(1)
        canceled = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0)
        canceled.cancel()
        await asyncio.gather(canceled, return_exceptions=True)
        await engine.generate([1], SAMPLING)
        return manager.sent

    assert asyncio.run(update())[-2:] == ["request", "continue"]


def test_every_token_has_its_version_and_log_prob() -> None:
    completion = read_completion(output(), SAMPLING)
    assert (completion.token_ids, completion.versions.tolist(), completion.finish_reason) == ([7, 8], [3, 4], "length")
    assert completion.logprobs.tolist() == [-0.5, -1.5]


def test_retractions_by_weight_updates_are_not_preemptions() -> None:
    counts = [read_completion(output(num_retractions=count), SAMPLING).preemptions for count in (0, 1, 3)]
    assert counts == [0, 0, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finish_reason": {"type": "abort", "message": "queue"}}, "ended a request with .*abort"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "versions for 1 of 2 tokens"),
        ({"output_token_logprobs": [(-0.5, 7, None)]}, "log-probs of 1 other tokens"),
        ({"output_token_logprobs": [(-0.5, 7, None), (-0.5, 9, None)]}, "log-probs of 2 other tokens"),
    ],
)
def test_replies_that_are_incomplete_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        read_completion(output(**changes), SAMPLING)


def test_a_response_that_sglang_shortened_is_refused() -> None:
    with pytest.raises(EngineError, match=r"after 2 of 3 tokens; increase .*max_model_len"):
        read_completion(output(), SamplingParams(max_tokens=3))


def test_a_bucket_is_loaded_by_its_message(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    loaded: dict[str, torch.Tensor] = {}
    model.load_weights = lambda weights: loaded.update(weights)  # type: ignore[assignment]
    with share(bucket()) as shared:
        message = write_bucket(shared) | {"errors": str(tmp_path)}
        load_message(model, [(json.dumps(message), torch.empty(0))])
        assert loaded["weight"].tolist() == [[1.0] * 3] * 2
    load_message(model, [(json.dumps({"seed": 5, "errors": str(tmp_path)}), torch.empty(0))])
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(5))
    assert list(tmp_path.iterdir()) == []
    load_message(model, [(json.dumps(message), torch.empty(0))])  # the file is gone
    [file] = tmp_path.iterdir()
    assert "RuntimeError" in file.read_text()


def test_arguments_depend_on_the_device() -> None:
    cpu = SglangSettings("model", max_model_len=64, max_num_batched_tokens=100).make_arguments(5000)
    assert (cpu["attention_backend"], cpu["max_total_tokens"], cpu["max_running_requests"]) == (
        "torch_native",
        5000,
        256,
    )
    assert (cpu["context_length"], cpu["chunked_prefill_size"]) == (64 + CONTEXT_MARGIN, 100)
    assert cpu["disable_cuda_graph"]
    gpu = SglangSettings("model", device="cuda", sleeps=True, kwargs={"attention_backend": "fa3"}).make_arguments(None)
    assert (gpu["attention_backend"], gpu["mem_fraction_static"], gpu["enable_memory_saver"]) == ("fa3", 0.5, True)
    assert not {"max_total_tokens", "max_running_requests", "context_length"} & gpu.keys()
    assert not gpu["disable_cuda_graph"]


def test_variables_that_change_numbers_are_forced() -> None:
    for device in ("cpu", "cuda"):
        variables = SglangSettings("model", device=device).make_environment()
        assert variables["SGLANG_RETURN_ORIGINAL_LOGPROB"] == variables["SGLANG_MAX_NEW_TOKENS_LIMIT"] == "0"
