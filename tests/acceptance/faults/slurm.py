"""A run survives Slurm: preempted or canceled, it saves in time, resumes at the next step and ends with the same bits.

A real Slurm of two nodes on this machine, to which `examples/slurm/ray_on_slurm.slurm` itself is submitted, with a tiny
model (`trainer.deterministic=True`, one train rank per node). One job runs undisturbed. Another one is preempted
by jobs of higher priority, saves within the grace time and requeues itself; or it is canceled, saves, is not requeued,
and is submitted again. Nothing else saves. Each step must run once; all metrics but times, and all tensors of the last
checkpoint, must equal those of the undisturbed run; the run prints no traceback; all steps of the job have the
CPUs of the job; and no process is left.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import ROOT, finish, left_behind, sized_for_addition, skip
from _compared_runs import compare_steps, compare_tensors, read_steps

from verl.cluster.actors import free_port
from verl.demo.assets import make_assets

from slurm_cluster import SlurmCluster, find_obstacle, slurm_cluster, wait_until  # isort: skip - _common sets the path

EXAMPLE = ROOT / "examples/slurm/ray_on_slurm.slurm"
NODES, CPUS = 2, 2
GRACE_S, KILL_WAIT_S = 60, 30  # after preemption and after scancel, until SIGKILL; 30 is Slurm's default
PATIENCE_S = 600.0
PREEMPTION, SCANCEL = "preemption", "scancel"
SHORT_EVENTS = (PREEMPTION, SCANCEL)
EVENTS = (PREEMPTION, PREEMPTION, SCANCEL, PREEMPTION, SCANCEL, PREEMPTION, PREEMPTION)
STEPS_OF_A_START = 10  # more than run until an event has reached the run, on average
MARK = f"VERL_SHOW_{secrets.token_hex(8)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one preemption and one scancel")
    parser.add_argument("--engine", choices=["vllm", "hf"], help="vllm; hf in the short form")
    options = parser.parse_args()
    engine = options.engine or ("hf" if options.short else "vllm")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the daemons are stopped all the same
    if obstacle := find_obstacle():
        skip("slurm", f"no Slurm on this machine: {obstacle}")
    events = SHORT_EVENTS if options.short else EVENTS
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:
        folder = Path(directory)
        make_assets(folder)
        with slurm_cluster(folder / "slurm", nodes=NODES, cpus=CPUS, grace_s=GRACE_S, kill_wait_s=KILL_WAIT_S) as slurm:
            slurm.environment |= {
                MARK: "1",
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "RAY_PORT": str(free_port()),
                "RAY_TMPDIR": str(folder),  # not where other runs look for a cluster
            }
            steps = STEPS_OF_A_START * (len(events) + 1)
            whole = Run(slurm, folder, "whole", steps, engine)
            whole.play([])
            if not whole.has_finished:
                finish("slurm", False, reason="the undisturbed run failed", faults=whole.faults)
            run = Run(slurm, folder, "disturbed", steps, engine)
            run.play(events)
        differences = run.compare(whole)
    left = left_behind(MARK)
    finish(
        "slurm",
        run.has_finished and not differences and not run.faults and not left,
        preemptions=sum(stop.event == PREEMPTION for stop in run.stops),
        scancels=sum(stop.event == SCANCEL for stop in run.stops),
        engine=engine,
        steps=steps,
        steps_lost=sum(stop.last_step - stop.saved_step for stop in run.stops),
        seconds_to_save_and_end=[stop.seconds for stop in run.stops],
        faults=run.faults,
        differences=differences,
        processes_left=left,
    )


@dataclass(frozen=True, slots=True)
class Stop:
    """A preemption or cancellation, and what it cost."""

    event: str
    last_step: int
    saved_step: int
    seconds: float  # until it had saved, and the job had ended or was requeued


class Run:
    """A run of the example, over all its jobs."""

    def __init__(self, slurm: SlurmCluster, folder: Path, name: str, steps: int, engine: str) -> None:
        self.folder, self._slurm, self._name, self._steps = folder / name, slurm, name, steps
        self._output = folder / f"{name}.out"
        self._settings = [
            *sized_for_addition(folder),
            f"trainer.default_local_dir={self.folder}",
            "trainer.resume_mode=auto",
            "trainer.deterministic=True",
            "trainer.n_gpus_per_node=1",
            f"actor_rollout_ref.rollout.name={engine}",
            "data.train_batch_size=8",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            f"reward.custom_reward_function.path={Path(__file__).with_name('_slow_rewards.py')}",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=1000",  # only on SIGTERM, and after the last step
            "trainer.val_before_train=False",
        ]
        self.stops: list[Stop] = []
        self.faults: list[str] = []
        self.has_finished = False

    def play(self, events: Sequence[str]) -> None:
        """Run until the last step, or until a job does not do what it should."""
        try:
            job = self._submit()
            for event in events:
                step = self._last_step()
                self._wait(job, lambda step=step: self._last_step() > step, "the next step")
                self._check_cpus(job)
                job = self._disturb(job, event)
            self._wait(job, lambda: self._state(job) == "COMPLETED", "the end of the run")
            self.has_finished = self._last_step() == self._saved_step() == self._steps
        except (RuntimeError, TimeoutError) as error:
            self.faults.append(str(error))
        finally:
            output = self._output.read_text() if self._output.exists() else ""
            print(f"──── {self._name}\n{output}", flush=True)
        if "Traceback" in output:
            self.faults.append("a traceback")
        if (saves := output.count("saved and stopped after step")) != len(self.stops):
            self.faults.append(f"{saves} of {len(self.stops)} jobs said that they had saved")

    def _submit(self) -> str:
        node = (f"--nodes={NODES}", f"--cpus-per-task={CPUS}", "--gpus-per-node=0", f"--output={self._output}")
        return self._slurm.submit(*node, str(EXAMPLE), *self._settings)

    def _disturb(self, job: str, event: str) -> str:
        """Preempt or cancel the job; return the one that resumes the run."""
        start, restarts = time.monotonic(), self._restarts(job)
        if event == PREEMPTION:
            self._slurm.preempt(NODES)
            self._wait(job, lambda: self._restarts(job) > restarts, "the job to be requeued")
        else:
            self._slurm.call("scancel", job)
            self._wait(job, lambda: self._state(job) == "CANCELLED", "the job to end")
            if self._restarts(job) > restarts:
                self.faults.append("the canceled job was requeued")
        stop = Stop(event, self._last_step(), self._saved_step(), round(time.monotonic() - start, 1))
        print(f"{self._name}: {stop}", flush=True)
        self.stops.append(stop)
        return job if event == PREEMPTION else self._submit()

    def _wait(self, job: str, is_true: Callable[[], bool], what: str) -> None:
        def is_over() -> bool:
            return is_true() or self._state(job) in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        wait_until(is_over, what, PATIENCE_S)
        if not is_true():
            raise RuntimeError(f"{self._name}: waited for {what}, and the job was {self._state(job)}")

    def _state(self, job: str) -> str:
        return self._slurm.describe_job(job)["JobState"]

    def _restarts(self, job: str) -> int:
        return int(self._slurm.describe_job(job)["Restarts"])

    def _check_cpus(self, job: str) -> None:
        """Those of Ray and verl; the first step of a job is its script."""
        steps = self._slurm.call("scontrol", "--oneliner", "show", "step", job).splitlines()
        found = [step for step in steps if ".batch" not in step]
        if len(found) != 2 or not all(re.search(rf"TresPerTask=cpu[:=]{CPUS}\b", step) for step in found):
            self.faults.append(f"the steps of the job have other CPUs than the job: {found}")

    def _saved_step(self) -> int:
        file = self.folder / "latest_checkpointed_iteration.txt"
        return int(file.read_text()) if file.exists() else 0

    def _last_step(self) -> int:
        return max((line["step"] for line in read_steps(self.folder)), default=0)

    def compare(self, other: Run) -> list[str]:
        """Return what differs from another run that has finished: repeated or missing steps, metrics, and tensors."""
        if not self.has_finished:
            return ["the run has not finished"]
        folders = (self.folder, other.folder)
        return [*compare_steps(*folders), *compare_tensors(*folders, self._steps)]


if __name__ == "__main__":
    main()
