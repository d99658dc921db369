"""`verl scale` asks a run for engines, and shows how they join and leave."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from verl.commands.runs import scale
from verl.errors import VerlError
from verl.rollout.scaling import REQUEST, STATUS, write_json

pytestmark = pytest.mark.unit


def write_status(folder: Path, *states: str, refusal: str = "") -> None:
    engines = {str(index): state for index, state in enumerate(states) if state}
    write_json(folder / STATUS, {"wanted": None, "engines": engines, "refusal": refusal})


@contextmanager
def running(folder: Path, *statuses: tuple[str, ...], refusal: str = "") -> Iterator[list[int]]:
    """A run that reads a request, and then goes through these states of its engines."""
    requests: list[int] = []

    def live() -> None:
        while not (folder / REQUEST).exists():
            time.sleep(0.01)
        requests.append(json.loads((folder / REQUEST).read_text())["engines"])
        for index, states in enumerate(statuses):
            write_status(folder, *states, refusal=refusal)
            if index == 0:
                (folder / REQUEST).unlink()
            time.sleep(0.5)

    write_status(folder, "ready")
    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    yield requests
    thread.join()


def test_it_prints_each_change_until_all_engines_are_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, ("ready", "joining"), ("ready", "ready")) as requests:
        assert scale.main([str(tmp_path), "--engines", "2"]) == 0
    assert requests == [2]
    lines = ["rollout engine 0: ready", "rollout engine 1: joining", "rollout engine 1: ready"]
    assert capsys.readouterr().out.splitlines() == lines


def test_it_fails_with_the_reason_of_a_refusal(tmp_path: Path) -> None:
    with running(tmp_path, ("ready",), refusal="there is no room"), pytest.raises(VerlError, match="there is no room"):
        scale.main([str(tmp_path), "--engines", "2"])


def test_it_stops_waiting_for_engines_that_do_not_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, ("ready", "joining")):
        assert scale.main([str(tmp_path), "--engines", "2", "--wait", "0.1"]) == 1
    assert capsys.readouterr().err == "1 of 2 engines are ready\n"


def test_a_run_that_has_ended_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerlError, match="no run with rollout engines is going on"):
        scale.main([str(tmp_path)])
    write_status(tmp_path, "ready")  # it was killed
    monkeypatch.setattr(scale, "REPLY_S", 0.1)
    with pytest.raises(VerlError, match="has replied within"):
        scale.main([str(tmp_path), "--engines", "2"])
    assert not (tmp_path / REQUEST).exists()


def test_without_a_number_it_prints_the_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path, "ready", "restarting")
    assert scale.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "rollout engine 0: ready\nrollout engine 1: restarting\n"
