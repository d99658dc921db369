"""What a seed decides about a simulated run before anything happens: its sizes, its faults, and what it must train."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Scenario:
    """Sizes, faults and delays of one simulated run."""

    engines: int
    workers: int  # episode workers, each with a pool of its own
    batch: int
    answers: int  # to each prompt
    steps: int
    max_staleness: int
    run_ahead: float  # batches
    turns: int  # of an episode
    long_rate: float  # of episodes that take many times as long as others
    dynamic: bool
    max_batches: int
    left_out_rate: float
    save_every: int
    trainer_deaths: int
    faults: int
    fault_every_s: float
    fault_in_call: float
    broken: tuple[int, ...]  # engines that never start again
    token_s: float  # to write one, on average
    together: bool  # requests go out in rounds, and results must not depend on faults
    new_faults: float  # the share of faults that are of `_NEW_FAULTS`
    cluster_losses: int  # of Ray's GCS
    diverges_at: int | None  # the version whose weights are NaN
    is_full_at: int | None  # the position whose samples find a full object store
    save_s: float  # to write a checkpoint
    shares_devices: bool  # engines sleep while the trainer works
    lent: tuple[int, ...]  # otherwise: the engines that do, since only they use its devices
    changes: int  # engines that join or leave, in each life of the controller
    change_every_s: float

    @classmethod
    def draw(cls, seed: int, *, asynchronous: bool = False) -> Scenario:
        """Return what a seed decides; with `asynchronous`, one in which generation may run ahead."""
        draw = random.Random(f"scenario {seed}")
        engines, together = draw.choice([1, 2, 2, 3, 4]), draw.random() < 0.2
        more = random.Random(f"more {seed}")  # of what came later, so that older seeds stay as they are
        dynamic = not together and draw.random() < 0.4
        scenario = cls(
            engines=engines,
            workers=1 if together else draw.randint(1, 3),
            batch=draw.randint(1, 4),
            answers=2 if dynamic else draw.randint(1, 2),  # one alone always has signal
            steps=draw.randint(2, 7),
            max_staleness=0 if together else draw.randint(0, 3),
            run_ahead=0.0,
            turns=1,
            long_rate=0.0,
            dynamic=dynamic,
            max_batches=draw.choice([0, 2, 3, 4]) if dynamic else 0,
            left_out_rate=0.0 if together else draw.choice([0.0, 0.0, 0.1, 0.3]),
            save_every=draw.randint(1, 3),
            trainer_deaths=draw.choice([0, 0, 1, 2]),
            faults=draw.choice([1, 1, 2, 4, 8]),
            fault_every_s=draw.choice([5.0, 20.0, 60.0]),
            fault_in_call=draw.choice([0.0, 0.02, 0.1]),
            broken=tuple(number for number in range(engines) if draw.random() < 0.05),
            token_s=draw.choice([0.3, 3.0]),
            together=together,
            new_faults=more.choice([0.0, 0.3, 0.7]),
            cluster_losses=int(more.random() < 0.15),
            diverges_at=more.randint(1, 6) if more.random() < 0.05 else None,
            is_full_at=more.randint(0, 20) if more.random() < 0.05 else None,
            save_s=more.choice([0.0, 0.0, 20.0, 200.0]),
            shares_devices=False,
            lent=(),
            changes=0,
            change_every_s=0.0,
        )
        if asynchronous:
            staleness = random.Random(f"staleness {seed}").choice([1, 1, 2, 3, 4, 8])
            scenario = replace(scenario, together=False, max_staleness=staleness)
        shares = random.Random(f"shares {seed}").random() < (0.7 if scenario.is_synchronous else 0.4)
        scenario = replace(scenario, shares_devices=shares)
        lends = random.Random(f"lends {seed}")
        if not scenario.together and not shares and engines > 1 and lends.random() < 0.3:
            scenario = replace(scenario, lent=tuple(range(lends.randint(1, engines - 1), engines)))
        if not scenario.is_synchronous:
            ahead = random.Random(f"ahead {seed}")
            run_ahead = scenario.max_staleness * ahead.choice([0.25, 0.5, 1.0])
            turns, long_rate = ahead.choice([1, 1, 2, 3]), ahead.choice([0.0, 0.1, 0.3])
            scenario = replace(scenario, run_ahead=run_ahead, turns=turns, long_rate=long_rate)
        scale = random.Random(f"scale {seed}")
        if not scenario.together and scale.random() < 0.3:
            changes, every_s = scale.choice([2, 5, 10]), scale.choice([5.0, 20.0, 60.0])
            scenario = replace(scenario, changes=changes, change_every_s=every_s)
        empty = scenario.is_synchronous and any(not batch for batch in scenario.batches(seed))
        return replace(scenario, max_batches=0) if empty else scenario

    @property
    def is_synchronous(self) -> bool:
        return self.max_staleness == 0

    def without_faults(self) -> Scenario:
        calm = {"diverges_at": None, "is_full_at": None, "cluster_losses": 0}
        return replace(self, faults=0, fault_in_call=0.0, broken=(), trainer_deaths=0, **calm)

    def is_left_out(self, position: int, seed: int) -> bool:
        return _chance("left out", seed, position) < self.left_out_rate

    def has_signal(self, position: int, seed: int) -> bool:
        return not self.dynamic or _chance("signal", seed, position) < 0.6

    @property
    def stall_s(self) -> float:
        """How long an engine may finish nothing; longer than any response takes."""
        return 2_000.0 if self.long_rate else 90.0

    def slowness(self, position: int, number: int) -> float:
        """How many times as long as others an episode takes."""
        draw = random.Random(f"long {position} {number}")
        return draw.choice([5.0, 20.0]) if draw.random() < self.long_rate else 1.0

    def is_usable(self, position: int, seed: int) -> bool:
        return not self.is_left_out(position, seed) and self.has_signal(position, seed)

    def batches(self, seed: int) -> list[list[int]]:
        """The positions that each step of a synchronous run has to train, written down without any concurrency."""
        batches, position = [], 0
        for _ in range(self.steps):
            batch: list[int] = []
            looked_at = 0
            while len(batch) < self.batch and not (self.max_batches and looked_at == self.max_batches * self.batch):
                if not self.is_left_out(position, seed):
                    looked_at += 1
                    if self.has_signal(position, seed):
                        batch.append(position)
                position += 1
            batches.append(batch)
        return batches


def _chance(what: str, seed: int, position: int) -> float:
    return random.Random(f"{what} {seed} {position}").random()
