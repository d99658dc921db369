"""Which devices engines and reward models are placed on, and how much of them they own."""

from typing import Any, ClassVar

import pytest

from verl.config.load import load_dict
from verl.config.schema.root import Config
from verl.trainer.build import placement
from verl.trainer.build.placement import EnginePlacer, place_engines, place_reward_models

pytestmark = pytest.mark.unit

R, M = "actor_rollout_ref.rollout", "reward.reward_model"


OWN_DEVICES = ("actor_rollout_ref.hybrid_engine=False", f"{R}.n_gpus_per_node=2")


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


def test_engines_on_lent_devices_are_added_to_those_with_devices_of_their_own() -> None:
    own: Any = RecordingPool(2)
    lent: Any = RecordingPool(4)
    config = config_of(*OWN_DEVICES, f"{R}.lend_train_devices=True", f"{R}.tensor_model_parallel_size=2")
    assert len(EnginePlacer(config, own, "cuda").spawn_first()) == 1
    assert len(EnginePlacer(config, lent, "cuda", ["a", "b", "c", "d"], first_id=1).spawn_first()) == 2
    assert (own.spawned, lent.spawned) == ([(0, 2, "")], [(0, 0, "a,b"), (2, 0, "c,d")])


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


class ReservedPool(RecordingPool):
    """Devices of the cluster for one engine, free or not."""

    made: ClassVar[list["ReservedPool"]] = []
    is_free = False

    def __init__(self, count: int, device: str, *, width: int) -> None:
        super().__init__(count)
        self.is_closed = False
        self.made.append(self)

    def is_reserved(self) -> bool:
        return self.is_free

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[ReservedPool]:
    monkeypatch.setattr(placement, "DevicePool", ReservedPool)
    ReservedPool.made.clear()
    ReservedPool.is_free = False
    return ReservedPool


def test_an_engine_that_joins_gets_the_devices_of_one_that_left_or_others_of_the_cluster(
    cluster: type[ReservedPool],
) -> None:
    pool: Any = RecordingPool(4)
    placer = EnginePlacer(config_of(f"{R}.tensor_model_parallel_size=2"), pool, "cuda")
    placer.spawn_first()
    placer.release(0)
    assert placer.find()
    placer.spawn(2)
    assert pool.spawned[2:] == [(0, 2, "")]
    assert not placer.find()
    cluster.is_free = True
    assert placer.find()
    placer.spawn(3)
    [reserved] = cluster.made
    assert reserved.spawned == [(0, 2, "")]
    assert len(pool.spawned) == 3
    placer.release(3)
    assert reserved.is_closed


def test_an_engine_that_joins_gets_no_accelerators_of_train_workers_that_another_one_has() -> None:
    pool: Any = RecordingPool(4)
    placer = EnginePlacer(config_of(f"{R}.tensor_model_parallel_size=2"), pool, "cuda", ["a", "b", "c", "d"])
    placer.spawn_first()
    assert not placer.find()
    placer.release(1)
    assert placer.find()
    placer.spawn(2)
    assert pool.spawned[2:] == [(2, 0, "c,d")]


def test_devices_that_are_not_needed_any_more_are_not_waited_for(cluster: type[ReservedPool]) -> None:
    placer = EnginePlacer(config_of(), RecordingPool(4), "cuda")  # type: ignore[arg-type]
    assert not placer.find()
    placer.close()
    assert [reserved.is_closed for reserved in cluster.made] == [True]


def test_engines_that_join_on_cpu_cores_share_those_of_the_train_workers() -> None:
    pool: Any = RecordingPool(4)
    placer = EnginePlacer(config_of(f"{R}.num_engines=2"), pool, "cpu", [])
    placer.spawn_first()
    assert placer.find()
    placer.spawn(2)
    assert pool.spawned == [(0, 0, ""), (1, 0, ""), (2, 0, "")]


@pytest.mark.parametrize(
    ("settings", "device", "count", "reason"),
    [
        (["trainer.deterministic=True"], "cpu", 2, "needs the same engines in every step"),
        ([f"{R}.weight_transport=nccl", *OWN_DEVICES], "cuda", 2, "weight_transport=host"),
        ([f"{R}.num_engines=2"], "cuda", 3, "have room for 2 engines"),
        ([f"{R}.num_engines=2"], "cuda", 1, ""),
        ([f"{R}.num_engines=2"], "cpu", 3, ""),
    ],
)
def test_engines_that_cannot_join_are_refused(settings: list[str], device: str, count: int, reason: str) -> None:
    placer = EnginePlacer(config_of(*settings), RecordingPool(4), device, [])  # type: ignore[arg-type]
    limit = placer.describe_limit(count)
    assert reason in limit
    assert bool(limit) == bool(reason)
