"""Log-probs of vLLM become arrays at once: the same numbers as from an object per token, and nothing is mixed up."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import (
    FlatLogprobs,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)

from verl.errors import EngineError
from verl.rollout.vllm.engine import VllmEngine, _completion, _sampling, read_logprobs
from verl.rollout.vllm.settings import VllmSettings
from verl.types import Completion, SamplingParams

pytestmark = pytest.mark.unit

TOKENS = [5, 3, 5, 9]
LOGPROBS: list[float] = np.array([-0.1, -2.5, -1e-7, -11.125], np.float32).tolist()  # as vLLM's sampler returns them


def fill(container: Any, others: int = 0) -> Any:
    """Append TOKENS as vLLM does for a request of no others, if `others` are computed for another request."""
    for token, logprob in zip(TOKENS, LOGPROBS, strict=True):
        ids, values = [token, *range(20, 20 + others)], [logprob, *[-9.0] * others]
        append_logprobs_for_next_position(container, ids, values, itertools.repeat(None), 1, 0)
    return container


def output(logprobs: Any, spans: list[tuple[int, int, str]] | None = None, tokens: list[int] = TOKENS) -> Any:
    versions = [
        SimpleNamespace(start=start, end=end, version=version) for start, end, version in spans or [(0, 4, "7")]
    ]
    first = SimpleNamespace(
        token_ids=tokens, logprobs=logprobs, weight_versions=versions, finish_reason="stop", routed_experts=None
    )
    return SimpleNamespace(outputs=[first])


@pytest.mark.parametrize("others", [0, 2])
def test_flat_log_probs_equal_those_in_objects(others: int) -> None:
    objects = fill(create_sample_logprobs(flat_logprobs=False), others)
    expected = [entry[token].logprob for token, entry in zip(TOKENS, objects, strict=True)]
    flat = read_logprobs(fill(create_sample_logprobs(flat_logprobs=True), others), TOKENS)
    assert flat.dtype == np.float32
    assert flat.tolist() == expected == LOGPROBS


def test_a_response_has_arrays_of_its_log_probs_and_versions() -> None:
    flat = fill(create_sample_logprobs(flat_logprobs=True))
    completion = _completion(output(flat, [(0, 1, "7"), (1, 4, "8")]))
    assert completion.token_ids == TOKENS
    assert completion.logprobs.tolist() == LOGPROBS
    assert completion.versions.tolist() == [7, 8, 8, 8]
    assert completion.versions.dtype == np.int32
    assert pickle.loads(pickle.dumps(completion)) == completion
    other = _completion(output(flat, [(0, 2, "7"), (2, 4, "8")]))
    assert other != completion
    assert completion != "something else"


def test_responses_are_equal_if_their_arrays_are() -> None:
    one, same = (Completion([1], np.zeros(1, np.float32), np.zeros(1, np.int32), "stop") for _ in range(2))
    assert one == same
    assert one != Completion([1], np.ones(1, np.float32), np.zeros(1, np.int32), "stop")
    experts = Completion([1], one.logprobs, one.versions, "stop", np.zeros((1, 2, 2), np.uint8))
    assert experts != one


def test_incomplete_results_are_refused() -> None:
    flat = fill(create_sample_logprobs(flat_logprobs=True))
    with pytest.raises(EngineError, match="log-probs of 4 tokens instead of the 3"):
        _completion(output(flat, [(0, 3, "7")], tokens=TOKENS[:3]))
    with pytest.raises(EngineError, match="log-probs of 4 tokens instead of the 4"):
        _completion(output(flat, tokens=[5, 3, 9, 5]))
    with pytest.raises(EngineError, match="weight versions for 3 of 4 tokens"):
        _completion(output(flat, [(0, 3, "7")]))
    with pytest.raises(EngineError, match="log-probs of 4 tokens instead of the 5"):
        read_logprobs(fill(create_prompt_logprobs(flat_logprobs=True)), [1, *TOKENS])  # the first has none


def test_an_empty_response_is_empty() -> None:
    completion = _completion(output(FlatLogprobs(), [(0, 0, "7")], tokens=[]))
    assert completion == Completion([], np.zeros(0, np.float32), np.zeros(0, np.int32), "stop")


def test_the_probe_reads_the_log_probs_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []

    async def add(self: VllmEngine, token_ids: list[int], params: Any, priority: int) -> Any:
        requested.append(params)
        return None

    async def result(self: VllmEngine, queue: Any) -> Any:
        return SimpleNamespace(prompt_logprobs=fill(create_prompt_logprobs(flat_logprobs=True)))

    monkeypatch.setattr(VllmEngine, "_add", add)
    monkeypatch.setattr(VllmEngine, "_result", result)
    assert asyncio.run(VllmEngine(VllmSettings("model")).compute_logprobs([[1, *TOKENS]])) == [LOGPROBS]
    assert requested[0].flat_logprobs


def test_responses_are_requested_with_flat_log_probs() -> None:
    params = _sampling(SamplingParams(max_tokens=3))
    assert (params.flat_logprobs, params.logprobs) == (True, 0)
