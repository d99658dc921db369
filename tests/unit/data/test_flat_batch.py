"""A FlatBatch carries every per-token field through every cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fake_train_engine import concat
from verl.data.flat_batch import FlatBatch
from verl.types import Sample

pytestmark = pytest.mark.unit
law = settings(max_examples=60, deadline=None)


def sample(length: int, start: int = 0) -> Sample:
    return Sample(
        group=0,
        tokens=np.arange(start, start + length, dtype=np.int32),
        mask=np.arange(length) >= length // 2,
        logprobs=-np.arange(start, start + length, dtype=np.float32),
        versions=np.zeros(length, np.int32),
        score=0.0,
    )


def batch_of(lengths: list[int]) -> FlatBatch:
    starts = np.cumsum([0, *lengths])
    batch = FlatBatch.from_samples([sample(n, int(start)) for n, start in zip(lengths, starts, strict=False)])
    return batch.with_(advantages=torch.rand(batch.num_tokens))


def sequences(batch: FlatBatch, name: str) -> list[list[float]]:
    return [part.tolist() for part in getattr(batch, name).tensor_split(batch.offsets[1:-1])]


FIELDS = ("tokens", "mask", "rollout_logprobs", "advantages")
lengths_of_batches = st.lists(st.integers(1, 6), min_size=1, max_size=8)


def test_samples_are_laid_end_to_end() -> None:
    batch = FlatBatch.from_samples([sample(2), sample(3, start=7)])
    assert batch.tokens.tolist() == [0, 1, 7, 8, 9]
    assert batch.tokens.dtype == torch.int64
    assert batch.offsets.tolist() == [0, 2, 5]
    assert batch.mask.tolist() == [False, True, False, True, True]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs.dtype == torch.float32
    assert (len(batch), batch.num_tokens, batch.lengths.tolist()) == (2, 5, [2, 3])
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.segment_ids.tolist() == [0, 0, 1, 1, 1]


@law
@given(lengths_of_batches, st.data())
def test_select_takes_whole_sequences_in_the_order_asked(lengths: list[int], data: st.DataObject) -> None:
    batch = batch_of(lengths)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=12))
    taken = batch.select(chosen)
    for name in FIELDS:
        before = sequences(batch, name)
        assert sequences(taken, name) == [before[index] for index in chosen]


@law
@given(lengths_of_batches, st.data())
def test_what_is_split_and_joined_again_is_the_same(lengths: list[int], data: st.DataObject) -> None:
    batch = batch_of(lengths)
    cut = data.draw(st.integers(0, len(lengths)))
    indices = list(range(len(lengths)))
    joined = concat(batch.split([indices[:cut], [], indices[cut:]]))
    assert joined.offsets.tolist() == batch.offsets.tolist()
    for name in FIELDS:
        assert torch.equal(getattr(joined, name), getattr(batch, name))
    assert joined.old_logprobs is None


def test_an_empty_selection_keeps_its_fields() -> None:
    nothing = batch_of([2, 3]).select([])
    assert len(nothing) == nothing.num_tokens == 0
    assert nothing.advantages is not None
    assert nothing.advantages.shape == (0,)
    assert nothing.positions.shape == nothing.segment_ids.shape == (0,)
    assert nothing.mask.dtype == torch.bool


def test_no_samples_make_an_empty_batch() -> None:
    assert len(FlatBatch.empty()) == 0
    assert FlatBatch.empty().tokens.dtype == torch.int64


def test_a_field_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="old_logprobs has 4 elements, the batch has 5 tokens"):
        batch_of([2, 3]).with_(old_logprobs=torch.zeros(4))


def test_the_experts_of_samples_are_laid_end_to_end_and_unknown_ones_are_marked() -> None:
    first = replace(sample(3), routed_experts=np.array([[[7, 200]], [[0, 1]]], np.uint8))
    batch = FlatBatch.from_samples([first, sample(2)])
    assert batch.routed_experts is not None
    assert batch.routed_experts.dtype == torch.int16
    assert batch.routed_experts[:, 0].tolist() == [[7, 200], [0, 1], [-1, -1], [-1, -1], [-1, -1]]
    selected = batch.select([1, 0]).routed_experts
    assert selected is not None
    assert selected[2:, 0].tolist() == [[7, 200], [0, 1], [-1, -1]]
    assert FlatBatch.from_samples([sample(2)]).routed_experts is None


def test_responses_after_the_prompts_of_a_teacher_are_cut_with_the_batch() -> None:
    samples = [replace(sample(n), teacher_prompt=np.full(k, 50, np.int32)) for n, k in ((2, 4), (4, 1), (3, 2))]
    view = FlatBatch.from_samples(samples).for_teacher
    assert view is not None
    assert sequences(view, "tokens") == [[50, 50, 50, 50, 1], [50, 2, 3], [50, 50, 1, 2]]
    assert sequences(view, "mask") == [[0, 0, 0, 0, 1], [0, 1, 1], [0, 0, 1, 1]]
    for part in FlatBatch.from_samples(samples).split([[2, 0], []]):
        assert part.for_teacher is not None
        assert len(part.for_teacher) == len(part)
        assert int(part.for_teacher.mask.sum()) == int(part.mask.sum())
    [first, _] = FlatBatch.from_samples(samples).to("cpu").split([[2, 0], []])
    assert first.for_teacher is not None
    assert sequences(first.for_teacher, "tokens") == [[50, 50, 1, 2], [50, 50, 50, 50, 1]]
    assert FlatBatch.from_samples([sample(2)]).for_teacher is None


def test_the_teacher_reads_its_prompt_also_if_turns_have_rewards() -> None:
    samples = [replace(sample(6), teacher_prompt=np.full(1, 50, np.int32), turn_rewards=((5, 1.0),))]
    batch = FlatBatch.from_samples(samples)
    assert batch.turn_rewards is not None
    assert batch.for_teacher is not None
    assert batch.for_teacher.turn_rewards is None


def test_a_gpu_copies_every_field_once_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    copied: list[tuple[Tensor, str, bool]] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor.view_as(tensor)

    def copy(tensor: Tensor, device: str, *, non_blocking: bool) -> Tensor:
        copied.append((tensor, device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    batch = batch_of([2, 3])
    fields = [batch.tokens, batch.mask, batch.rollout_logprobs, batch.advantages, batch.offsets]
    batch.to("cuda:1")
    assert {id(each) for each in pinned} == {id(each) for each in fields}
    assert [(device, non_blocking) for _, device, non_blocking in copied] == [("cuda:1", True)] * len(fields)
    batch.to("cpu")
    assert len(pinned) == len(fields)
