"""Starting or joining Ray: a slow machine gets a second attempt, and errors come with a fix."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import ray_constants

from verl.cluster import session
from verl.cluster.session import connect, disconnect
from verl.errors import EngineError

pytestmark = pytest.mark.unit


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The arguments of every start, on a machine without a cluster."""
    made: list[dict[str, Any]] = []
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kept["TMPDIR"] = str(tmp_path)
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return made


def failing(monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]], times: int) -> None:
    def init(**arguments: Any) -> None:
        starts.append(arguments)
        if len(starts) <= times:
            raise Exception("The current node timed out during startup.")  # as Ray raises it

    monkeypatch.setattr(ray, "init", init)


def test_a_start_that_was_too_slow_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]]
) -> None:
    failing(monkeypatch, starts, times=1)
    connect({"num_cpus": 2})
    assert [start["num_cpus"] for start in starts] == [2, 2]


def test_a_failed_start_names_possible_causes(monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]]) -> None:
    failing(monkeypatch, starts, times=9)
    with pytest.raises(EngineError, match=r"timed out during startup.\n.*out of space in /tmp"):
        connect({})


def test_a_session_of_the_calling_program_is_used_and_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[None] = []
    monkeypatch.setattr(session, "_is_ours", False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(None))
    assert "that this program had started" in connect({})
    disconnect()
    assert ended == []


def test_a_new_session_is_closed_once(monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]]) -> None:
    ended: list[None] = []
    failing(monkeypatch, starts, times=0)
    assert connect({}) == ""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(None))
    assert connect({}) == "", "joined by ourselves"
    disconnect()
    disconnect()
    assert ended == [None]


@pytest.mark.parametrize("by", ["setting", "environment"])
def test_a_cluster_that_does_not_respond_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]], by: str
) -> None:
    failing(monkeypatch, starts, times=9)
    if by == "environment":
        os.environ["RAY_ADDRESS"] = "head:6379"
    with pytest.raises(EngineError, match=r"a cluster is running at head:6379 .*ray start --head"):
        connect({"address": "head:6379"} if by == "setting" else {})
    assert len(starts) == 1


def test_a_new_cluster_listens_on_loopback_and_has_its_own_token(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]]
) -> None:
    failing(monkeypatch, starts, times=0)
    connect({})
    assert starts[0]["_node_ip_address"] == "127.0.0.1"
    assert not ray_constants.ENABLE_RAY_CLUSTER
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
    assert len(bytes.fromhex(os.environ["RAY_AUTH_TOKEN"])) == 32
    assert Path(starts[0]["_temp_dir"]).parent.stat().st_mode & 0o077 == 0


def test_a_folder_that_others_can_enter_is_not_used(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]], tmp_path: Path
) -> None:
    failing(monkeypatch, starts, times=0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"verl-{os.getuid()}").mkdir(mode=0o755)
    assert connect({}) == ""
    assert starts[0]["_temp_dir"] == str(tmp_path / f"verl-{os.getuid()}-1" / "ray")


def test_users_can_choose_another_address_and_token(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]]
) -> None:
    failing(monkeypatch, starts, times=0)
    os.environ["RAY_AUTH_TOKEN_PATH"] = "token-file"
    connect({"_node_ip_address": "10.0.0.5"})
    assert starts[0]["_node_ip_address"] == "10.0.0.5"
    assert ray_constants.ENABLE_RAY_CLUSTER
    assert {"VLLM_HOST_IP", "RAY_AUTH_TOKEN"}.isdisjoint(os.environ)


def test_a_cluster_that_is_joined_keeps_its_own_token_and_address(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]]
) -> None:
    failing(monkeypatch, starts, times=0)
    connect({"address": "head:6379"})
    assert "_node_ip_address" not in starts[0]
    assert ray_constants.ENABLE_RAY_CLUSTER
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.fixture
def cluster(starts: list[dict[str, Any]], tmp_path: Path) -> Iterator[str]:
    """A listening socket, and the address file of `ray start`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        yield address


def test_the_cluster_that_ray_start_made_here_is_joined(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]], cluster: str
) -> None:
    failing(monkeypatch, starts, times=0)
    note = connect({"num_cpus": 4, "namespace": "mine"})
    assert f"joined the Ray cluster at {cluster}" in note
    assert "address=local" in note
    assert "ray_kwargs.ray_init.num_cpus: no effect" in note
    assert (starts[0]["address"], starts[0]["namespace"]) == (cluster, "mine")
    assert {"num_cpus", "_temp_dir", "_node_ip_address"}.isdisjoint(starts[0])
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize("by", ["setting", "environment"])
def test_the_address_local_starts_a_new_cluster(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]], cluster: str, by: str
) -> None:
    failing(monkeypatch, starts, times=0)
    if by == "environment":
        os.environ["RAY_ADDRESS"] = "local"
    assert connect({"address": "local"} if by == "setting" else {}) == ""
    assert (starts[0]["address"], starts[0]["_node_ip_address"]) == ("local", "127.0.0.1")


def test_a_cluster_of_another_user_is_not_joined(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]], cluster: str, tmp_path: Path
) -> None:
    failing(monkeypatch, starts, times=0)
    if os.getuid() == 0:
        os.chown(tmp_path / "ray" / "ray_current_cluster", 54321, -1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(session, "get_user_folder", lambda: tmp_path / "mine")
    assert connect({}) == ""
    assert starts[0]["address"] == "local"


@pytest.mark.parametrize("left", ["127.0.0.1:1", "half a line", ""])
def test_a_stale_address_file_is_ignored(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]], cluster: str, tmp_path: Path, left: str
) -> None:
    failing(monkeypatch, starts, times=0)
    (tmp_path / "ray" / "ray_current_cluster").write_text(left)
    assert connect({}) == ""
    assert starts[0]["address"] == "local"


@pytest.fixture
def _restore_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def takes_sigterm(**_: Any) -> None:
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signum))  # as ray.init does


@pytest.mark.usefixtures("starts", "_restore_sigterm")
def test_a_sigterm_handler_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    monkeypatch.setattr(ray, "init", takes_sigterm)
    connect({})
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


@pytest.mark.usefixtures("starts", "_restore_sigterm")
def test_sigterm_without_a_handler_exits_with_the_code_that_shells_use(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr(ray, "init", takes_sigterm)
    connect({})
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


@pytest.mark.usefixtures("starts", "_restore_sigterm")
def test_sigterm_while_ray_starts_exits_with_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_ended(**_: Any) -> None:
        takes_sigterm()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", is_ended)
    with pytest.raises(SystemExit) as ended:
        connect({})
    assert ended.value.code == 143
