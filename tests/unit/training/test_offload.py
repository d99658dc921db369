import pytest
import torch
from torch import nn

from verl.training.offload import Offloader, copy_to_host, iter_moments

pytestmark = pytest.mark.unit


def parked(tensors, **how):
    parking = Offloader(lambda: tensors, active=True, **how)
    parking.offload()
    return parking


def held(tensors):
    """Bytes behind them."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_parked_tensors_hold_nothing_and_come_back_as_they_were():
    tensors = [torch.randn(3, 4), torch.randn(5).bfloat16()]
    before, views = [tensor.clone() for tensor in tensors], [tensor.view(-1) for tensor in tensors]
    parking = parked(tensors)
    assert held(tensors) == 0
    for _ in range(2):
        with parking.on_device():
            assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
            assert all(torch.equal(view, one.view(-1)) for view, one in zip(views, before, strict=True))
        assert held(tensors) == 0


def test_what_is_changed_while_it_is_here_stays_changed():
    weight = torch.zeros(4)
    parking = parked([weight])
    for number in range(3):
        with parking.on_device():
            assert weight.tolist() == [number] * 4
            weight += 1


def test_nothing_is_parked_while_somebody_uses_it():
    weight = torch.ones(4)
    parking = parked([weight])
    with parking.on_device():
        with parking.on_device():
            parking.offload()
            assert weight.sum() == 4
        assert weight.sum() == 4
    assert held([weight]) == 0


def test_an_error_inside_parks_all_the_same():
    weight = torch.ones(4)
    parking = parked([weight])
    with pytest.raises(RuntimeError), parking.on_device():
        raise RuntimeError
    assert held([weight]) == 0


def test_fetched_tensors_stay_until_they_are_parked():
    weight = torch.ones(4)
    parking = parked([weight])
    parking.load()
    parking.load()
    assert weight.sum() == 4
    parking.offload()
    assert held([weight]) == 0


def test_tensors_of_one_storage_are_parked_once():
    whole = torch.arange(6.0)
    parking = parked([whole[:3], whole[3:]])
    assert held([whole]) == 0
    parking.load()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_nothing_happens_unless_it_is_asked_for():
    weight = torch.ones(4)
    parking = Offloader(lambda: [weight], active=False)
    parking.offload()
    with parking.on_device():
        pass
    assert held([weight]) == 16


def test_moments_are_parked_as_soon_as_there_are_some():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parking = Offloader(lambda: iter_moments(optimizer), active=True)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        for each, step in ((model, optimizer), (plain, other)):
            each(torch.ones(1, 3)).sum().backward()
            with parking.on_device():
                step.step()
            step.zero_grad()
        assert held(iter_moments(optimizer)) == 0
        assert held(iter_moments(other)) > 0
    assert torch.equal(model.weight, plain.weight)


def test_a_copied_state_outlives_the_parking():
    weight = torch.ones(4)
    parking = parked([weight])
    with parking.on_device():
        state = copy_to_host({"model": {"weight": weight}, "schedule": {"step": 3}})
    assert state["model"]["weight"].tolist() == [1, 1, 1, 1]
    assert state["schedule"] == {"step": 3}
