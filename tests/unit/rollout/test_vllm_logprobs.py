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
from verl.rollout.vllm.engine import VllmEngine, _completion, _sampling, read_kept, read_logprobs
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
    return SimpleNamespace(outputs=[first], metrics=SimpleNamespace(num_preemptions=2))


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
    assert completion.preemptions == 2
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
    assert _sampling(SamplingParams(max_tokens=3, top_k=7, keep_sampling_mask=True)).logprobs == 7


def fill_kept(rows: list[list[tuple[int, float]]]) -> Any:
    """Return the log-probs of a request as vLLM does: the token that was drawn, then the most likely ones."""
    flat = create_sample_logprobs(flat_logprobs=True)
    for row in rows:
        ids, probs = zip(*row, strict=True)
        logprobs = [float(np.log(prob)) if prob else -np.inf for prob in probs]
        append_logprobs_for_next_position(flat, list(ids), logprobs, itertools.repeat(None), 1, len(row) - 1)
    return flat


KEPT = [
    [(5, 0.25), (9, 0.75), (5, 0.25), (7, 0.0)],  # top_p has dropped the third
    [(3, 0.2), (8, 0.4), (2, 0.2), (1, 0.2)],  # drawn from beyond top_k, since it is as likely as the last
    [(4, 0.4), (4, 0.4), (6, 0.3), (8, 0.1)],  # the others beyond top_k are not returned
]


def test_kept_ids_are_the_drawn_token_and_the_likely_ones_and_log_probs_are_normalized_over_them() -> None:
    tokens = [row[0][0] for row in KEPT]
    completion = _completion(output(fill_kept(KEPT), [(0, 3, "7")], tokens=tokens), keep_sampling_mask=True)
    assert completion.kept_ids is not None
    assert completion.kept_ids.dtype == np.int32
    assert completion.kept_ids.tolist() == [[5, 9, 5, 5], [3, 8, 2, 1], [4, 4, 6, 8]]
    np.testing.assert_allclose(np.exp(completion.logprobs), [0.25, 0.2, 0.5], rtol=1e-6)
    assert completion.logprobs.dtype == np.float32
    assert pickle.loads(pickle.dumps(completion)) == completion
    assert _completion(output(FlatLogprobs(), [(0, 0, "7")], tokens=[]), keep_sampling_mask=True).kept_ids is None


def test_log_probs_without_those_of_kept_tokens_are_refused() -> None:
    with pytest.raises(EngineError, match="4 log-probs, not as many for each of 4 tokens"):
        read_kept(fill(create_sample_logprobs(flat_logprobs=True)), TOKENS)
    with pytest.raises(EngineError, match="12 log-probs, not as many for each of 2 tokens"):
        read_kept(fill_kept(KEPT), [5, 3])
