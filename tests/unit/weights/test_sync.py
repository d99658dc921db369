"""A weight sync ends only when the probe has verified every engine."""

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, Sequence

import pytest

from verl.errors import DivergenceError, EngineError, ProcessLostError, TrainerLostError, WeightSyncError
from verl.rollout.engine import load_weights
from verl.weights.probe import LEAST_TOLERANCES, MARGIN, Probe, compare_logprobs
from verl.weights.sync import DeviceTransport, HostTransport, Transport, WeightSync

pytestmark = pytest.mark.unit

PROBE = Probe(sequences=((1, 2, 3), (4, 5)), tolerance=1e-3)


class Model:
    """A trainer whose log-probs depend on one weight."""

    def __init__(self) -> None:
        self.weight = 0.0

    async def pack_weights(self) -> AsyncGenerator[float, None]:
        yield self.weight

    async def send_weights(self, backend: str, receivers: Sequence[object], version: int) -> None:
        raise AssertionError("not this way")

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[self.weight - token for token in sequence[1:]] for sequence in sequences]


class Engine(Model):
    def __init__(self, *, loses_weights: bool = False, keeps_version: bool = False) -> None:
        super().__init__()
        self._loses, self._keeps, self._version = loses_weights, keeps_version, -1

    async def start_weight_update(self) -> None:
        self._loaded = self.weight

    async def load_bucket(self, bucket: float) -> None:
        self._loaded = bucket

    async def finish_weight_update(self, version: int) -> None:
        if not self._loses or version == 0:
            self.weight = self._loaded
        if not self._keeps:
            self._version = version

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[self.weight - token for token in each[1:]] for each in sequences]

    async def version(self) -> int:
        return self._version


class StaticReceivers:
    """A fixed set of receivers; losing one is an error."""

    shares_devices = True

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = dict(enumerate(engines))

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, engine_id: int) -> Engine:
        return self._engines[engine_id]

    def active(self) -> dict[int, Engine]:
        return self._engines

    def mark_lost(self, engine_id: int, error: ProcessLostError) -> None:
        raise error

    def mark_synced(self, engine_id: int) -> None: ...
    async def mark_ready(self, engine_id: int, version: int) -> None: ...
    async def wait_for_stale_exit(self) -> None: ...
    async def free_devices(self) -> None: ...
    def allow_starts(self) -> None: ...


def make_sync(model: Model, engines: Sequence[Engine], transport: Transport) -> WeightSync:
    return WeightSync(model, StaticReceivers(engines), transport, PROBE)


async def test_a_trainer_that_has_diverged_is_named_instead_of_the_engines() -> None:
    model = Model()
    model.weight = math.nan
    with pytest.raises(DivergenceError, match="train worker: actor: training has diverged: log-probs of version 3"):
        await make_sync(model, [Engine()], HostTransport()).sync(3)


async def test_every_engine_gets_the_weights_and_the_version() -> None:
    model, engines = Model(), [Engine(), Engine()]
    weight_sync = make_sync(model, engines, HostTransport())
    for version in range(3):
        model.weight = 1.5 * version
        metrics = await weight_sync.sync(version)
        assert [engine.weight for engine in engines] == [model.weight] * 2
        assert metrics["weights/version"] == version
        assert metrics["weights/probe_gap"] == 0


class Recording(StaticReceivers):
    """Takes lost receivers out, and records why they were lost."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self.lost: dict[int, str] = {}
        self.ready: list[int] = []

    def active(self) -> dict[int, Engine]:
        return {engine_id: engine for engine_id, engine in self._engines.items() if engine_id not in self.lost}

    def mark_lost(self, engine_id: int, error: ProcessLostError) -> None:
        self.lost[engine_id] = str(error)

    async def mark_ready(self, engine_id: int, version: int) -> None:
        self.ready.append(engine_id)


async def test_an_outlier_is_restarted_and_the_others_go_on() -> None:
    model, engines = Model(), [Engine(), Engine(loses_weights=True), Engine()]
    receivers = Recording(engines)
    weight_sync = WeightSync(model, receivers, HostTransport(), PROBE)
    await weight_sync.sync(0)
    assert (weight_sync.outliers, receivers.ready) == ([], [0, 1, 2])
    model.weight = 0.5
    metrics = await weight_sync.sync(1)
    assert (weight_sync.outliers, receivers.ready) == ([1], [0, 1, 2, 0, 2]), "an engine that is wrong is not enabled"
    assert "rollout engine 1 does not hold version 1 of the weights" in receivers.lost[1]
    assert "it still has version 0" in receivers.lost[1]
    assert metrics["weights/probe_gap"] == 0


async def test_an_engine_that_is_lost_right_after_a_wrong_answer_is_an_outlier_too() -> None:
    model, engines = Model(), [Engine(), Engine()]
    receivers = Recording(engines)

    class Dying(Engine):
        async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
            receivers.mark_lost(2, ProcessLostError("it has died"))
            return [[self.weight + 0.5 - token for token in each[1:]] for each in sequences]

    receivers._engines[2] = Dying()
    weight_sync = WeightSync(model, receivers, HostTransport(), PROBE)
    await weight_sync.sync(0)
    assert weight_sync.outliers == [2], "what it has generated may be wrong as well"
    assert receivers.lost == {2: "it has died"}
    assert receivers.ready == [0, 1]


async def test_an_engine_that_leaves_during_a_sync_does_not_end_the_run() -> None:
    class Leaving(Engine):
        async def load_bucket(self, bucket: float) -> None:
            receivers.lost[1] = "it has left"
            raise AttributeError("'VllmEngine' object has no attribute '_llm'")

    receivers = Recording([Engine(), Leaving()])
    await WeightSync(Model(), receivers, HostTransport(), PROBE).sync(0)
    assert receivers.ready == [0]


async def test_an_engine_that_cannot_load_what_others_have_loaded_is_restarted() -> None:
    class Failing(Engine):
        async def load_bucket(self, bucket: float) -> None:
            raise RuntimeError("an illegal memory access")

    receivers = Recording([Engine(), Failing()])
    weight_sync = WeightSync(Model(), receivers, HostTransport(), PROBE)
    await weight_sync.sync(0)
    assert receivers.lost == {1: "an illegal memory access"}
    assert receivers.ready == [0]
    with pytest.raises(RuntimeError, match="an illegal memory access"):  # so that the next attempt follows
        await weight_sync.sync_one(1)


async def test_engines_that_are_all_wrong_stop_the_run() -> None:
    model, engines = Model(), [Engine(loses_weights=True), Engine(loses_weights=True)]
    weight_sync = make_sync(model, engines, HostTransport())
    await weight_sync.sync(0)
    model.weight = 0.5
    with pytest.raises(WeightSyncError, match=r"engine 0 .* version 1 .* still has version 0"):
        await weight_sync.sync(1)


async def test_an_engine_that_does_not_reach_the_version_stops_the_run() -> None:
    weight_sync = make_sync(Model(), [Engine(keeps_version=True)], HostTransport())
    with pytest.raises(WeightSyncError, match=r"engine 0 did not reach version 0 .* reports -1"):
        await weight_sync.sync(0)


def test_wrong_weights_are_distinguished_from_old_ones() -> None:
    _, mismatches = compare_logprobs(PROBE, [[0.0]], {0: [[9.0]]}, version=2, previous=[[0.1]])
    assert "lost, renamed, cast or not repacked" in mismatches[0]


def test_rounding_within_the_tolerance_passes_and_is_reported() -> None:
    gap, mismatches = compare_logprobs(PROBE, [[0.0, 1.0]], {0: [[0.0, 1.0005]]}, version=1)
    assert gap == pytest.approx(0.00025)
    assert not mismatches


def test_probe_tokens_are_fixed_by_the_seed_and_within_the_vocabulary() -> None:
    probe = Probe.random(50, tolerance=1e-3)
    assert probe == Probe.random(50, tolerance=1e-3)
    assert all(0 <= token < 50 for sequence in probe.sequences for token in sequence)


async def test_without_active_engines_no_probe_gap_is_reported() -> None:
    class Nobody(StaticReceivers):
        def active(self) -> dict[int, Engine]:
            return {}

    metrics = await WeightSync(Model(), Nobody([Engine()]), HostTransport(), PROBE).sync(3)
    assert metrics["weights/version"] == 3
    assert "weights/probe_gap" not in metrics


async def test_without_a_supervisor_a_lost_engine_ends_the_sync() -> None:
    class Dying(Engine):
        async def load_bucket(self, bucket: float) -> None:
            raise ProcessLostError("it has died")

    with pytest.raises(ProcessLostError, match="it has died"):
        await make_sync(Model(), [Engine(), Dying()], HostTransport()).sync(0)


async def test_weights_that_do_not_fit_end_the_sync_with_any_receivers() -> None:
    class Refusing(Engine):
        async def load_bucket(self, bucket: float) -> None:
            raise WeightSyncError("weights do not fit")

    with pytest.raises(WeightSyncError, match="do not fit"):
        await make_sync(Model(), [Refusing()], HostTransport()).sync(0)


class Sending(Model):
    """A trainer that sends from device to device, and remembers to whom."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, int]] = []

    async def send_weights(self, backend: str, receivers: Sequence[object], version: int) -> None:
        for receiver in receivers:
            await load_weights(receiver, [self.weight], version)  # type: ignore[arg-type, list-item]
        self.sent.append((len(receivers), version))


class Present(StaticReceivers):
    """Receivers of which some are away."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self.present = list(self._engines)

    def active(self) -> dict[int, Engine]:
        return {engine_id: self._engines[engine_id] for engine_id in self.present}


async def test_a_device_transfer_needs_all_engines_of_its_group() -> None:
    model, receivers = Sending(), Present([Engine(), Engine()])
    weight_sync = WeightSync(model, receivers, DeviceTransport("nccl"), PROBE)
    await weight_sync.sync(0)
    await weight_sync.sync(1)
    receivers.present = [0]
    with pytest.raises(TrainerLostError, match=r"1 of 2 rollout engines .* version 2 .*weight_transport=nccl .*=host"):
        await weight_sync.sync(2)
    assert model.sent == [(2, 0), (2, 1)]


@pytest.mark.parametrize("count", [1, 2])
async def test_a_restarted_engine_cannot_join_a_device_transfer(count: int) -> None:
    model = Sending()
    weight_sync = make_sync(model, [Engine() for _ in range(count)], DeviceTransport("ipc"))
    await weight_sync.sync(0)
    with pytest.raises(TrainerLostError, match=r"rollout engine 0 was restarted.*weight_transport=host"):
        await weight_sync.sync_one(0)
    assert model.sent == [(count, 0)]


async def test_a_restarted_engine_is_synced_through_host_memory() -> None:
    model, engines = Model(), [Engine(), Engine()]
    weight_sync = make_sync(model, engines, HostTransport())
    await weight_sync.sync(0)
    model.weight, engines[1].weight = 0.0, 7.0
    await weight_sync.sync_one(1)
    assert engines[1].weight == 0.0


async def test_an_engine_that_was_replaced_after_it_had_the_weights_is_restarted() -> None:
    class Replaced(Engine):
        async def version(self) -> int:
            receivers.present = [0]  # by the supervisor, which brings it back by `sync_one`
            return -1

    receivers = Present([Engine(), Replaced()])
    sync = WeightSync(Model(), receivers, HostTransport(), PROBE)
    assert (await sync.sync(0))["weights/probe_gap"] == 0
    assert sync.outliers == []


async def test_the_next_bucket_is_requested_when_all_engines_have_loaded_the_last() -> None:
    order: list[str] = []

    class Slow(Engine):
        async def load_bucket(self, bucket: float) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            order.append(f"loaded {bucket}")

    class Packing(Model):
        async def pack_weights(self) -> AsyncGenerator[float, None]:
            for bucket in (1.0, 2.0):
                order.append(f"packed {bucket}")
                yield bucket

    await HostTransport().send(Packing(), [Slow(), Slow()], 0)
    assert order == ["packed 1.0", *["loaded 1.0"] * 2, "packed 2.0", *["loaded 2.0"] * 2]


async def test_engines_stay_awake_and_at_their_version_during_a_validation() -> None:
    weight_sync = make_sync(Model(), engines := [Engine(), Engine()], HostTransport())
    await weight_sync.sync(0)
    for replace in (weight_sync.free_devices, lambda: weight_sync.sync(1)):
        validation = asyncio.get_running_loop().create_future()
        weight_sync.keep_version(validation)
        replacing = asyncio.ensure_future(replace())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not replacing.done()
        assert [await engine.version() for engine in engines] == [0, 0]
        validation.set_exception(EngineError("the loop raises it, and nobody else"))
        await replacing
        assert validation.exception() is not None
    assert [await engine.version() for engine in engines] == [1, 1]


async def test_engines_that_are_all_lost_get_new_weights_during_a_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a sync they would never return."""
    monkeypatch.setattr("verl.weights.sync.POLL_S", 0.001)
    receivers = Recording([Engine()])
    weight_sync = WeightSync(Model(), receivers, HostTransport(), PROBE)
    await weight_sync.sync(0)
    weight_sync.keep_version(asyncio.get_running_loop().create_future())
    syncing = asyncio.ensure_future(weight_sync.sync(1))
    await asyncio.sleep(0)
    receivers.mark_lost(0, ProcessLostError("gone"))
    assert "weights/probe_gap" not in await syncing, "nobody was there to probe"


class Rounding(Model):
    """A trainer of which rounding moves the log-probs by a known amount."""

    def __init__(self, moves: float | None) -> None:
        super().__init__()
        self.moves, self.asked = moves, list[str]()

    async def measure_rounding(self, sequences: Sequence[Sequence[int]], dtype: str) -> float | None:
        self.asked.append(dtype)
        return self.moves


class Differing(Engine):
    """An engine whose log-probs differ by a fixed amount."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.gap = gap

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[value + self.gap for value in values] for values in await super().compute_logprobs(sequences)]


def calibrated(model: Model, gap: float, dtype: str | None = "bfloat16") -> WeightSync:
    probe = dataclasses.replace(PROBE, tolerance=0.2, dtype=dtype)
    return WeightSync(model, StaticReceivers([Differing(gap)]), HostTransport(), probe)  # type: ignore[arg-type]


async def test_the_tolerance_follows_from_how_far_rounding_moves_the_trainer() -> None:
    model = Rounding(0.02)
    metrics = await calibrated(model, 0.05).sync(0)
    assert metrics["weights/probe_tolerance"] == pytest.approx(MARGIN * 0.02)
    with pytest.raises(WeightSyncError, match=r"by 0\.07 on average; at most 0\.06 is allowed"):
        await calibrated(Rounding(0.02), 0.07).sync(0)


async def test_a_tolerance_has_a_floor() -> None:
    metrics = await calibrated(Rounding(1e-6), 0.009).sync(0)
    assert metrics["weights/probe_tolerance"] == LEAST_TOLERANCES["bfloat16"]


async def test_a_train_worker_that_is_lost_during_a_probe_is_no_loss_of_the_engine() -> None:
    class Dying(Rounding):
        async def measure_rounding(self, sequences: Sequence[Sequence[int]], dtype: str) -> float | None:
            if self.asked:
                raise ProcessLostError("train worker 0: measure_rounding: its process has died")
            return await super().measure_rounding(sequences, dtype)

    weight_sync = calibrated(Dying(0.02), 0.0)
    await weight_sync.sync(0)
    weight_sync._receivers._engines[0].gap = 0.5  # type: ignore[attr-defined]
    with pytest.raises(TrainerLostError, match="train worker 0"):
        await weight_sync.sync_one(0)


@pytest.mark.parametrize(("moves", "dtype"), [(None, "bfloat16"), (0.5, None)])
async def test_the_tolerance_is_fixed_if_rounding_is_unknown_or_it_was_set(
    moves: float | None, dtype: str | None
) -> None:
    metrics = await calibrated(Rounding(moves), 0.1, dtype).sync(0)
    assert metrics["weights/probe_tolerance"] == 0.2


async def test_an_engine_is_refused_only_if_the_rounding_of_the_present_weights_does_not_explain_it() -> None:
    weight_sync = calibrated(model := Rounding(0.02), 0.05)
    await weight_sync.sync(0)
    weight_sync._receivers._engines[0].gap = 0.1  # type: ignore[attr-defined]
    model.moves = 0.05  # training has made the log-probs sharper
    await weight_sync.sync(1)
    await weight_sync.sync(2)
    assert len(model.asked) == 2, "at the start, and when the tolerance seemed to be exceeded"
    model.moves = 0.02
    weight_sync._receivers._engines[0].gap = 0.2  # type: ignore[attr-defined]
    with pytest.raises(WeightSyncError):
        await weight_sync.sync(3)
