"""Which devices the rollout engines and reward models of a run use.

Ray assigns every device to one train worker. Engines and reward models on the same devices reserve no GPU in Ray: they
run on the node of these train workers, and CUDA_VISIBLE_DEVICES is set explicitly. An engine of several devices uses
adjacent devices of one node.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from verl.cluster.device_pool import DevicePool, PlacementPool
from verl.config.batch_sizes import count_engine_devices, count_engines, count_lent_engines
from verl.config.features import scores_responses, transport_name
from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema.root import Config
from verl.trainer.build.worker_settings import engine_settings, reward_model_settings, timeouts
from verl.workers.rewards import RemoteRewardModel
from verl.workers.rollout import RemoteEngine


def place_engines(
    config: Config,
    pool: PlacementPool,
    device: str,
    accelerators: Sequence[str] | None = None,
    *,
    load_format: str | None = None,
) -> list[RemoteEngine]:
    """Spawn the rollout engines, spread over the devices; for the arguments see `EnginePlacer`."""
    return EnginePlacer(config, pool, device, accelerators, load_format=load_format).spawn_first()


class EnginePlacer:
    """Spawns engines, each on devices of its own or of train workers: the first ones, and those that join later.

    An engine that joins gets the devices of one that has left. Otherwise, if engines have devices of their own, others
    are reserved in the cluster and released with the engine; on the CPU it shares the cores of the train workers.
    """

    def __init__(
        self,
        config: Config,
        pool: PlacementPool,
        device: str,
        accelerators: Sequence[str] | None = None,
        *,
        load_format: str | None = None,
        first_id: int = 0,
    ) -> None:
        """Spawn nothing yet.

        Args:
            config: The settings of the run.
            pool: The devices of the first engines.
            device: The type of the devices.
            accelerators: Those of the train workers, by rank; None: there are none, and engines own their devices.
            load_format: Replaces the setting.
            first_id: The id of the first engine.
        """
        self._config, self._pool, self._device, self._accelerators = config, pool, device, accelerators
        self._load_format = load_format
        is_lent = accelerators is not None and not config.actor_rollout_ref.hybrid_engine
        self._count = count_lent_engines(config) if is_lent else count_engines(config)
        self._width = count_engine_devices(config)
        self._places = {first_id + place: place for place in range(self._count)}  # engine -> place in the devices
        self._reserved: dict[int, DevicePool] = {}  # engine -> devices that were reserved for it alone
        self._pending: DevicePool | None = None
        at_once = -(-self._count * self._width // pool.count)  # engines on a device; several only on CPU cores
        self._share = self._width / at_once if accelerators is None else 0

    def spawn_first(self) -> list[RemoteEngine]:
        """Spawn the engines that a run begins with."""
        return [self._spawn(self._pool, place, index, self._share) for index, place in self._places.items()]

    def describe_limit(self, count: int) -> str:
        """Return why there cannot be `count` engines; empty if there can."""
        rollout = self._config.actor_rollout_ref
        if self._config.trainer.local:
            return "trainer.local=True has one engine in its one process"
        if self._config.trainer.deterministic:
            return "trainer.deterministic=True needs the same engines in every step"
        if transport_name(self._config) != "host":
            return (
                "only weight_transport=host reaches engines that join; set actor_rollout_ref.rollout.weight_transport"
            )
        if rollout.hybrid_engine and self._device != "cpu" and count > self._count:
            return (
                f"the train workers' devices have room for {self._count} engines; for more, start the run with "
                "actor_rollout_ref.hybrid_engine=False, which gives engines devices of their own"
            )
        return ""

    def find(self) -> bool:
        """Return whether there are devices for another engine; if not, reserve some as soon as the cluster has them."""
        if self._find_place() < self._count:
            return True
        if self._accelerators is not None:  # cores may be shared; accelerators have room for the first engines only
            return self._device == "cpu"
        if self._pending is None:
            self._pending = DevicePool(self._width, self._device, width=self._width)
        return self._pending.is_reserved()

    def stop_finding(self) -> None:
        """Stop waiting for devices."""
        if self._pending is not None:
            self._pending.close()
            self._pending = None

    def spawn(self, engine_id: int) -> RemoteEngine:
        """Spawn an engine that joins on the devices that were found."""
        if self._pending is not None and self._pending.is_reserved():
            self._reserved[engine_id], self._pending = self._pending, None
            return self._spawn(self._reserved[engine_id], 0, engine_id, self._width)
        place = self._places[engine_id] = self._find_place()
        return self._spawn(self._pool, place, engine_id, self._share)

    def release(self, engine_id: int) -> None:
        """Take back the devices of an engine that has left."""
        self._places.pop(engine_id, None)
        if (reserved := self._reserved.pop(engine_id, None)) is not None:
            reserved.close()

    def close(self) -> None:
        """Release all devices that were reserved for engines that joined."""
        self.stop_finding()
        for engine_id in list(self._reserved):
            self.release(engine_id)

    def _find_place(self) -> int:
        taken = set(self._places.values())
        return next(place for place in itertools.count() if place not in taken)

    def _spawn(self, pool: PlacementPool, place: int, index: int, share: float) -> RemoteEngine:
        config, first = self._config, place * self._width % pool.count
        settings = engine_settings(config, self._device, index)
        if self._load_format is not None:
            settings = replace(settings, load_format=self._load_format)
        return RemoteEngine.spawn(
            pool,
            index,
            get_rollout_engine(config.actor_rollout_ref.rollout.name),
            settings,
            config.actor_rollout_ref.model.external_modules,
            config.actor_rollout_ref.rollout.python,
            ",".join((self._accelerators or ())[first : first + self._width]),
            device=first,
            share=share,
            timeouts=timeouts(config),
        )


def place_reward_models(
    config: Config, pool: PlacementPool, device: str, accelerators: Sequence[str]
) -> list[RemoteRewardModel]:
    """Spawn the replicas of the reward model, from the last device down."""
    model = config.reward.reward_model
    if not model.enable or not scores_responses(config):
        return []
    width = model.rollout.tensor_model_parallel_size
    models = []
    for index in range(model.replicas):
        first = pool.count - width - index * width % pool.count
        replica = RemoteRewardModel.spawn(
            pool,
            index,
            reward_model_settings(config, device, index),
            ",".join(accelerators[first : first + width]),
            device=first,
            timeouts=timeouts(config),
        )
        models.append(replica)
    return models
