"""A run can die anywhere and nothing is lost: SIGKILL at random moments, and the weights at the end are the same bits.

One run that nobody disturbs; then runs of the same settings (`trainer.deterministic=True`, vLLM, two train ranks) whose
processes are killed: the controller (the command is then started again, as Slurm would), train workers, engine
processes, reward workers, episode workers, Ray's GCS and the raylet of the machine (the run starts another cluster),
and the second node of a two-raylet cluster (another joins soon).
Every run must finish; each step must have trained on exactly the next prompts of the stream; all metrics but times,
and all tensors of the last checkpoint, must equal those of the undisturbed run. A node that is lost for good shrinks
the run to one rank, whose bits are others: of that the steps and their prompts are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import ROOT, finish, left_behind, metrics_of, sized_for_addition
from rotation import GROUPS, count_commits

from verl.checkpoint.shards import read_tensors
from verl.demo.assets import make_assets

STEPS, BATCH = 20, 8
RECOVERY_S = 900.0
ENGINES = ("engine process", "rollout actor")
TOKEN = secrets.token_hex(32)
MARK = f"VERL_SHOW_{secrets.token_hex(8)}"
NODE, NODE_FOR_GOOD = "node", "node for good"
SHORT = (["controller", "engine process"], ["train worker", "reward worker"])  # victims
IGNORED = ("time", "timing_s/", "perf/", "faults/")
PROOF = "weights/probe_gap"


@dataclass
class Kill:
    """One SIGKILL, and what came of it."""

    victim: str
    at: float
    after_step: int  # the last that had been done
    recovered_s: float | None = None
    steps_again: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=46)
    parser.add_argument("--a-run", type=int, default=5, help="kills of one run")
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--seed", type=int, help="a new one each time; in the short form always the same")
    parser.add_argument("--short", action="store_true", help="one run and two kills, of others at other commits")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = 7 if options.short else random.randrange(10**6)
    chance = random.Random(options.seed)
    print(f"seed {options.seed}")
    victims = options.victims.split(",")
    with tempfile.TemporaryDirectory(prefix="verl-kills-") as directory:
        folder = Path(directory)
        make_assets(folder)
        undisturbed: dict[int, Disturbed] = {}  # by the number of engines
        runs: list[Disturbed] = []

        def play(run: Disturbed) -> None:
            if run.engines not in undisturbed:
                other = Disturbed(folder, f"undisturbed-{run.engines}", None, [], chance, engines=run.engines)
                other.play()
                if not other.has_finished:
                    finish("kills", False, reason="the run that nobody disturbed failed")
                undisturbed[run.engines] = other
            run.play()
            run.compare(undisturbed[run.engines])
            runs.append(run)
            report(runs)

        if options.short:
            victims = SHORT[count_commits() // GROUPS % len(SHORT)]
            play(Disturbed(folder, "run-0", None, list(victims), chance, engines=1))
        else:
            while (left := options.kills - sum(len(run.kills) for run in runs)) > 0:
                victim = victims[len(runs) % len(victims)]
                with two_nodes() if victim in (NODE, NODE_FOR_GOOD) else contextlib.nullcontext() as cluster:
                    wanted = [victim] * min(left, 1 if victim == NODE_FOR_GOOD else options.a_run)
                    engines = 2 if victim in ENGINES else 1  # with one the runs are quicker, with two one takes over
                    play(Disturbed(folder, f"run-{len(runs)}", cluster, wanted, chance, engines=engines))
    kills = [kill for run in runs for kill in run.kills]
    recovered = [kill for kill in kills if kill.recovered_s is not None]
    left, spared = left_behind(MARK), sorted({*victims} - {kill.victim for kill in kills})
    as_promised = all(run.has_finished and not run.differences for run in runs)
    finish(
        "kills",
        as_promised and len(recovered) == len(kills) > 0 and not spared and not left,
        seed=options.seed,
        kills=len(kills),
        recovered=len(recovered),
        runs=len(runs),
        runs_finished=sum(run.has_finished for run in runs),
        runs_as_promised=sum(run.has_finished and not run.differences for run in runs),
        seconds_to_recover=round(sum(kill.recovered_s or 0 for kill in recovered) / max(1, len(recovered)), 1),
        steps_repeated=sum(kill.steps_again for kill in kills),
        victims_not_found=spared,
        processes_left=left,
    )


class Disturbed:
    """A run of `verl train` and the kills that it suffers. A controller that was killed is started again."""

    def __init__(
        self,
        folder: Path,
        name: str,
        cluster: TwoNodes | None,
        wanted: list[str],
        chance: random.Random,
        *,
        engines: int,
    ) -> None:
        self.engines = engines
        self.folder, self._name, self._cluster, self._chance = folder / name, name, cluster, chance
        self._wanted = list(wanted)
        self._settings = [
            *sized_for_addition(folder),
            f"trainer.default_local_dir={self.folder}",
            "trainer.resume_mode=auto",
            "trainer.deterministic=True",
            f"data.train_batch_size={BATCH}",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.use_kl_loss=True",
            f"reward.custom_reward_function.path={Path(__file__).with_name('_slow_rewards.py')}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=1",
            f"actor_rollout_ref.rollout.num_engines={engines}",
            "trainer.max_ckpts_to_keep=2",
            "trainer.val_before_train=False",
            "trainer.faults.max_restarts=10",
        ]
        if cluster is not None:
            self._settings.append(f"ray_kwargs.ray_init.address={cluster.address}")
        self._shrinks = NODE_FOR_GOOD in wanted
        if self._shrinks:
            self._settings.append("trainer.faults.on_lost_node=shrink")
        self.kills: list[Kill] = []
        self.differences: list[str] = []
        self.has_finished = False
        self._step = 0
        self._steps: list[tuple[float, int]] = []  # when a step was done, and which
        self._noticed: list[float] = []  # when the run said that it lost something
        self._process: subprocess.Popen[str] | None = None

    def play(self) -> None:
        """Until the run has finished, or does not come back."""
        while True:
            code = self._run_once()
            if code == -signal.SIGKILL and self.kills and self.kills[-1].victim == "controller":
                continue
            break
        self._settle()
        self.has_finished = code == 0 and self._step == STEPS
        if not self.has_finished:
            print(f"{self._name}: ended with {code} after step {self._step}")

    def _run_once(self) -> int:
        command = [sys.executable, "-m", "verl", "train", *self._settings]
        environment = dict(os.environ) | ({} if self._cluster is None else self._cluster.environment) | {MARK: "1"}
        self._process = process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, env=environment
        )
        ended = threading.Event()
        killing = threading.Thread(target=self._kill_now_and_then, args=(process, ended), daemon=True)
        killing.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.match(r"step +(\d+)/", line):
                    self._step = int(found[1])
                    self._steps.append((time.monotonic(), self._step))
                if "restarting all processes" in line or re.search(r"rollout engine \d+ is lost", line):
                    self._noticed.append(time.monotonic())
                if not line.startswith(("──", "prompts a", "answers", "tokens", "...", "samples", "micro", "train r")):
                    print(f"{self._name}| {line}", end="", flush=True)
            return process.wait(timeout=60)
        finally:
            ended.set()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            killing.join()

    def _kill_now_and_then(self, process: subprocess.Popen[str], ended: threading.Event) -> None:
        while self._wanted and not ended.is_set():
            # Most kills hit a run that goes on, after some part of a step; some hit one that is still coming back.
            since, patience = len(self._steps), time.monotonic() + RECOVERY_S
            if self._chance.random() < 0.85 or not self._steps:
                while len(self._steps) == since and not ended.is_set():
                    if time.monotonic() > patience:
                        print(f"{self._name}: no step for {RECOVERY_S:.0f} s: given up")
                        return process.kill()
                    ended.wait(0.05)
            ended.wait(self._chance.uniform(0.0, 2.0))
            if ended.is_set() or self._step >= STEPS - 1:
                return
            victim = self._wanted[0]
            if (pid := VICTIMS[victim](process.pid, self._cluster, self._chance)) is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                kill = Kill(victim, time.monotonic(), self._step)
                self.kills.append(kill)
                os.kill(pid, signal.SIGKILL)
                self._wanted.pop(0)
                print(f"{self._name}: killed {victim} {pid} after step {kill.after_step}", flush=True)
            if victim == NODE and self._cluster is not None:
                self._cluster.replace()

    def _settle(self) -> None:
        ends = [kill.at for kill in self.kills[1:]] + [math.inf]
        for kill, next_one in zip(self.kills, ends, strict=False):
            # A step that was nearly done may come before anybody notices: that is no recovery.
            since = next((at for at in self._noticed if kill.at < at < next_one), kill.at)
            later = [(at, step) for at, step in self._steps if at > since]
            kill.recovered_s = later[0][0] - kill.at if later else None
            furthest = max((step for at, step in self._steps if at <= since), default=0)
            kill.steps_again = sum(at < next_one and step <= furthest for at, step in later)

    def compare(self, other: Disturbed) -> None:
        """What differs from the run that nobody disturbed."""
        if not self.has_finished:
            self.differences = ["not finished"]
            return
        own, expected = self._metrics(), other._metrics()
        self.differences = [f"step {step}: not trained on once" for step in expected if len(own.get(step, [])) != 1]
        for step, lines in own.items():
            for line in lines:
                if line["data/position"] != step * BATCH:
                    self.differences.append(f"step {step}: data position {line['data/position']}")
                if self._shrinks:
                    continue
                same = {**line, PROOF: line.get(PROOF, expected[step][0][PROOF])}  # nobody is proved while all are away
                wrong = [name for name, value in expected[step][0].items() if same.get(name) != value]
                self.differences += [f"step {step}: {name}" for name in wrong]
        if not self._shrinks:  # on another number of ranks the bits are others
            mine, theirs = self._tensors(), other._tensors()
            self.differences += [f"tensor {name}: missing" for name in mine.keys() ^ theirs.keys()]
            both = sorted(mine.keys() & theirs.keys())
            self.differences += [f"tensor {name}" for name in both if not torch.equal(mine[name], theirs[name])]
        self.differences = list(dict.fromkeys(self.differences))
        if self.differences:
            print(f"{self._name} differs: {self.differences[:8]} ({len(self.differences)} in all)")

    def _metrics(self) -> dict[int, list[dict[str, Any]]]:
        found: dict[int, list[dict[str, Any]]] = {}
        for line in metrics_of(self.folder):
            if "reward/mean" in line:
                kept = {name: value for name, value in line.items() if not name.startswith(IGNORED)}
                found.setdefault(line["step"], []).append(kept)
        return found

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(read_tensors(self.folder / f"global_step_{STEPS}" / "actor"))


# ---- who is killed


def _below(pid: int, name: str) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    found.append(process)
    return found


def _any(name: str) -> Callable[[int, Any, random.Random], int | None]:
    def choose(controller: int, cluster: TwoNodes | None, chance: random.Random) -> int | None:
        found = sorted(process.pid for process in _below(controller, name))
        return chance.choice(found) if found else None

    return choose


def _named(name: str) -> Callable[[int, Any, random.Random], int | None]:
    """A process of the cluster that the controller has started."""

    def choose(controller: int, cluster: TwoNodes | None, chance: random.Random) -> int | None:
        return next((process.pid for process in _below(controller, name) if process.name() == name), None)

    return choose


def _reward_worker(controller: int, cluster: TwoNodes | None, chance: random.Random) -> int | None:
    """A process that scores: below its supervisor, below the episode worker."""
    found = []
    for supervisor in _below(controller, "verl.rewards.pool.supervisor"):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child.pid for child in supervisor.children()]
    return chance.choice(sorted(found)) if found else None


VICTIMS: dict[str, Callable[[int, Any, random.Random], int | None]] = {
    "controller": lambda controller, cluster, chance: controller,
    "train worker": _any("ray::TrainWorker"),
    ENGINES[0]: _any("VLLM::EngineCore"),
    ENGINES[1]: _any("ray::RolloutActor"),
    "reward worker": _reward_worker,
    "episode worker": _any("ray::EpisodeWorker"),
    "GCS": _named("gcs_server"),
    "head raylet": _named("raylet"),
    NODE: lambda controller, cluster, chance: cluster.second_raylet(),
    NODE_FOR_GOOD: lambda controller, cluster, chance: cluster.second_raylet(),
}


class TwoNodes:
    """A cluster of two raylets on this machine, one core each: real nodes to Ray."""

    def __init__(self) -> None:
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        os.environ.update(self.environment)
        from ray.cluster_utils import Cluster  # reads the environment once

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.address = self._cluster.address
        self._second = self._start_second()
        while self.second_raylet() is None:
            time.sleep(0.5)
        time.sleep(5)  # until it is known to the first

    def _start_second(self) -> subprocess.Popen[bytes]:
        ray = Path(sys.executable).with_name("ray")
        command = [ray, "start", "--address", self.address, "--num-cpus=1", "--block"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def second_raylet(self) -> int | None:
        found = _below(self._second.pid, "raylet/raylet")
        return found[0].pid if found else None

    def replace(self) -> None:
        """The node that was killed is gone; after a moment there is another."""
        self._second.wait(timeout=60)
        time.sleep(3)
        self._second = self._start_second()

    def close(self) -> None:
        self._second.terminate()
        self._cluster.shutdown()


@contextlib.contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    cluster = TwoNodes()
    try:
        yield cluster
    finally:
        cluster.close()


def report(runs: list[Disturbed]) -> None:
    print(f"\n{'victim':<16}{'kills':>6}{'recovered':>11}{'seconds: mean':>15}{'worst':>8}{'steps again':>13}")
    kills = [kill for run in runs for kill in run.kills]
    for victim in dict.fromkeys(kill.victim for kill in kills):
        of = [kill for kill in kills if kill.victim == victim]
        seconds = [kill.recovered_s for kill in of if kill.recovered_s is not None]
        mean, worst = sum(seconds) / max(1, len(seconds)), max(seconds, default=0.0)
        again = sum(kill.steps_again for kill in of)
        print(f"{victim:<16}{len(of):>6}{len(seconds):>11}{mean:>15.1f}{worst:>8.1f}{again:>13}")
    print(flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
