"""A real Slurm cluster on this machine: several `slurmd`, each a node to Slurm. Needs root, slurm-wlm and munge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

__all__ = ["SlurmCluster", "find_obstacle", "slurm_cluster", "wait_until"]

LOW, HIGH = "low", "high"  # partitions: jobs of the second one preempt those of the first one
_DAEMONS = ("munged", "slurmctld", "slurmd")
_WAIT_S = 60.0
_FIRST_PORT = 16_820


def find_obstacle() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    if missing := [name for name in (*_DAEMONS, "sbatch") if _find(name) is None]:
        return f"not installed: {', '.join(missing)} (apt-get install -y --no-install-recommends slurm-wlm munge)"
    return None


class SlurmCluster:
    """Runs commands of Slurm on the cluster. Jobs inherit `environment`."""

    def __init__(self, folder: Path) -> None:
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """Return what a command such as `squeue` prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def submit(self, *arguments: str) -> str:
        """Submit a job with `sbatch`; return its id."""
        return self.call("sbatch", "--parsable", *arguments)

    def describe_job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job, such as its `JobState`."""
        fields = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def preempt(self, nodes: int) -> str:
        """Submit a job of a second that needs `nodes` whole nodes, and takes them from jobs of lower priority."""
        job = (f"--partition={HIGH}", f"--nodes={nodes}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        return self.submit(*job)


@contextmanager
def slurm_cluster(folder: Path, *, nodes: int, cpus: int, grace_s: int, kill_wait_s: int) -> Iterator[SlurmCluster]:
    """Start a cluster whose files are in `folder`; at the end, cancel all jobs and stop all daemons."""
    _write_settings(folder, nodes, cpus, grace_s, kill_wait_s)
    cluster, socket_file = SlurmCluster(folder), folder / "munge.socket"
    munged = ["munged", "--foreground", "--force", f"--socket={socket_file}", f"--key-file={folder / 'munge.key'}"]
    munged += [f"--{name}-file={folder / f'munge.{name}'}" for name in ("pid", "log", "seed")]
    with ExitStack() as daemons:
        daemons.enter_context(_daemon(folder / "munged.log", cluster, munged))
        wait_until(socket_file.exists, "munged")
        daemons.enter_context(_daemon(folder / "slurmctld.log", cluster, ["slurmctld", "-D", "-c"]))
        for index in range(1, nodes + 1):
            node = ["slurmd", "-D", "-N", f"n{index}"]
            daemons.enter_context(_daemon(folder / f"slurmd-n{index}.log", cluster, node))
        wait_until(lambda: _are_idle(cluster), "idle nodes")
        daemons.callback(_end_jobs, cluster)
        yield cluster


def wait_until(is_true: Callable[[], object], what: str, timeout_s: float = _WAIT_S) -> None:
    """Wait until a condition is true; raise TimeoutError after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > until:
            raise TimeoutError(f"Timed out after {timeout_s:.0f} s waiting for {what}")
        time.sleep(0.2)


def _write_settings(folder: Path, nodes: int, cpus: int, grace_s: int, kill_wait_s: int) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.touch(0o400)
    key.write_bytes(os.urandom(128))
    host = socket.gethostname()
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={_FIRST_PORT}",
        "AuthType=auth/munge",
        # A requeued job waits until the credentials of its last start have expired: 120 s by default, 5 s at least.
        f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/affinity",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "SchedulerParameters=sched_interval=2,bf_interval=2",
        f"KillWait={kill_wait_s}",
        "MpiDefault=none",
        "ReturnToService=2",
    ]
    for index in range(1, nodes + 1):
        port = _FIRST_PORT + index
        lines.append(f"NodeName=n{index} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN")
    every = f"Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP"
    lines.append(f"PartitionName={LOW} {every} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}")
    lines.append(f"PartitionName={HIGH} {every} PriorityTier=10")
    (folder / "slurm.conf").write_text("\n".join([*lines, ""]))


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextmanager
def _daemon(log_file: Path, cluster: SlurmCluster, command: list[str]) -> Iterator[None]:
    """Run a daemon in the foreground, and stop it at the end."""
    program = _find(command[0])
    assert program is not None
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [program, *command[1:]], env=cluster.environment, stdout=log, stderr=log, process_group=0
        )  # not in the group of the test, which may be signaled: jobs are ended first
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _end_jobs(cluster: SlurmCluster) -> None:
    for job in cluster.call("squeue", "--noheader", "--format=%i").split():
        cluster.call("scancel", job)
    wait_until(lambda: not cluster.call("squeue", "--noheader"), "the end of all jobs", 2 * _WAIT_S)


def _are_idle(cluster: SlurmCluster) -> bool:
    with suppress(RuntimeError):
        return set(cluster.call("sinfo", "--noheader", "--format=%T").split()) == {"idle"}
    return False
