"""A run over two machines survives the loss of one: two real Ray nodes with addresses of their own.

make show-cluster [ARGS="[--short] [--engine vllm|hf]"]

Each node has namespaces of Linux (`tests/network_nodes.py`): its own address, processes, host name, `/dev/shm` and
temporary files. The folder of the run is shared, as clusters have it. On both nodes the host name means 127.0.1.1, and
ranks that listen there, as torch lets them, do not meet; this is tried first. Ray is started as docs/clusters.md says,
and `verl train` (GRPO, `trainer.deterministic=True`) has a train rank and an engine on each node. One run is
undisturbed. In others the second node is killed and started again, or the head with the controller is (the command is
repeated), or the second one is unplugged for a while. These have to end with the same metrics and tensors. A node that
is lost for good shrinks the run to one rank, whose bits are others: of that the steps and their prompts are compared.

The train ranks have to listen at the address of their node only and be connected over it, nothing may listen outside of
the namespaces, and nothing may be left at the end. The manifests of examples/kubernetes and examples/skypilot are
validated by the schemas of Kubernetes and by SkyPilot itself where pip can install them, else by the tests alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
from _common import REWARDS, ROOT, finish, left_behind, sized_for_addition, skip
from _compared_runs import compare_steps, compare_tensors, read_steps

from verl.child_process import end_with_parent
from verl.demo.assets import make_assets

from network_nodes import (  # isort: skip - _common sets the path
    Listener,
    Node,
    enclose,
    find_obstacle,
    get_network,
    list_connections,
    list_listeners,
    list_networks,
    make_bridge,
    select_network,
)

BATCH, PORT = 8, 6379
WORKER_PORTS = range(10_002, 20_000)
"""The ports that Ray gives to its workers, by default; other sockets have ports above them."""
MARK = "VERL_SHOW_CLUSTER"
PATIENCE_S = 600.0
RESTARTING, RESUMED, SHRUNK = "restarting all processes", "continuing with step", "continuing with 1 train ranks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the second node alone is killed; no validators")
    parser.add_argument("--engine", choices=["vllm", "hf"], help="vllm; hf in the short form")
    parser.add_argument("--only", choices=list(EVENTS), help="one event alone")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # in the namespaces: the folder of all files
    options = parser.parse_args()
    names = [options.only] if options.only else list(EVENTS)[:1] if options.short else list(EVENTS)
    engine = options.engine or ("hf" if options.short else "vllm")
    if options.inside is not None:
        return run_inside(options.inside, names, engine)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if obstacle := find_obstacle():
        skip("cluster", obstacle)
    networks, mark = list_networks(), f"{MARK}_{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="cluster-") as directory:
        folder = Path(directory)
        manifests = validate_manifests(None if options.short else folder)
        make_assets(folder)
        command = [sys.executable, __file__, "--inside", str(folder), f"--engine={engine}"]
        command += [f"--only={options.only}"] if options.only else ["--short"] * options.short
        outside = run_enclosed(command, mark)
        file = folder / "figures.json"
        figures = json.loads(file.read_text()) if file.exists() else {"faults": ["no figures"]}
    left = left_behind(mark)
    new_networks = sorted(set(list_networks()) - set(networks))
    passed = figures.pop("pass", False) and not (outside or left or new_networks or manifests["faults"])
    finish(
        "cluster",
        passed,
        engine=engine,
        **figures,
        listening_outside=outside,
        networks_left=new_networks,
        processes_left=left,
        manifests=manifests,
    )


def run_enclosed(command: list[str], mark: str) -> list[str]:
    """Run a command in namespaces; return what its processes have listened on outside of them."""
    process = subprocess.Popen(enclose(command), env=os.environ | {mark: "1"}, preexec_fn=end_with_parent)
    found: set[str] = set()
    try:
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendants = psutil.Process(process.pid).children(recursive=True)
                outside = list_listeners(select_network(descendants, get_network("self")))
                found |= {f"{each.address}:{each.port} {each.command[:80]}" for each in outside}
            time.sleep(5)
    finally:
        process.kill()  # and with it everything in the namespaces
        process.wait()
    return sorted(found)


# ---- in the namespaces


@dataclass
class Cluster:
    """Two nodes, with Ray on both."""

    folder: Path
    head: Node = field(init=False)
    second: Node = field(init=False)
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        temporary = self.folder / "local"
        make_bridge()
        self.head, self.second = (Node(number, self.folder, temporary) for number in (1, 2))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_", "NCCL_"))}
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = kept | token | {"TMPDIR": str(temporary), "RAY_USAGE_STATS_ENABLED": "0"}

    def start_ray(self) -> None:
        self._start(self.head, "--head", f"--port={PORT}", "--include-dashboard=false")
        self.join()

    def join(self) -> None:
        self._start(self.second, f"--address={self.head.address}:{PORT}")

    def _start(self, node: Node, *arguments: str) -> None:
        """Start Ray on a node; what a lost network has left there is stopped first.

        Ray waits for its own processes for 30 s at most: on a busy machine it is started again.
        """
        until = time.monotonic() + PATIENCE_S
        while True:
            if any(process.name() in ("gcs_server", "raylet") for process in node.list_processes()):
                self._run(node, "stop", "--force")
            done = self._run(node, "start", "--num-cpus=1", *arguments)
            if done.returncode == 0:
                return
            problem = done.stdout.strip().splitlines()[-1]
            print(f"Ray did not start on {node.name}: {problem}", flush=True)
            if time.monotonic() > until:
                raise RuntimeError(f"Ray did not start on {node.name}: {problem}")

    def _run(self, node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = node.enter([str(Path(sys.executable).with_name("ray")), *arguments])
        return subprocess.run(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )


class Run:
    """A run of `verl train` on the head, over both nodes."""

    def __init__(self, cluster: Cluster, name: str, engine: str, steps: int, *settings: str) -> None:
        self.cluster, self.name, self.steps, self.folder = cluster, name, steps, cluster.folder / name
        self.faults: list[str] = []
        self.seconds = 0.0
        self.lines: list[str] = []
        self._settings = [
            *sized_for_addition(cluster.folder),
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={self.folder}",
            "trainer.resume_mode=auto",
            "trainer.deterministic=True",
            "trainer.save_freq=1",
            "trainer.max_ckpts_to_keep=2",
            f"trainer.total_training_steps={steps}",
            "trainer.val_before_train=False",
            f"data.train_batch_size={BATCH}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            f"actor_rollout_ref.rollout.name={engine}",
            "actor_rollout_ref.rollout.n=4",
            f"reward.custom_reward_function.path={REWARDS}",
            *settings,
        ]

    def start(self) -> None:
        command = [sys.executable, "-m", "verl", "train", *self._settings]
        self._process = subprocess.Popen(
            self.cluster.head.enter(command),
            env=self.cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line)
            print(f"{self.name}| {line}", end="", flush=True)

    def wait_for(self, is_true: Callable[[], object], what: str) -> None:
        """Wait until a condition is true; raise if the run ends before, or nothing happens."""
        until = time.monotonic() + PATIENCE_S
        while not is_true():
            if self._process.poll() is not None:
                raise RuntimeError(f"ended with {self._process.returncode} before {what}")
            if time.monotonic() > until:
                raise RuntimeError(f"waited {PATIENCE_S:.0f} s for {what}")
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.last_step() >= step, f"step {step}")

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: any(text in line for line in self.lines), repr(text))

    def last_step(self) -> int:
        found = [re.match(r"step +(\d+)/", line) for line in self.lines]
        return max((int(each[1]) for each in found if each), default=0)

    def play(self, disturb: Callable[[Run], None]) -> None:
        """Run until the last step, disturbed in the meantime."""
        start = time.monotonic()
        try:
            self.start()
            disturb(self)
            if code := self._process.wait(PATIENCE_S):
                raise RuntimeError(f"ended with {code}")
            if self.last_step() != self.steps:
                raise RuntimeError(f"ended after step {self.last_step()}")
        except (RuntimeError, subprocess.SubprocessError) as error:
            self.faults.append(f"{self.name}: {error}")
        finally:
            self._end()
            self._reader.join(timeout=60)
            self.seconds = round(time.monotonic() - start, 1)

    def _end(self) -> None:
        """Kill a controller that is still there, and nsenter, which waits for it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children():
                process.kill()
        self._process.kill()
        self._process.wait()

    def wait_for_end(self) -> None:
        """Wait for the end of a controller that was killed with its machine."""
        self._process.wait(PATIENCE_S)


def kill_second(run: Run) -> None:
    run.wait_for_step(2)
    run.cluster.second.kill()
    run.wait_for_text(RESTARTING)
    run.cluster.second.start()
    run.cluster.join()
    run.wait_for_text(RESUMED)


def kill_head(run: Run) -> None:
    """The second node knows the head of a cluster that is gone: its Ray is started again, too."""
    run.wait_for_step(2)
    run.cluster.head.kill()
    run.wait_for_end()
    run.cluster.head.start()
    run.cluster.start_ray()
    run.start()
    run.wait_for_text(RESUMED)


def unplug_second(run: Run) -> None:
    """Nothing ends the connections of the node, whose processes wait for the others."""
    run.wait_for_step(2)
    run.cluster.second.cut_off()
    run.wait_for_text(RESTARTING)
    run.cluster.second.plug_in()
    run.cluster.join()
    run.wait_for_text(RESUMED)


def lose_second(run: Run) -> None:
    run.wait_for_step(2)
    run.cluster.second.kill()
    run.wait_for_text(SHRUNK)
    run.wait_for_text(RESUMED)


KILLED, HEAD_KILLED, UNPLUGGED, LOST = "killed", "head killed", "unplugged", "lost for good"
EVENTS: dict[str, Callable[[Run], None]] = {
    KILLED: kill_second,
    HEAD_KILLED: kill_head,
    UNPLUGGED: unplug_second,
    LOST: lose_second,
}


def run_inside(folder: Path, names: list[str], engine: str) -> None:
    """Play the runs, and write the figures to a file."""
    steps = 4 if len(names) == 1 else 8
    cluster = Cluster(folder)
    faults = check_control(cluster)
    cluster.start_ray()
    undisturbed = Run(cluster, "undisturbed", engine, steps)
    addresses: dict[str, Any] = {}
    undisturbed.play(lambda run: addresses.update(check_addresses(run)))
    faults += undisturbed.faults + addresses.get("faults", ["addresses were not checked"])
    seconds = {undisturbed.name: undisturbed.seconds}
    differences: dict[str, list[str]] = {}
    for name in names if not undisturbed.faults else []:
        settings = ["trainer.faults.on_lost_node=shrink"] if name == LOST else []
        run = Run(cluster, name.replace(" ", "-"), engine, steps, *settings)
        run.play(EVENTS[name])
        faults += run.faults
        seconds[name] = run.seconds
        differences[name] = compare(run, undisturbed)
    figures = {
        "events": {name: not differences[name] for name in differences},
        "steps": steps,
        "listeners": addresses.get("listeners"),
        "connections_of_ranks": addresses.get("connections"),
        "seconds": seconds,
        "differences": {name: found[:8] for name, found in differences.items() if found},
        "faults": faults,
        "pass": not faults and sorted(differences) == sorted(names) and not any(differences.values()),
    }
    (folder / "figures.json").write_text(json.dumps(figures))


def compare(run: Run, undisturbed: Run) -> list[str]:
    if run.faults:
        return ["the run has not finished"]
    folders = (run.folder, undisturbed.folder)
    if "trainer.faults.on_lost_node=shrink" not in run._settings:
        return [*compare_steps(*folders), *compare_tensors(*folders, run.steps)]
    found, expected = ([(line["step"], line["data/position"]) for line in read_steps(folder)] for folder in folders)
    return [] if found == expected else [f"the steps and prompts: {found}"]


def check_addresses(run: Run) -> dict[str, Any]:
    """Return where the processes of a run listen, and which connections its train ranks have with each other.

    Ray's own processes, and the server that it has in each worker, listen on all addresses of a node, and require a
    token. Everything else has to listen at the address of the node, or on loopback where no other node needs it.
    """
    run.wait_for_step(1)
    faults, listeners, open_to_all, ranks = [], 0, 0, {}
    for node in (run.cluster.head, run.cluster.second):
        processes = node.list_processes()
        ranks[node.address] = [process for process in processes if "ray::TrainWorker" in " ".join(process.cmdline())]
        if len(ranks[node.address]) != 1:
            faults.append(f"{node.name}: {len(ranks[node.address])} train ranks")
        found = list_listeners(processes)
        listeners += len(found)
        for each in found:
            print(f"{node.name}: {each.address}:{each.port} {each.command[:80]}", flush=True)
            is_loopback, is_rank = ip_address(each.address).is_loopback, "ray::TrainWorker" in each.command
            if is_of_ray(each):
                open_to_all += each.address != node.address and not is_loopback
            elif each.address != node.address and (is_rank or not is_loopback):
                faults.append(f"{node.name}: {each.command[:80]} listens at {each.address}:{each.port}")
    first, second = ranks
    connections = 0
    for (own, own_port), (other, other_port) in list_connections(ranks[first]):
        connections += (own, other) == (first, second) and not {own_port, other_port} & {*WORKER_PORTS}
    if not connections:
        faults.append("the train ranks are not connected over the network")
    figures = {"listeners": listeners, "of_ray_on_all_addresses": open_to_all}
    return {"listeners": figures, "connections": connections, "faults": faults}


def is_of_ray(listener: Listener) -> bool:
    """Whether Ray has made a socket: in a process of its own, or as the server of a worker."""
    own = re.search(r"site-packages/ray/|^ray::(DashboardAgent|RuntimeEnvAgent)", listener.command)
    return own is not None or listener.port in WORKER_PORTS


GROUP = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
rank, own = int(sys.argv[1]), sys.argv[2]
if own:
    from verl.training.process_group import init_process_group
    init_process_group(rank, 2, "{address}", {port}, "cpu", 60.0, None, own)
else:
    dist.init_process_group("gloo", init_method="tcp://{address}:{port}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=10))
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
dist.destroy_process_group()  # its threads would end the process with an error
"""


def check_control(cluster: Cluster) -> list[str]:
    """Ranks meet if gloo listens at the address of the node, and do not where torch lets it listen: at 127.0.1.1."""
    faults = []
    for is_bound in (False, True):
        script = GROUP.format(address=cluster.head.address, port=PORT + 1 + is_bound)
        processes = [
            subprocess.Popen(
                node.enter([sys.executable, "-c", script, str(rank), node.address if is_bound else ""]),
                env=cluster.environment,
                stderr=None if is_bound else subprocess.DEVNULL,
            )
            for rank, node in enumerate((cluster.head, cluster.second))
        ]
        have_met = [process.wait(PATIENCE_S) for process in processes] == [0, 0]
        print(f"ranks {'with' if is_bound else 'without'} the address of their node: {have_met}", flush=True)
        if have_met != is_bound:
            faults.append(f"two ranks {'do not meet' if is_bound else 'meet at 127.0.1.1'}")
    return faults


# ---- the manifests

VALIDATORS = ("kubernetes-validate", "skypilot")
VALIDATE_PODS = """
import json, sys
import kubernetes_validate
version = ".".join(kubernetes_validate.latest_version().split(".")[:2])
def is_valid(pod):
    try:
        kubernetes_validate.validate(pod, version, strict=True)
        return ""
    except kubernetes_validate.ValidationError as error:
        return str(error).splitlines()[0]
for pod in json.load(sys.stdin):
    if problem := is_valid(pod):
        print(problem)
    pod["spec"]["containers"][0]["imag"] = "verl"
    if not is_valid(pod):
        print("the validator accepts an unknown field")
"""
VALIDATE_TASK = """
import copy, json, sys
import sky
task = json.load(sys.stdin)
def is_valid(task):
    try:
        sky.Task.from_yaml_config(copy.deepcopy(task))
        return ""
    except (ValueError, sky.exceptions.InvalidSkyPilotConfigError) as error:
        return str(error).splitlines()[0]
if problem := is_valid(task):
    print(problem)
if not is_valid(task | {"num_node": 2}):
    print("the validator accepts an unknown field")
"""


def validate_manifests(folder: Path | None) -> dict[str, Any]:
    """Check the manifests by the tests, and by the validators if there is a folder in which pip can install them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/unit/test_cluster_manifests.py"]
    faults = [] if subprocess.run(command, cwd=ROOT).returncode == 0 else ["tests/unit/test_cluster_manifests.py"]
    if folder is None:
        return {"by": ["tests"], "faults": faults}
    python = folder / "validators/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "validators")], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", *VALIDATORS]
    if subprocess.run(install).returncode:
        return {"by": ["tests"], "not_installed": list(VALIDATORS), "faults": faults}
    import yaml

    job = yaml.safe_load((ROOT / "examples/kubernetes/rayjob.yaml").read_text())
    ray = job["spec"]["rayClusterSpec"]
    groups = [ray["headGroupSpec"], *ray["workerGroupSpecs"]]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]} for group in groups]
    task = yaml.safe_load((ROOT / "examples/skypilot/verl.yaml").read_text())
    task["secrets"] = dict.fromkeys(task["secrets"], "given on the command line")
    for script, document in ((VALIDATE_PODS, pods), (VALIDATE_TASK, task)):
        done = subprocess.run(
            [str(python), "-c", script],
            input=json.dumps(document),
            env=os.environ | {"HOME": str(folder)},
            capture_output=True,
            text=True,
        )
        faults += done.stdout.splitlines() + ([done.stderr[-500:]] if done.returncode else [])
    return {"by": ["tests", *VALIDATORS], "faults": faults}


if __name__ == "__main__":
    main()
