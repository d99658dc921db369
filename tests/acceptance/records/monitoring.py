"""Let a real Prometheus server scrape a real run, and ask it all queries of the Grafana dashboard.

make show-monitoring [ARGS=--short]

The run trains a tiny model, with Ray, two train workers and two vLLM engines; Ray's dashboard is on, and its timeline
is written. `--short`: in one process, with one vLLM engine, without Ray. Prometheus reads the example
`examples/monitoring/prometheus.yaml` with another address and interval. Every query of every panel has to return a
number; of every scrape, the reward has to be the one of its step in metrics.jsonl; the run listens on loopback only.
Without the program `prometheus` (Debian's package of this name) the script is skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from _common import REWARDS, ROOT, Stopwatch, finish, metrics_of, sized_for_addition, skip
from grafana_dashboard import list_panels

from verl.cluster.actors import free_port
from verl.demo.assets import make_assets

SCRAPE_CONFIG = ROOT / "examples/monitoring/prometheus.yaml"
RUN = 'project="arithmetic",experiment="monitored"'
WINDOW = "20s"
START_S, END_S = 500.0, 90.0
TOKEN = "a-token-for-the-dashboard-of-this-test"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="in one process, without Ray")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the processes are ended all the same
    program = shutil.which("prometheus")
    if program is None:
        skip("monitoring", "no Prometheus on this machine: apt-get install prometheus")
    watch = Stopwatch()
    ports = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="monitoring-") as directory:
        folder = Path(directory)
        make_assets(folder)
        settings = list_settings(folder, ports[0], None if options.short else ports[2])
        with prometheus(program, folder, *ports[:2]) as server, training(settings) as run:
            queries = {query: panel.title for panel in list_panels() for query in panel.expressions(RUN, WINDOW)}
            missing = wait_for_data(server, list(queries), run)
            addresses = sorted({found.laddr.ip for found in connections(run.pid) if found.laddr.port == ports[0]})
            ray_dashboard = None if options.short else look_at_ray(ports[2])
            replicas = {row["metric"]["replica"] for row in ask(server, f"vllm:generation_tokens_total{{{RUN}}}")}
            scrape_s = ask(server, "max_over_time(scrape_duration_seconds[10m])")
            families = server.get("/api/v1/label/__name__/values").json()["data"]
            values = read_values(server)
        wrong = compare(values, folder / "run") if values else []
        phases = None if options.short else count_phases(folder / "timeline.json")
    for query in missing:
        print(f"{queries[query]}: no data: {query}")
    checks = {
        "every query returns data": not missing,
        "values are those of metrics.jsonl": len(values) >= 3 and not wrong,
        "listens on loopback only": addresses == ["127.0.0.1"],
        "all engines": replicas == ({"0"} if options.short else {"0", "1"}),
        "the run ended well": run.returncode == 128 + signal.SIGTERM,
        "Ray's dashboard": ray_dashboard in (None, [401, 200]),
        "phases on Ray's timeline": phases is None or phases >= 4,
    }
    finish(
        "monitoring",
        all(checks.values()),
        failed=[check for check, holds in checks.items() if not holds],
        panels=len(list_panels()),
        queries=len(queries),
        without_data=len(missing),
        metrics={start: sum(name.startswith(start) for name in families) for start in ("verl_", "vllm:")},
        scrapes_compared=len(values),
        slowest_scrape_s=round(max((float(row["value"][1]) for row in scrape_s), default=math.inf), 3),
        phases_on_the_timeline=phases,
        seconds=round(watch.seconds(), 1),
    )


def list_settings(folder: Path, port: int, dashboard_port: int | None) -> list[str]:
    """Return the settings of a run that goes on until SIGTERM; without a port for Ray's dashboard, in one process."""
    steps, validation = 100_000, 4
    settings = [
        *sized_for_addition(folder),
        "data.train_batch_size=16",
        "data.val_max_samples=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={REWARDS}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={validation}",
        "trainer.project_name=arithmetic",
        "trainer.experiment_name=monitored",
        "trainer.prometheus.enable=True",
        f"trainer.prometheus.port={port}",
    ]
    if dashboard_port is None:
        return [*settings, "trainer.local=True", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=vllm"]
    return [
        *settings,
        "ray_kwargs.ray_init.include_dashboard=True",
        f"+ray_kwargs.ray_init.dashboard_port={dashboard_port}",
        f"ray_kwargs.timeline_json_file={folder / 'timeline.json'}",
    ]


@contextmanager
def training(settings: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the run; at the end of the block, tell it to stop, and wait for it."""
    command = [sys.executable, "-m", "verl", "train", *settings]
    process = subprocess.Popen(
        command, stdout=sys.stdout, stderr=subprocess.STDOUT, env={**os.environ, "RAY_AUTH_TOKEN": TOKEN}
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(END_S)
    finally:
        process.kill()
        process.wait()


@contextmanager
def prometheus(program: str, folder: Path, run_port: int, port: int) -> Iterator[httpx.Client]:
    """Start a server that scrapes the run every second, and yield a client of its API."""
    config = yaml.safe_load(SCRAPE_CONFIG.read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{run_port}"]
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = [f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}", "--log.level=error"]
    process = subprocess.Popen([program, *arguments, f"--web.listen-address=127.0.0.1:{port}"])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def wait_for_data(server: httpx.Client, queries: list[str], run: subprocess.Popen[bytes]) -> list[str]:
    """Return the queries that have no number when the run ends, or after `START_S`."""
    missing, until = queries, time.monotonic() + START_S
    while missing and run.poll() is None and time.monotonic() < until:
        time.sleep(1.0)
        before, missing = missing, [query for query in missing if not has_number(ask(server, query))]
        if missing and len(missing) != len(before):
            print(f"{len(queries) - len(missing)} of {len(queries)} queries return data", flush=True)
    return missing


def ask(server: httpx.Client, query: str) -> list[dict[str, Any]]:
    """Return the rows that Prometheus has now; none while it starts. A query that it cannot read is an error."""
    try:
        reply = server.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return []
    return reply.raise_for_status().json()["data"]["result"]


def has_number(rows: list[dict[str, Any]]) -> bool:
    return any(math.isfinite(float(row["value"][1])) for row in rows)


def connections(pid: int) -> list[Any]:
    return [found for found in psutil.Process(pid).net_connections("tcp") if found.status == psutil.CONN_LISTEN]


def look_at_ray(port: int) -> list[int]:
    """Return what Ray's dashboard answers without its token, and with it."""
    address = f"http://127.0.0.1:{port}/api/version"
    given = {"Authorization": f"Bearer {TOKEN}"}
    try:
        return [httpx.get(address, headers=headers, timeout=30.0).status_code for headers in ({}, given)]
    except httpx.TransportError:
        return []


def read_values(server: httpx.Client) -> list[tuple[int, float]]:
    """Return the step and its reward as they were in every scrape."""
    found = []
    for metric in ("verl_step", "verl_reward_mean"):
        rows = ask(server, f"{metric}{{{RUN}}}[10m]")
        found.append({time: float(value) for row in rows for time, value in row["values"]})
    steps, rewards = found
    return [(int(steps[time]), reward) for time, reward in rewards.items()]


def compare(values: list[tuple[int, float]], folder: Path) -> list[tuple[int, float]]:
    """Return the values that are not those of their step in the folder of the run."""
    rewards = {row["step"]: row["reward/mean"] for row in metrics_of(folder) if "reward/mean" in row}
    return [(step, reward) for step, reward in values if rewards[step] != reward]


def count_phases(timeline: Path) -> int:
    """Return how many kinds of phases of our workers are on Ray's timeline."""
    events = json.loads(timeline.read_text()) if timeline.exists() else []
    return len({event["name"] for event in events if event.get("cat") == "verl"})


if __name__ == "__main__":
    main()
