"""Which devices engines and reward models are placed on, and how much of them they own."""

from typing import Any

import pytest

from verl.config.load import load_dict
from verl.config.schema.root import Config
from verl.trainer.build.placement import place_engines, place_reward_models

pytestmark = pytest.mark.unit

R, M = "actor_rollout_ref.rollout", "reward.reward_model"


class RecordingPool:
    """A pool that starts nothing, and records (device, share, accelerators) of every actor."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.spawned: list[tuple[int, float, str]] = []

    def spawn(self, actor: type, *args: Any, device: int, share: float, **_: Any) -> object:
        self.spawned.append((device, share, args[-1]))
        return object()


def config_of(*settings: str) -> Config:
    required = ("actor_rollout_ref.model.path=model", "data.train_files=train.parquet", "trainer.n_gpus_per_node=4")
    return load_dict({}, [*required, *settings]).config


def test_engines_next_to_train_workers_own_no_device_and_use_those_of_their_ranks() -> None:
    pool: Any = RecordingPool(4)
    place_engines(config_of(f"{R}.tensor_model_parallel_size=2"), pool, "cuda", ["a", "b", "c", "d"])
    assert pool.spawned == [(0, 0, "a,b"), (2, 0, "c,d")]


def test_engines_alone_own_their_devices() -> None:
    pool: Any = RecordingPool(4)
    place_engines(config_of(f"{R}.tensor_model_parallel_size=2"), pool, "cuda")
    assert pool.spawned == [(0, 2, ""), (2, 2, "")]


def test_more_engines_than_cores_share_them_so_that_all_can_start() -> None:
    pool: Any = RecordingPool(4)
    place_engines(config_of(f"{R}.num_engines=8"), pool, "cpu")
    owned = [sum(share for device, share, _ in pool.spawned if device == each) for each in range(4)]
    assert len(pool.spawned) == 8
    assert owned == [1, 1, 1, 1]


def test_reward_models_are_placed_from_the_last_device_down() -> None:
    pool: Any = RecordingPool(4)
    settings = (f"{M}.enable=True", f"{M}.model_path=reward", f"{M}.rollout.name=vllm", f"{M}.replicas=3")
    config = config_of(*settings, f"{M}.rollout.tensor_model_parallel_size=2")
    place_reward_models(config, pool, "cuda", ["a", "b", "c", "d"])
    assert pool.spawned == [(2, 0, "c,d"), (0, 0, "a,b"), (2, 0, "c,d")]
