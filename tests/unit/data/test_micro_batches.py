"""Samples that share their prompt run together, within the same limits and as evenly as single ones."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.batch_sizes import BatchSizes
from verl.data.flat_batch import FlatBatch
from verl.data.micro_batches import MicroBatchLimit, SampleSize, balance_samples, count_computed, split_samples
from verl.data.plan import Planner
from verl.training.fsdp.shared_prompts import find_shared_prompts
from verl.types import Sample
from verl.workers.episodes import make_handle

pytestmark = pytest.mark.unit
law = settings(max_examples=60, deadline=None)

limits = st.builds(lambda n: MicroBatchLimit(n, None), st.integers(1, 9)) | st.builds(
    lambda n: MicroBatchLimit(None, n), st.integers(1, 200)
)


@st.composite
def grouped(draw: st.DrawFn) -> list[SampleSize]:
    prompts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    members = st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=40)
    return [SampleSize(prompts[g] + draw(st.integers(0, 30)), prompts[g], g) for g in draw(members)]


@law
@given(grouped(), limits, st.integers(1, 5))
def test_every_sample_is_in_one_micro_batch_of_one_rank_within_the_limit(
    samples: list[SampleSize], limit: MicroBatchLimit, ranks: int
) -> None:
    shares = balance_samples(limit, samples, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(samples)))
    by_rank = [[samples[i] for i in share] for share in shares]
    parts = split_samples(limit, by_rank)
    assert len({len(own) for own in parts}) == 1, "the same collectives on all ranks"
    for of_rank, own in zip(by_rank, parts, strict=True):
        assert sorted(i for part in own for i in part) == list(range(len(of_rank)))
        weights = [count_computed(of_rank[i] for i in part) for part in own]
        assert weights == sorted(weights, reverse=True)
        for part, weight in zip(own, weights, strict=True):
            assert len(part) <= (limit.samples or len(samples))
            assert len(part) <= 1 or weight <= (limit.tokens or 10**9)


@law
@given(grouped(), limits, st.integers(1, 5))
def test_no_rank_has_more_to_compute_than_without_sharing(
    samples: list[SampleSize], limit: MicroBatchLimit, ranks: int
) -> None:
    shares = balance_samples(limit, samples, ranks)
    plain = limit.balance([sample.tokens for sample in samples], ranks)
    slowest = max(count_computed(samples[i] for i in share) for share in shares)
    if limit.samples is None:
        assert slowest <= max(sum(samples[i].tokens for i in share) for share in plain)
    else:
        assert max(map(len, shares)) <= max(map(len, plain)) + limit.samples


def test_whole_groups_stay_together_if_ranks_stay_even() -> None:
    samples = [SampleSize(46 + 18, 46, group) for group in range(4) for _ in range(8)]
    for limit in (MicroBatchLimit(None, 400), MicroBatchLimit(16, None)):
        shares = balance_samples(limit, samples, 2)
        assert [count_computed(samples[i] for i in share) for share in shares] == [2 * 190, 2 * 190]
        parts = split_samples(limit, [[samples[i] for i in share] for share in shares])
        assert [[len(part) for part in own] for own in parts] == [[16], [16]]


def test_a_group_is_divided_if_one_rank_would_wait_for_the_other() -> None:
    samples = [SampleSize(10 + 90, 10, 0) for _ in range(8)]
    shares = balance_samples(MicroBatchLimit(None, 1000), samples, 2)
    assert [len(share) for share in shares] == [4, 4]
    with_long_prompt = [SampleSize(1000 + 1, 1000, group) for group in range(2) for _ in range(4)]
    shares = balance_samples(MicroBatchLimit(None, 3000), with_long_prompt, 2)
    assert [{with_long_prompt[i].group for i in share} for share in shares] in ([{0}, {1}], [{1}, {0}])


def test_a_group_beyond_the_budget_is_cut_and_a_longer_sample_runs_alone() -> None:
    samples = [SampleSize(50 + 20, 50, 0)] * 5 + [SampleSize(300, 50, 1)]
    [parts] = split_samples(MicroBatchLimit(None, 110), [samples])
    assert sorted(map(len, parts)) == [1, 2, 3]
    assert [5] in parts


def make_sample(group: int, prompt: int, response: int, generator: np.random.Generator) -> Sample:
    mask = np.repeat([False, True], [prompt, response])
    tokens = generator.integers(0, 9, prompt + response).astype(np.int32)
    tokens[:prompt] = np.arange(prompt) + 10 * group
    zeros = np.zeros(len(tokens))
    return Sample(group, tokens, mask, zeros.astype(np.float32), zeros.astype(np.int32), 0.0)


@pytest.mark.parametrize("limit", [(None, 60), (5, None)])
def test_the_plan_counts_the_tokens_that_engines_compute(limit: Any) -> None:
    generator = np.random.default_rng(0)
    samples = [make_sample(g, 3 + 7 * g, int(generator.integers(1, 20)), generator) for g in range(4) for _ in range(6)]
    handles = [make_handle(sample, index) for index, sample in enumerate(samples)]
    planner = Planner(2, BatchSizes(3, *limit), shared_prompts=True)
    plan = planner.plan(handles)
    computed = 0
    for own in plan.ranks:
        batch = FlatBatch.from_samples([samples[index] for index in own.refs])
        for micro_batches in own.policy:
            for part in batch.split(micro_batches):
                shared = find_shared_prompts(part)
                tokens = part.num_tokens if shared is None else len(shared.computed)
                computed += tokens
                assert limit[1] is None or len(part) <= 1 or tokens <= limit[1]
    total = sum(len(sample.tokens) for sample in samples)
    assert plan.metrics["plan/tokens"] == total
    assert plan.metrics["plan/computed_tokens"] == computed < total
    assert "plan/computed_tokens" not in Planner(2, BatchSizes(3, *limit)).plan(handles).metrics


def test_the_prompt_of_a_handle_ends_before_the_first_generated_token() -> None:
    generator = np.random.default_rng(0)
    sample = make_sample(0, 5, 4, generator)
    assert make_handle(sample, 0).prompt_tokens == 5
    sample.mask[:] = False
    assert make_handle(sample, 0).prompt_tokens == 9
