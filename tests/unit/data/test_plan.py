"""A plan uses every sample once, keeps groups whole, and gives all ranks the same collectives to run."""

import pickle
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.batch_sizes import BatchSizes
from verl.data.micro_batches import MicroBatchLimit
from verl.data.plan import Plan, Planner
from verl.types import SampleHandle

pytestmark = pytest.mark.unit
law = settings(max_examples=40, deadline=None)


def handle(ref: Any, group: int, tokens: int = 10, **fields: Any) -> SampleHandle:
    return SampleHandle(ref, group, tokens, **{"generated": tokens // 2, "score": 0.0, "version": 0, **fields})


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[SampleHandle], dict[str, Any]]:
    """Some samples, arrived in any order, and a planner's settings."""
    groups = draw(st.lists(st.integers(0, 12), min_size=1, max_size=40))
    handles = [handle(f"sample-{i}", group, draw(st.integers(1, 60))) for i, group in enumerate(groups)]
    limit = draw(st.sampled_from(["samples", "tokens"]))
    sizes = {
        "ranks": draw(st.integers(1, 5)),
        "mini_batch": draw(st.integers(1, 8)),
        "micro_batch_samples": draw(st.integers(1, 5)) if limit == "samples" else None,
        "micro_batch_tokens": draw(st.integers(1, 90)) if limit == "tokens" else None,
        "forward_micro_batch_tokens": draw(st.none() | st.integers(1, 200)),
        "epochs": draw(st.integers(1, 3)),
        "shuffle_seed": draw(st.none() | st.integers(0, 9)),
    }
    return handles, sizes


def make_planner(sizes: dict[str, Any], critic: BatchSizes | None = None) -> Planner:
    names = ("mini_batch", "micro_batch_samples", "micro_batch_tokens", "epochs")
    policy = BatchSizes(**{name: sizes[name] for name in names if name in sizes})
    tokens = sizes.get("forward_micro_batch_tokens")
    forward = None if tokens is None else MicroBatchLimit(None, tokens)
    return Planner(sizes["ranks"], policy, forward=forward, shuffle_seed=sizes.get("shuffle_seed"), critic=critic)


def updates_as_refs(plan: Plan) -> list[list[list[list[str]]]]:
    """[update][rank][micro-batch] -> references."""
    by_rank = [[[[own.refs[i] for i in micro] for micro in update] for update in own.policy] for own in plan.ranks]
    return [list(update) for update in zip(*by_rank, strict=True)]


@law
@given(steps())
def test_every_sample_is_held_by_one_rank_with_its_group_and_score(step: Any) -> None:
    handles, sizes = step
    plan = make_planner(sizes).plan(handles)
    held = [ref for own in plan.ranks for ref in own.refs]
    assert sorted(held) == sorted(h.ref for h in handles)
    known = {h.ref: h for h in handles}
    for own in plan.ranks:
        assert own.groups.tolist() == [known[ref].group for ref in own.refs]
        assert own.scores.tolist() == [known[ref].score for ref in own.refs]
        assert len(own) == len(own.refs)


@law
@given(steps())
def test_every_epoch_trains_every_sample_once_in_mini_batches_of_whole_groups(step: Any) -> None:
    handles, sizes = step
    planner = make_planner(sizes)
    updates = updates_as_refs(planner.plan(handles))
    group_of = {h.ref: h.group for h in handles}
    minis = [{ref for rank in update for micro in rank for ref in micro} for update in updates]
    used = Counter(ref for update in updates for rank in update for micro in rank for ref in micro)
    assert used == Counter({h.ref: planner.policy.epochs for h in handles})
    prompts = len(set(group_of.values()))
    per_epoch = -(-prompts // planner.policy.mini_batch)
    assert len(minis) == per_epoch * planner.policy.epochs
    for epoch in range(planner.policy.epochs):
        groups = [{group_of[ref] for ref in mini} for mini in minis[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert sum(map(len, groups)) == prompts  # no group in two mini-batches
        assert sorted(map(len, groups), reverse=True)[:-1] == [planner.policy.mini_batch] * (per_epoch - 1)


@law
@given(steps())
def test_all_ranks_run_equally_many_micro_batches(step: Any) -> None:
    handles, sizes = step
    plan = make_planner(sizes).plan(handles)
    assert len({len(own.forward) for own in plan.ranks}) == 1
    assert len({tuple(len(update) for update in own.policy) for own in plan.ranks}) == 1
    for own in plan.ranks:
        assert sorted(i for micro in own.forward for i in micro) == list(range(len(own)))


@law
@given(steps())
def test_no_micro_batch_exceeds_its_limit_but_by_a_lone_longer_sample(step: Any) -> None:
    handles, sizes = step
    plan = make_planner(sizes).plan(handles)
    tokens = {h.ref: h.tokens for h in handles}
    update_tokens = sizes["micro_batch_tokens"] or 10**9
    update_samples = sizes["micro_batch_samples"] or 10**9
    if sizes["forward_micro_batch_tokens"] is None:
        forward_tokens, forward_samples = update_tokens, update_samples
    else:
        forward_tokens, forward_samples = sizes["forward_micro_batch_tokens"], 10**9
    for own in plan.ranks:
        for micro in own.forward:
            assert len(micro) <= forward_samples
            assert len(micro) <= 1 or sum(tokens[own.refs[i]] for i in micro) <= forward_tokens
        for update in own.policy:
            for micro in update:
                assert len(micro) <= update_samples
                assert len(micro) <= 1 or sum(tokens[own.refs[i]] for i in micro) <= update_tokens
                assert [tokens[own.refs[i]] for i in micro] == sorted(tokens[own.refs[i]] for i in micro)


@law
@given(steps())
def test_tokens_are_even_over_ranks_in_every_mini_batch_and_in_all(step: Any) -> None:
    handles, sizes = step
    sizes = {**sizes, "micro_batch_samples": None, "micro_batch_tokens": 100}
    plan = make_planner(sizes).plan(handles)
    tokens = {h.ref: h.tokens for h in handles}
    longest = max(tokens.values())
    for update in updates_as_refs(plan):
        loads = [sum(tokens[ref] for micro in rank for ref in micro) for rank in update]
        assert max(loads) - min(loads) <= longest
    loads = [sum(tokens[ref] for ref in own.refs) for own in plan.ranks]
    assert max(loads) - min(loads) <= longest
    assert (plan.metrics["plan/rank_tokens_min"], plan.metrics["plan/rank_tokens_max"]) == (min(loads), max(loads))


@law
@given(steps(), st.randoms())
def test_the_order_of_arrival_does_not_move_groups_between_mini_batches(step: Any, order: random.Random) -> None:
    handles, sizes = step
    shuffled = order.sample(handles, len(handles))

    def minis(samples: list[SampleHandle]) -> list[set[str]]:
        updates = updates_as_refs(make_planner(sizes).plan(samples))
        return [{ref for rank in update for micro in rank for ref in micro} for update in updates]

    assert minis(handles) == minis(shuffled)


def test_a_limit_of_samples_keeps_counts_even_so_that_no_rank_waits() -> None:
    handles = [handle(i, group=i, tokens=1000 if i < 2 else 1) for i in range(16)]
    plan = Planner(2, BatchSizes(16, 4, None)).plan(handles)
    assert [len(own) for own in plan.ranks] == [8, 8]
    assert plan.metrics["plan/micro_batches"] == 2


def test_micro_batches_that_run_together_weigh_alike() -> None:
    generator = np.random.default_rng(0)
    handles = [handle(i, group=i // 4, tokens=int(n)) for i, n in enumerate(generator.integers(1, 500, 64))]
    plan = Planner(2, BatchSizes(16, None, 1000)).plan(handles)
    first, second = ([sum(handles[own.refs[i]].tokens for i in micro) for micro in own.forward] for own in plan.ranks)
    assert first == sorted(first, reverse=True)
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) < 100


def test_more_ranks_than_samples_leave_ranks_with_empty_micro_batches() -> None:
    plan = Planner(3, BatchSizes(4, None, 100)).plan([handle("a", 0), handle("b", 0)])
    assert [own.refs for own in plan.ranks] == [["b"], ["a"], []]
    assert [own.forward for own in plan.ranks] == [[[0]], [[0]], [[]]]


def test_with_a_seed_epochs_take_the_mini_batches_in_new_orders() -> None:
    handles = [handle(i, group=i) for i in range(32)]
    planner = Planner(1, BatchSizes(2, 2, None, epochs=2), shuffle_seed=3)
    updates = [
        frozenset(ref for micro in update[0] for ref in micro) for update in updates_as_refs(planner.plan(handles))
    ]
    assert set(updates[:16]) == set(updates[16:])
    assert updates[:16] != updates[16:]
    assert set(updates[:16]) != {frozenset({i, i + 1}) for i in range(0, 32, 2)}
    assert planner.plan(handles).ranks[0].policy == planner.plan(handles).ranks[0].policy


def test_metrics_describe_the_responses() -> None:
    handles = [
        handle("a", 0, 10, generated=4, score=1.0),
        handle("b", 0, 20, generated=8, score=1.0, finish_reason="length"),
        handle("c", 1, 30, generated=6, score=0.0, repetition=0.9, preemptions=2),
        handle("d", 1, 40, generated=6, score=1.0, repetition=0.5),
        handle("e", 2, 20, generated=1, score=-1.0),
    ]
    plan = Planner(2, BatchSizes(8, None, 80)).plan(handles)
    assert plan.metrics == {
        "plan/samples": 5,
        "plan/tokens": 120,
        "plan/groups": 3,
        "plan/generated_tokens": 25,
        "plan/updates": 1,
        "plan/micro_batches": 1,
        "plan/rank_tokens_min": 60,
        "plan/rank_tokens_max": 60,
        "plan/imbalance": 1.0,
        "plan/packing_efficiency": 0.75,
        "reward/mean": pytest.approx(0.4),
        "reward/std": pytest.approx(np.std([1, 1, 0, 1, -1])),
        "reward/min": -1.0,
        "reward/max": 1.0,
        "reward/groups_without_signal": 0.5,  # of the two groups that have several samples
        "response_length/mean": 5.0,
        "response_length/min": 1.0,
        "response_length/max": 8.0,
        "response_length/clip_ratio": 0.2,
        "response/empty_ratio": 0.2,
        "response/repetitive_ratio": 0.2,
        "perf/preemptions_per_response": 0.4,
    }
    assert plan.warnings == []


def test_the_reference_has_its_own_micro_batches_if_they_are_given() -> None:
    handles = [handle(i, group=i, tokens=10) for i in range(8)]
    sizes, forward = BatchSizes(8, 8, None), MicroBatchLimit(4, None)
    own = Planner(1, sizes, forward=forward, reference=MicroBatchLimit(2, None)).plan(handles).ranks[0]
    assert (len(own.forward), len(own.reference)) == (2, 4)
    assert sorted(i for micro_batch in own.reference for i in micro_batch) == list(range(8))
    same = Planner(1, sizes, forward=forward).plan(handles).ranks[0]
    assert len(same.reference) == len(same.forward) == 2


def test_samples_longer_than_the_budget_are_named() -> None:
    handles = [handle(i, group=i, tokens=n) for i, n in enumerate([50, 150, 2000])]
    [warning] = Planner(1, BatchSizes(4, None, 100)).plan(handles).warnings
    assert warning.startswith("2 of 3 samples exceed the budget of 100 tokens per micro-batch and run alone; ")
    assert "prompt 2 with 2,000 tokens" in warning


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"mini_batch": 0}, "mini_batch is 0"),
        ({"micro_batch_tokens": None}, "give exactly one"),
        ({"micro_batch_samples": 4}, "give exactly one"),
        ({"micro_batch_tokens": 0}, "at least 1"),
    ],
)
def test_impossible_sizes_are_refused(wrong: dict[str, Any], said: str) -> None:
    sizes = {"ranks": 1, "mini_batch": 1, "micro_batch_samples": None, "micro_batch_tokens": 9, **wrong}
    with pytest.raises(ValueError, match=said):
        make_planner(sizes)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Planner(1, BatchSizes(1, 1, None)).plan([])


@pytest.mark.parametrize("ranks", [2, 1024])
def test_sixteen_thousand_samples_are_planned_in_few_bytes(ranks: int) -> None:
    lengths = np.random.default_rng(0).lognormal(8, 1, 16_384).clip(16, 32_768).astype(int).tolist()
    handles = [handle(b"r" * 28, group=i // 16, tokens=n) for i, n in enumerate(lengths)]
    planner = Planner(ranks, BatchSizes(256, None, 40_000))
    plan = planner.plan(handles)
    assert sum(len(pickle.dumps(own)) for own in plan.ranks) / len(handles) < 200


@st.composite
def critics(draw: st.DrawFn) -> BatchSizes:
    limit = draw(st.sampled_from(["samples", "tokens"]))
    return BatchSizes(
        mini_batch=draw(st.integers(1, 8)),
        micro_batch_samples=draw(st.integers(1, 5)) if limit == "samples" else None,
        micro_batch_tokens=draw(st.integers(1, 90)) if limit == "tokens" else None,
        epochs=draw(st.integers(1, 3)),
    )


@law
@given(steps(), critics())
def test_a_critic_trains_every_sample_once_an_epoch_in_whole_groups_within_its_own_limits(
    step: Any, critic: BatchSizes
) -> None:
    handles, sizes = step
    plan = make_planner(sizes, critic=critic).plan(handles)
    known = {h.ref: h for h in handles}
    prompts = len({h.group for h in handles})
    per_epoch = -(-prompts // critic.mini_batch)
    assert len({tuple(len(update) for update in own.critic) for own in plan.ranks}) == 1  # the same collectives
    minis: list[list[SampleHandle]] = [[] for _ in range(per_epoch * critic.epochs)]
    for own in plan.ranks:
        for mini, update in zip(minis, own.critic, strict=True):
            for micro in update:
                found = [known[own.refs[i]] for i in micro]
                mini += found
                assert len(found) <= (critic.micro_batch_samples or len(handles))
                assert len(found) <= 1 or sum(h.tokens for h in found) <= (critic.micro_batch_tokens or 10**9)
    for epoch in range(critic.epochs):
        own_minis = minis[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert Counter(h.ref for mini in own_minis for h in mini) == Counter(known.keys())
        groups = [{h.group for h in mini} for mini in own_minis]
        assert sum(map(len, groups)) == prompts  # no group in two mini-batches
        assert max(map(len, groups)) <= critic.mini_batch


@law
@given(steps(), critics())
def test_a_critic_changes_nothing_for_the_policy(step: Any, critic: BatchSizes) -> None:
    handles, sizes = step
    alone, beside = make_planner(sizes).plan(handles), make_planner(sizes, critic=critic).plan(handles)
    assert all(own.critic is None for own in alone.ranks)
    assert updates_as_refs(alone) == updates_as_refs(beside)
    assert [own.forward for own in alone.ranks] == [own.forward for own in beside.ranks]
    assert alone.metrics == beside.metrics


@law
@given(steps())
def test_a_critic_of_the_same_sizes_has_the_mini_batches_of_the_policy(step: Any) -> None:
    handles, sizes = step
    limits = sizes["micro_batch_samples"], sizes["micro_batch_tokens"]
    plan = make_planner(sizes, critic=BatchSizes(sizes["mini_batch"], *limits)).plan(handles)
    for own in plan.ranks:
        for of_policy, of_critic in zip(list(own.policy)[: len(own.critic)], own.critic, strict=True):
            assert sorted(np.concatenate(of_policy)) == sorted(np.concatenate(of_critic))


@law
@given(steps())
def test_numbers_and_baselines_go_with_their_samples(step: Any) -> None:
    handles, sizes = step
    handles = [replace(h, index=place, baseline=place / 2) for place, h in enumerate(handles)]
    for own in make_planner(sizes).plan(handles).ranks:
        places = [int(ref.removeprefix("sample-")) for ref in own.refs]
        assert own.indices.tolist() == places
        assert own.baselines.tolist() == [place / 2 for place in places]


def test_without_a_greedy_response_to_every_prompt_there_are_no_baselines() -> None:
    handles = [handle("a", 0, baseline=1.0), handle("b", 1, baseline=None)]
    own = Planner(1, BatchSizes(1, 8, None)).plan(handles).ranks[0]
    assert own.baselines is None
    assert own.without_refs().refs == []


def test_what_else_the_reward_function_returned_is_averaged_over_the_samples_that_have_it() -> None:
    extras = [{"format": 1.0}, {"format": 0.0, "length": 3.0}, {}]
    handles = [
        SampleHandle(ref=None, group=0, tokens=4, generated=2, score=0.0, version=0, metrics=extra) for extra in extras
    ]
    metrics = Planner(1, BatchSizes(1, 8, None)).plan(handles).metrics
    assert metrics["reward/extra/format"] == 0.5
    assert metrics["reward/extra/length"] == 3.0


def test_every_rank_gets_the_named_components_of_its_samples() -> None:
    handles = [
        handle(index, index // 2, score=index + 0.5, metrics={"format": float(index), "other": 7.0})
        for index in range(4)
    ]
    planner = Planner(6, BatchSizes(9, 9, None), components=["format", "score"])
    for rank in planner.plan(handles).ranks:
        assert list(rank.components) == ["format", "score"], "also on ranks without samples"
        assert rank.components["format"].tolist() == rank.refs
        assert rank.components["score"].tolist() == rank.scores.tolist()


def test_the_longer_prompt_of_a_teacher_counts_for_the_tokens_of_a_micro_batch() -> None:
    handles = [handle(k, k, 10, teacher_tokens=teacher) for k, teacher in enumerate((30, 30, 0, 5))]
    plan = make_planner({"ranks": 1, "mini_batch": 4, "micro_batch_samples": None, "micro_batch_tokens": 40})
    result = plan.plan(handles)
    [update] = updates_as_refs(result)
    assert sorted(sorted(micro_batch) for micro_batch in update[0]) == [[0, 2], [1, 3]]  # type: ignore[list-item]
    assert result.metrics["plan/tokens"] == 40, "the policy's tokens"
