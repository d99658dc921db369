"""A simulated run: the real buffer, engine pools, engine supervisor and weight sync, with simulated engines, a
simulated trainer and a simulated clock. One seed decides everything that happens: sizes, delays, crashes, hangs, lost
replies, failed starts, engines that join and leave. `run_seed` raises `Violation` if an invariant is violated; the same
seed violates it again.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from observed_pool import ObservedPool
from simulated_clock import Deadlock, simulate
from simulated_engines import DEVICE, LONGEST_S, TRAINING, Process, SimulatedEngine, SimulatedModel, answer_to
from simulated_scenario import Scenario

from verl.cluster.monitor import Endpoint, wait_for_loss
from verl.config.schema.algorithm import FilterGroupsConfig
from verl.data.samplers import PromptStream, SequentialSampler
from verl.errors import (
    DivergenceError,
    EngineError,
    ProcessLostError,
    RewardError,
    StorageError,
    VerlError,
    WeightSyncError,
)
from verl.rollout.engine import EngineView
from verl.rollout.replica_pool import MAX_LOSSES, Request
from verl.rollout.supervisor import EngineEvent, EngineState, EngineSupervisor
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.types import Completion, SampleHandle, SamplingParams
from verl.weights.probe import Probe
from verl.weights.sync import HostTransport, WeightSync

__all__ = ["Outcome", "Violation", "run_seed"]

T = TypeVar("T")

ROWS = 1000
MAX_RESTARTS = 4
ANSWER_S, START_S, PATIENCE_S = 20.0, 120.0, 5_000.0
PROBE = Probe(sequences=((1, 2),), tolerance=1e-3)


class Violation(AssertionError):  # noqa: N818 - it is what was found, not what went wrong in here
    """A promise was broken; `history` is what had happened until then."""

    history: Sequence[str] = ()


@dataclass
class Outcome:
    """What happened in a run that kept its promises."""

    seconds: float = 0.0  # simulated
    steps: int = 0  # with those that were repeated
    faults: int = 0
    restarts: int = 0
    retries: int = 0
    resumes: int = 0
    given_up: int = 0
    joins: int = 0
    leaves: int = 0
    ended_early: str = ""  # by an error that is right: no engine left, or a request that lost too many
    results: dict[int, Any] = field(default_factory=dict)  # of each position and answer, where there are rounds
    history: list[str] = field(default_factory=list)


def run_seed(seed: int, *, asynchronous: bool = False) -> Outcome:
    """One run, and with rounds a second one without faults to compare it with."""
    scenario = Scenario.draw(seed, asynchronous=asynchronous)
    outcome = _run(scenario, seed)
    if scenario.together:
        calm = _run(scenario.without_faults(), seed)
        if wrong := [place for place, result in outcome.results.items() if calm.results[place] != result]:
            broken = Violation(f"results of the positions {wrong} are others than without faults")
            broken.history = outcome.history
            raise broken
    return outcome


def _run(scenario: Scenario, seed: int) -> Outcome:
    random.seed(seed)  # of the pools
    world = _World(scenario, seed)
    try:
        with jumping_clock(seed):
            simulate(world.live())
    except (Deadlock, Violation) as error:
        world.violations.append(str(error))
    if world.violations:
        broken = Violation(world.violations[0])
        broken.history = world.outcome.history
        raise broken
    return world.outcome


@contextmanager
def jumping_clock(seed: int) -> Iterator[None]:
    """Let the time of day jump by up to a day, either way, whenever it is read: nothing may depend on it."""
    real, draw = time.time, random.Random(f"clock {seed}")
    time.time = lambda: real() + draw.uniform(-86_400, 86_400)
    try:
        yield
    finally:
        time.time = real


@dataclass
class _Checkpoint:
    version: int = 0
    weights: float = 0.0
    data: dict[str, Any] | None = None
    trained: frozenset[int] = frozenset()  # positions
    may_miss: frozenset[int] = frozenset()  # positions that were done, perhaps without samples


_FAULTS = (
    "dies",
    "dies",
    "freezes",
    "freezes for long",
    "hangs",
    "hangs",
    "is cut off from the weights",
    "its core dies",
    "slow",
)
_NEW_FAULTS = (
    "is parted from the controller",
    "is parted from the controller",
    "is slow for good",
    "returns wrong results",
    "returns wrong results",
    "is killed for its memory",
)
_GCS = Endpoint("Ray's GCS", "simulated", 1, 5.0)
RAY_S = 60.0  # after that Ray ends a controller without GCS


class _World:
    """Everything of one run, and the book-keeping that its promises are checked by."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.draw = random.Random(seed)
        self.token_s, self.broken, self.is_synchronous = scenario.token_s, scenario.broken, scenario.is_synchronous
        self.outcome = Outcome()
        self.violations: list[str] = []
        self.more = random.Random(f"more {seed}")
        self._faults_left = scenario.faults
        self._cluster_losses = scenario.cluster_losses
        self._has_gcs = True
        self._wrong: dict[float, Process] = {}  # by their error
        self._may_miss: set[int] = set()  # positions whose samples may be left out
        self._saving: asyncio.Task[None] | None = None
        self._begun_by_life: set[int] = set()
        self._version_of: dict[float, int] = {}  # of weights
        self._life = 0
        self._saved = _Checkpoint()
        self._round: list[tuple[int, asyncio.Future[list[SampleHandle] | None]]] = []
        self._begun: set[tuple[int, int]] = set()

    # What goes wrong

    def slowness(self, token_ids: Sequence[int]) -> float:
        return self.scenario.slowness(*token_ids)

    def delay(self) -> float:
        return self.draw.choice((0.0, 0.0, 0.01, 0.01, 0.01, 0.2, 0.2, 2.0))

    def may_fail(self, chance: float) -> bool:
        if self._faults_left <= 0 or self.draw.random() >= chance:
            return False
        self._faults_left -= 1
        self.outcome.faults += 1
        return True

    async def maybe_die(self, process: Process, where: str) -> None:
        if self.may_fail(self.scenario.fault_in_call):
            self.note(f"engine {process.number} dies while it is {where}")
            self.engines[process.number].failures += 1
            self.engines[process.number].die()
            await asyncio.sleep(0)

    async def _torment(self) -> None:
        while self._faults_left > 0:
            await asyncio.sleep(self.draw.expovariate(1 / self.scenario.fault_every_s))
            engine = self.draw.choice(self.engines)
            if not engine.process.is_alive or not self.may_fail(1.0):
                continue
            engine.failures += 1
            fault = self.draw.choice(_FAULTS)
            if self.more.random() < self.scenario.new_faults:
                fault = self.more.choice(_NEW_FAULTS)
                if fault == "returns wrong results" and self.scenario.together:
                    fault = "dies"  # results that are wrong for a while are not those of a calm run
            self.note(f"engine {engine.number}: {fault}")
            process = engine.process
            if fault in _NEW_FAULTS:
                self._strike(engine, fault)
                continue
            if fault == "dies":
                engine.die()
            elif fault == "freezes":
                process.freeze(self.draw.uniform(0, ANSWER_S))
            elif fault == "freezes for long":
                process.freeze(self.draw.choice([60.0, 600.0, LONGEST_S]))
            elif fault == "hangs":
                process.hangs = True
            elif fault == "is cut off from the weights":
                process.is_cut_off = True
            elif fault == "its core dies":
                process.is_enabled = False
            else:
                process.slowness = 5.0

    def _strike(self, engine: SimulatedEngine, fault: str) -> None:
        process = engine.process
        if fault == "is parted from the controller":
            engine.part(self.more.choice([5.0, 60.0, 600.0]))
            engine.failures += MAX_RESTARTS  # it cannot be restarted either
        elif fault == "is slow for good":
            process.slowness = 40.0
        elif fault == "returns wrong results":
            process.error = process.error or 0.25 + 1e-3 * (len(self._wrong) + 1)
            self._wrong[process.error] = process
            engine.was_wrong = True
        else:
            process.dies_when_it_loads = True

    # What is checked

    def note(self, line: str) -> None:
        self.outcome.history.append(f"{asyncio.get_running_loop().time():9.2f} {line}")

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)  # the reader may carry on
            self.note(f"VIOLATION: {otherwise}")
            raise Violation(otherwise)

    def check_memory(self) -> None:
        shares, lent = self.scenario.shares_devices, self.scenario.lent
        if sharing := [engine for engine in self.engines if shares or engine.number in lent]:
            used = self.model.memory + max(engine.process.memory for engine in sharing)
            self.check(used <= DEVICE, f"{used} of {DEVICE} parts of a device's memory are in use")

    def _check_step(self, version: int, samples: Sequence[SampleHandle], trained: frozenset[int]) -> frozenset[int]:
        """Check what a step trains, after the positions that earlier ones `trained`; return all of them."""
        places = [(sample.group, sample.index) for sample in samples]
        positions = frozenset(position for position, _ in places)
        if self.is_synchronous:
            expected = self.scenario.batches(self.seed)[version]
        else:
            expected = sorted(positions)  # which ones depends on the clock
            self.check(not positions & trained, f"step {version} trains {sorted(positions & trained)} again")
            wrong = [each for each in expected if not self.scenario.is_usable(each, self.seed)]
            self.check(not wrong, f"step {version} trains {wrong}, which have no signal or are left out")
            is_full = len(positions) == self.scenario.batch or self._may_miss or self.scenario.max_batches
            self.check(bool(is_full), f"step {version} trains {len(positions)} groups")
        wanted = [(position, number) for position in expected for number in range(self.scenario.answers)]
        missing = {position for position, _ in {*wanted} - {*places}}
        is_right = places == [place for place in wanted if place in {*places}] and missing <= self._may_miss
        self.check(is_right, f"step {version} trains {places} instead of {wanted}")
        for sample, completion in [(each, turn) for each in samples for turn in each.ref]:
            if self.scenario.together:
                result = (completion.token_ids, completion.logprobs.tolist(), completion.versions.tolist())
                self.outcome.results[sample.group * 10 + sample.index] = result
            else:
                asked = answer_to(*_request(sample.group, sample.index))
                self.check(completion.token_ids == asked, f"position {sample.group} has got the answer to another one")
            for weights, label in zip((-completion.logprobs).tolist(), completion.versions.tolist(), strict=True):
                if process := self._wrong.get(round(weights % 1, 6)):
                    self.check(not process.was_probed_wrong, f"step {version} trains a sample of an engine known wrong")
                    weights -= process.error
                real = self._version_of.get(round(weights, 6))
                self.check(real == label, f"a token is labelled version {label}, and was drawn by {real} ({weights})")
                stale = version - label
                self.check(
                    0 <= stale <= self.scenario.max_staleness,
                    f"step {version} trains a token of version {label} of position {sample.group}",
                )
        return trained | positions

    def _check_skipped(self, state: dict[str, Any], trained: frozenset[int]) -> None:
        """Check that a checkpoint calls exactly those positions done that were trained, or cannot be."""
        done = {*range(state["position"]), *state.get("consumed", ())}
        wrong = {each for each in done ^ trained if each in trained or self.scenario.is_usable(each, self.seed)}
        self.check(
            wrong <= self._may_miss | self._saved.may_miss, f"a checkpoint is wrong about the positions {sorted(wrong)}"
        )

    def _check_started(self, running: frozenset[int], trained: frozenset[int], version: int) -> None:
        """Check that every group that has started is trained, will not be trained, or runs; at the end none runs."""
        gone = self._begun_by_life - running - trained - self._may_miss
        lost = [position for position in gone if self.scenario.is_usable(position, self.seed)]
        self.check(not lost, f"the positions {lost} have started, and are neither trained nor running")
        left = [position for position in running if self.scenario.is_usable(position, self.seed)]
        is_last = version + 1 == self.scenario.steps and not self.scenario.max_batches
        self.check(not (is_last and left), f"the positions {left} started and are never trained")

    def _event(self, event: EngineEvent) -> None:
        self.note(str(event))
        if event.state is EngineState.READY and event.previous is EngineState.PROBING:
            self.outcome.joins += event.joins
            self.outcome.restarts += not event.joins
        self.outcome.leaves += event.state is EngineState.LEFT
        if event.state is EngineState.GIVEN_UP:
            self.outcome.given_up += 1
            failures = self.engines[event.engine_id].failures + self.model.failures
            if event.engine_id not in self.scenario.broken:
                self.check(failures >= MAX_RESTARTS, f"engine {event.engine_id} was given up after {failures} faults")

    # The run

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unheard)
        running = asyncio.ensure_future(self._run())
        await asyncio.wait([running], timeout=LONGEST_S)
        self.check(running.done(), "the run does not end")
        self.outcome.seconds = loop.time()
        running.result()

    def _unheard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, (VerlError, Violation, asyncio.CancelledError)):
            self.violations.append(f"an error that nobody heard: {context['message']}: {error!r}")

    async def _run(self) -> None:
        self._build()
        torment = asyncio.ensure_future(self._torment())
        deaths = self.scenario.trainer_deaths
        while True:
            life = asyncio.ensure_future(self._train())
            scaling = asyncio.ensure_future(self._scale())
            kind = self.draw.choice(["controller", "train worker"]) if deaths else ""
            if self._cluster_losses and not kind:
                kind = "GCS"
                self._cluster_losses -= 1
                deaths += 1
            if kind:
                await asyncio.wait([life], timeout=self.draw.uniform(0, 60.0 * self.scenario.steps))
            if kind == "train worker" and not life.done():
                self.note("a train worker dies")
                self.model.is_up = False
            if kind == "controller" and not life.done():
                self.note("the controller dies")
                life.cancel()
            if kind == "GCS" and not life.done():
                await self._lose_cluster(life)
            await asyncio.wait([life])
            scaling.cancel()
            if not life.cancelled() and (error := life.exception()) is None:
                break
            all_left_out = "were not verified" in str(None if life.cancelled() else life.exception())
            if all_left_out:
                self.check(bool(self._may_miss), "samples were left out without a reason")
                deaths += 1
            is_parted = "may still serve" in str(None if life.cancelled() else life.exception())
            deaths += is_parted
            lost = all_left_out or is_parted or not self.model.is_up
            if not life.cancelled() and not (isinstance(error, ProcessLostError) and lost):
                await self._check_end(error)
                return
            deaths -= 1
            self.outcome.resumes += 1
            if self._saving is not None:
                self._saving.cancel()  # what was not written is not there
            await self.supervisor.close()  # whatever it was, all processes end, and others are started
            for pool in self.pools:
                pool.close()
            for engine in self.engines:
                engine.process.die()
            await asyncio.sleep(20)
            self._build()
        await self._check_rest()
        torment.cancel()
        await self.supervisor.close()

    async def _lose_cluster(self, life: asyncio.Task[None]) -> None:
        """Ray's GCS dies: training goes on, until the controller notices, before Ray ends it."""
        self.note("Ray's GCS dies")
        self._has_gcs = False

        async def check(_: Endpoint) -> bool:
            return self._has_gcs

        noticing = asyncio.ensure_future(wait_for_loss([_GCS], check))
        await asyncio.wait([noticing, life], timeout=RAY_S, return_when=asyncio.FIRST_COMPLETED)
        self.check(noticing.done() or life.done(), "nobody noticed that the GCS died")
        noticing.cancel()
        life.cancel()
        self._has_gcs = True

    def _build(self) -> None:
        scenario = self.scenario
        self.model = SimulatedModel(self)
        self.engines = [SimulatedEngine(self, number) for number in range(scenario.engines)]
        self.supervisor = EngineSupervisor(
            self.engines,
            self._event,
            heartbeat_s=15.0,
            reply_timeout_s=ANSWER_S,
            start_timeout_s=START_S,
            max_restarts=MAX_RESTARTS,
            shares_devices=scenario.shares_devices or scenario.lent,
        )
        self.weight_sync = WeightSync(self.model, self.supervisor, HostTransport(), PROBE)
        self.pools = [
            ObservedPool(
                EngineView.of([engine.as_seen_by_workers() for engine in self.engines]),
                stall_timeout_s=scenario.stall_s,
                recovery_timeout_s=PATIENCE_S,
                reply_timeout_s=ANSWER_S,
                poll_interval_s=3.0,
            )
            for _ in range(scenario.workers)
        ]
        for pool in self.pools:
            self.supervisor.follow(partial(self._update, pool))
        self._one_round = asyncio.Lock()
        self.supervisor.start(self.weight_sync.sync_one)

    async def _update(self, pool: ObservedPool, view: EngineView) -> None:
        await asyncio.sleep(self.delay())
        engines = {engine_id: engine.as_seen_by_workers() for engine_id, engine in view.engines.items()}
        await pool.update(EngineView(view.version, engines, view.asleep))

    async def _scale(self) -> None:
        """Let engines join and leave."""
        draw, leaving = random.Random(f"scale {self.seed} {self._life}"), list[asyncio.Future[None]]()
        for _ in range(self.scenario.changes):
            await asyncio.sleep(draw.expovariate(1 / self.scenario.change_every_s))
            if draw.random() < 0.5:
                self.note(f"engine {self.supervisor.add(self._spawn)} joins")
            else:
                engine_id = draw.choice(list(self.supervisor.states))
                leaving.append(asyncio.ensure_future(self._remove(engine_id, draw.choice([5.0, 60.0, 600.0]))))
        await asyncio.gather(*leaving)

    def _spawn(self, engine_id: int) -> SimulatedEngine:
        self.check(engine_id == len(self.engines), f"id {engine_id} was used before")
        self.engines.append(SimulatedEngine(self, engine_id, is_started=False))
        return self.engines[-1]

    async def _remove(self, engine_id: int, drain_timeout_s: float) -> None:
        try:
            await self.supervisor.remove(engine_id, drain_timeout_s=drain_timeout_s)
        except (ValueError, ProcessLostError) as error:  # the last one, leaving already, or not to be reached
            return self.note(f"engine {engine_id} does not leave: {error}")
        self.note(f"engine {engine_id} has left")
        engine = self.engines[engine_id]
        has_ended = not engine.process.is_alive or not engine.is_reachable.is_set()
        self.check(engine.has_left and has_ended, f"engine {engine_id} has left, but did not end")

    async def _train(self) -> None:
        scenario, saved = self.scenario, self._saved
        self._life += 1
        self._may_miss, self._begun_by_life = set(), set()
        stream = PromptStream(SequentialSampler(ROWS))
        if saved.data is not None:
            stream.load(saved.data)
        version = saved.version
        async with self.weight_sync.updating():
            self.model.weights = saved.weights
        self._version_of[saved.weights] = version
        trained = saved.trained
        buffer = EpisodeBuffer(
            self._run_group,
            stream,
            scenario.batch,
            max_staleness=scenario.max_staleness,
            run_ahead=scenario.run_ahead,
            steps=scenario.steps - version,
            signal=FilterGroupsConfig(metric="score", max_num_gen_batches=scenario.max_batches)
            if scenario.dynamic
            else None,
        )
        try:
            await self.weight_sync.sync(version)
            while version < scenario.steps:
                buffer.advance(version)
                samples = await buffer.take(scenario.batch)
                trained = self._check_step(version, samples, trained)
                self._check_skipped(buffer.state(), trained)
                self._check_started(frozenset(buffer._groups), trained, version)
                await self.weight_sync.free_devices()
                with self.model.using(TRAINING):
                    await self.model.compute(2.0)
                async with self.weight_sync.updating():
                    with self.model.using(TRAINING):
                        await self.model.compute(5.0)
                    self.model.weights = version + 1 if scenario.together else version + 1 + 1000.0 * self._life
                    self._version_of[self.model.weights] = version + 1
                    if version + 1 == scenario.diverges_at:
                        self.note("training diverges")
                        self.model.weights = math.nan
                await asyncio.sleep(self.delay())
                await self.weight_sync.sync(version + 1)
                if self.weight_sync.outliers:
                    is_deserved = all(self.engines[index].was_wrong for index in self.weight_sync.outliers)
                    self.check(is_deserved, "an engine was restarted for wrong results without a reason")
                    self._may_miss |= self._begun_by_life
                    buffer.discard_from(self.weight_sync.outliers)
                version += 1
                self.outcome.steps += 1
                self.note(f"step {version} is done")
                if version % scenario.save_every == 0:
                    may_miss = self._saved.may_miss | self._may_miss
                    await self._save(_Checkpoint(version, self.model.weights, buffer.state(), trained, may_miss))
        finally:
            await buffer.close()

    async def _save(self, checkpoint: _Checkpoint) -> None:
        """Write in the background, after what is being written; a slow disk takes as long as several steps."""

        async def write() -> None:
            await asyncio.sleep(self.scenario.save_s)
            self._saved = checkpoint

        if self._saving is not None and not self._saving.done():
            await asyncio.wait([self._saving])
        self._saving = asyncio.ensure_future(write())

    async def _run_group(self, position: int, row: int) -> list[SampleHandle] | None:
        together, place = self.scenario.together, (self._life, position)
        self.check(place not in self._begun, f"position {position} was begun twice")
        self._begun.add(place)
        self._begun_by_life.add(position)
        if position == self.scenario.is_full_at:
            self.note("the object store is full")
            raise StorageError("the object store is full")
        work = asyncio.ensure_future(self._ask_together(position) if together else self._episodes(position))
        # Shielded: an episode worker may not hear that its answer is not waited for any more.
        return await self.supervisor.run_while_available(
            asyncio.shield(work) if together or self.draw.random() < 0.5 else work
        )

    async def _episodes(self, position: int) -> list[SampleHandle] | None:
        if self.scenario.is_left_out(position, self.seed):
            await asyncio.sleep(self.delay())
            return None
        pool = self.pools[position % len(self.pools)]

        async def play(number: int) -> list[Completion]:
            turns = []
            for _ in range(self.scenario.turns):
                turns.append(await pool.generate(*_request(position, number)))
                await asyncio.sleep(self.delay())  # a tool, or the reward
            return turns

        episodes = await asyncio.gather(*(play(number) for number in range(self.scenario.answers)))
        return self._handles(position, episodes)

    async def _ask_together(self, position: int) -> list[SampleHandle] | None:
        """Who asks in one turn of the loop asks together; rounds follow one another."""
        answer: asyncio.Future[list[SampleHandle] | None] = asyncio.get_running_loop().create_future()
        self._round.append((position, answer))
        await asyncio.sleep(0)
        async with self._one_round:
            asked, self._round = self._round, []
            if asked:
                n = self.scenario.answers
                requests = [_request(position, number) for position, _ in asked for number in range(n)]
                completions = await self.pools[0].generate_all(requests)
                for place, (asker, waiting) in enumerate(asked):
                    if not waiting.done():
                        own = [[each] for each in completions[place * n : place * n + n]]
                        waiting.set_result(self._handles(asker, own))
        return await answer

    def _handles(self, position: int, episodes: Sequence[Sequence[Completion]]) -> list[SampleHandle]:
        same = not self.scenario.has_signal(position, self.seed)
        return [
            SampleHandle(
                ref=turns,
                group=position,
                tokens=2 + sum(len(turn.token_ids) for turn in turns),
                generated=sum(len(turn.token_ids) for turn in turns),
                score=0.0 if same else float(number),
                version=min(int(turn.versions.min()) for turn in turns),
                index=number,
                engines=frozenset(turn.engine for turn in turns),
            )
            for number, turns in enumerate(episodes)
        ]

    # The end

    async def _check_end(self, error: BaseException | None) -> None:
        """A run may end early by two errors, if there is reason for them."""
        text = str(error)
        if isinstance(error, EngineError) and "All rollout engines failed" in text:
            states = set(self.supervisor.states.values())
            self.check(states <= {EngineState.GIVEN_UP}, f"it ended although engines are left: {text}")
            self.outcome.ended_early = "no engine left"
        elif isinstance(error, EngineError) and "may be what crashes them" in text:
            self.check(self.outcome.faults >= MAX_LOSSES, f"a request was given up after fewer losses: {text}")
            self.outcome.ended_early = "a request lost too many engines"
        elif isinstance(error, RewardError) and "groups have different scores" in text:
            self.check(self.scenario.max_batches > 0 and not self.is_synchronous, f"the search has ended: {text}")
            self.outcome.ended_early = "no group with signal"
        elif isinstance(error, StorageError):
            self.outcome.ended_early = "the object store is full"
        elif isinstance(error, DivergenceError):
            self.check(math.isnan(self.model.weights), f"training has not diverged: {text}")
            self.check(math.isfinite(self._saved.weights), "a checkpoint has weights that are not finite")
            self.outcome.ended_early = "training diverged"
        elif isinstance(error, WeightSyncError) and "does not hold version" in text:
            wrong = [engine.process.was_probed_wrong for engine in self.engines]
            up = [engine.process.is_enabled for engine in self.engines]
            has_erred = any(process.was_probed_wrong for process in self._wrong.values())  # one may be gone since
            self.check(has_erred, f"no engine was wrong: {text}")
            is_alone = not any(ready and not bad for ready, bad in zip(up, wrong, strict=True))
            self.check(is_alone, f"it ended although another engine was right: {text}")
            self.outcome.ended_early = "all engines returned wrong results"
        else:
            self.violations.append(f"the run ended with {error!r}")
            assert error is not None
            raise Violation(self.violations[-1]) from error

    async def _check_rest(self) -> None:
        """After the last step, whatever was lost comes back, and nobody holds on to anything.

        Where a train worker died in that step, too late to matter, there are no weights to come back with.
        """
        up = (EngineState.READY, EngineState.GIVEN_UP)
        for _ in range(2000):
            if not self.model.is_up or (
                self._faults_left <= 0 and all(state in up for state in self.supervisor.states.values())
            ):
                break
            self._faults_left = 0
            await asyncio.sleep(5)
        else:
            self.check(False, f"engines did not come back: {self.supervisor.states}")
        for pool in self.pools:
            for _ in range(2000):
                if (
                    not any(pool.load)
                    and pool.states.keys() <= self.supervisor.states.keys()
                    and all(
                        self._agrees(state, pool.states.get(engine_id))
                        for engine_id, state in self.supervisor.states.items()
                    )
                ):
                    break
                await asyncio.sleep(5)
            else:
                self.check(
                    False, f"a pool holds on to {pool.load}, or does not see {self.supervisor.states}: {pool.states}"
                )
            self.outcome.retries += pool.retries

    def _agrees(self, kept: EngineState, pooled: EngineState | None) -> bool:
        cannot_come = kept is EngineState.GIVEN_UP or (kept is not EngineState.READY and not self.model.is_up)
        return cannot_come or pooled is EngineState.READY


def _request(position: int, number: int) -> Request:
    return [position, number], SamplingParams(max_tokens=2 + (position + number) % 3, seed=position * 10 + number)
