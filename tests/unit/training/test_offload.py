from dataclasses import replace

import pytest
import torch
from torch import nn

from verl.training.fsdp import engine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.offload import Offloader, iter_moments, use_threads

pytestmark = pytest.mark.unit


def offload(tensors, **options):
    offloader = Offloader(lambda: tensors, active=True, **options)
    offloader.offload()
    return offloader


def stored_bytes(tensors):
    """Bytes behind them."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_offloaded_tensors_hold_no_memory_and_are_restored_exactly():
    tensors = [torch.randn(3, 4), torch.randn(5).bfloat16()]
    before, views = [tensor.clone() for tensor in tensors], [tensor.view(-1) for tensor in tensors]
    offloader = offload(tensors)
    assert stored_bytes(tensors) == 0
    for _ in range(2):
        with offloader.on_device():
            assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
            assert all(torch.equal(view, one.view(-1)) for view, one in zip(views, before, strict=True))
        assert stored_bytes(tensors) == 0


def test_changes_to_loaded_tensors_survive_offloading():
    weight = torch.zeros(4)
    offloader = offload([weight])
    for step in range(3):
        with offloader.on_device():
            assert weight.tolist() == [step] * 4
            weight += 1


def test_nothing_is_offloaded_while_it_is_in_use():
    weight = torch.ones(4)
    offloader = offload([weight])
    with offloader.on_device():
        with offloader.on_device():
            offloader.offload()
            assert weight.sum() == 4
        assert weight.sum() == 4
    assert stored_bytes([weight]) == 0


def test_an_error_inside_the_context_offloads_too():
    weight = torch.ones(4)
    offloader = offload([weight])
    with pytest.raises(RuntimeError), offloader.on_device():
        raise RuntimeError
    assert stored_bytes([weight]) == 0


def test_loaded_tensors_stay_until_they_are_offloaded():
    weight = torch.ones(4)
    offloader = offload([weight])
    offloader.load()
    offloader.load()
    assert weight.sum() == 4
    offloader.offload()
    assert stored_bytes([weight]) == 0


def test_tensors_of_one_storage_are_offloaded_once():
    whole = torch.arange(6.0)
    offloader = offload([whole[:3], whole[3:]])
    assert stored_bytes([whole]) == 0
    offloader.load()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_inactive_offloader_leaves_tensors_where_they_are():
    weight = torch.ones(4)
    offloader = Offloader(lambda: [weight], active=False)
    offloader.offload()
    with offloader.on_device():
        pass
    assert stored_bytes([weight]) == 16


def test_moments_are_offloaded_as_soon_as_they_exist():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    offloader = Offloader(lambda: iter_moments(optimizer), active=True)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        for module, step in ((model, optimizer), (plain, other)):
            module(torch.ones(1, 3)).sum().backward()
            with offloader.on_device():
                step.step()
            step.zero_grad()
        assert stored_bytes(iter_moments(optimizer)) == 0
        assert stored_bytes(iter_moments(other)) > 0
    assert torch.equal(model.weight, plain.weight)


def test_an_offloaded_state_is_copied_one_tensor_at_a_time():
    weights = [torch.full((4,), float(value)) for value in range(3)]
    offloader = offload(weights)
    loaded = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            loaded.append(sum(weight.untyped_storage().nbytes() > 0 for weight in weights))
            return function(*args, **(kwargs or {}))

    with Watching():
        state = offloader.copy_to_host({"model": dict(enumerate(weights)), "schedule": {"step": 3}})
    assert [state["model"][index].tolist() for index in range(3)] == [[value] * 4 for value in range(3)]
    assert state["schedule"] == {"step": 3}
    assert max(loaded) == 1
    assert stored_bytes(weights) == 0


def test_a_copied_state_survives_offloading():
    weight = torch.ones(4)
    offloader = offload([weight])
    with offloader.on_device():
        state = offloader.copy_to_host({"weight": weight})
    assert state["weight"].tolist() == [1, 1, 1, 1]


def test_an_optimizer_on_the_cpu_of_a_machine_with_gpus_has_the_cores_of_its_ranks(monkeypatch):
    monkeypatch.setattr(engine, "count_node_ranks", lambda: 3)
    monkeypatch.setattr(engine.os, "sched_getaffinity", lambda process: range(14))
    settings = FsdpSettings("model", offload_policy=True, device="cuda")
    assert engine.count_step_threads(settings) == 4
    for changes in ({"device": "cpu"}, {"offload_policy": False}, {"trainable": False}):
        assert engine.count_step_threads(replace(settings, **changes)) is None


def test_threads_are_changed_inside_the_context_only():
    before = torch.get_num_threads()
    with use_threads(before + 2):
        assert torch.get_num_threads() == before + 2
    with use_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
