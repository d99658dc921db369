import pytest

from verl.training.settings import Schedule

pytestmark = pytest.mark.unit


def test_warm_up_rises_to_the_rate_and_stays():
    schedule = Schedule(lr=2.0, warmup_steps=4)
    assert [schedule.at(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_passes_the_middle_and_ends_at_the_least_ratio(kind):
    schedule = Schedule(lr=1.0, kind=kind, warmup_steps=2, total_steps=12, min_ratio=0.2)
    assert schedule.at(2) == 1.0
    assert schedule.at(7) == pytest.approx(0.6)
    assert schedule.at(12) == pytest.approx(0.2)
    assert schedule.at(500) == pytest.approx(0.2)


@pytest.mark.parametrize("total", [None, 3])
def test_decay_without_room_is_refused(total):
    with pytest.raises(ValueError, match="must be more than warmup_steps 3"):
        Schedule(lr=1.0, kind="cosine", warmup_steps=3, total_steps=total)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'step' is not one of"):
        Schedule(lr=1.0, kind="step")


def test_the_warmup_starts_from_a_fraction_of_the_learning_rate() -> None:
    schedule = Schedule(lr=2.0, warmup_steps=4, init_ratio=0.2)
    assert [schedule.at(step) for step in range(5)] == pytest.approx([0.8, 1.2, 1.6, 2.0, 2.0])
