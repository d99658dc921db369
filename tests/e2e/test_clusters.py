"""The recipe for several machines: `ray start` on each, then the command as ever. Here both machines are this one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from verl.cluster.actors import free_port
from verl.demo.folder import Assets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.rotating(1)]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Ray's files in a folder of this test (a short name: paths of sockets must be)."""
    folder = tempfile.mkdtemp(prefix="ray-")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    yield kept | {"TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
    shutil.rmtree(folder)


@contextmanager
def machine(environment: dict[str, str], *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if "Ray runtime started" in line:
            break
    else:
        raise AssertionError(shown)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


def test_a_run_joins_the_cluster_that_ray_start_made_and_spreads_over_its_machines(
    assets: Assets, environment: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    head = ("--head", f"--port={port}", "--include-dashboard=false")
    settings = [
        f"actor_rollout_ref.model.path={assets.model}",
        f"data.train_files={assets.train}",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"ray_kwargs.timeline_json_file={tmp_path / 'timeline.json'}",
    ]
    with ExitStack() as cluster:
        cluster.enter_context(machine(environment, *head, "--num-cpus=1"))
        cluster.enter_context(machine(environment, f"--address=127.0.0.1:{port}", "--num-cpus=1"))
        command = [sys.executable, "-m", "verl", "train", *settings]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f":{port}, started by `ray start`" in done.stdout
    assert "step 1/1" in done.stdout
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert any(event["cat"].startswith("task::TrainWorker.") for event in events)
    assert {"gen", "update"} <= {event["name"] for event in events if event.get("cat") == "verl"}
