"""The output of workers is copied under their names, without secrets, line by line, and bounded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl.cluster import worker_logs
from verl.cluster.hangs.pending_calls import CallTarget
from verl.cluster.worker_logs import LogCopier, get_worker_log

pytestmark = pytest.mark.unit

RANK = CallTarget("train worker", 1)


class Session:
    """Ray's session folder with the output of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pids = folder, {RANK: 41}
        (folder / "logs").mkdir(parents=True)
        self.copier = LogCopier(folder, lambda: self.pids)

    def write(self, text: str, pid: int = 41, kind: str = "err") -> Path:
        path = self.folder / "logs" / f"worker-0a-01000000-{pid}.{kind}"
        with path.open("a") as file:
            file.write(text)
        return path


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(worker_logs, "_folder", tmp_path)
    return Session(tmp_path / "session")


def read() -> str:
    path = get_worker_log(RANK)
    assert path is not None
    return "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("---"))


def test_new_lines_are_appended_when_they_are_complete(session: Session, tmp_path: Path) -> None:
    source = session.write("first\nsec")
    session.write("other\n", pid=42)
    session.copier.copy()
    assert read() == "first\n"
    session.write("ond\n")
    session.copier.copy()
    assert read() == "first\nsecond\n"
    path = tmp_path / "train-worker-1.log"
    assert path.read_text().startswith(f"--- train worker 1: output of {source}\n")
    assert [each.name for each in tmp_path.glob("*.log")] == ["train-worker-1.log"]


def test_lines_may_end_as_on_other_systems_and_a_progress_bar_becomes_lines(session: Session) -> None:
    session.write("first\r\n 50%\r100%\r\n")
    session.copier.copy()
    assert read() == "first\n 50%\n100%\n"


def test_a_process_that_replaces_another_continues_its_file(session: Session) -> None:
    session.write("before\n")
    session.copier.copy()
    session.write("dying words")
    session.pids = {RANK: 43}
    session.write("after\n", pid=43)
    session.copier.copy()
    session.copier.copy(is_last=True)
    assert read() == "before\nafter\ndying words"


def test_secrets_are_hidden_also_where_a_part_ends(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs, "CHUNK_BYTES", 48)
    session.write("".join(f"line {k} api_key=sk-verysecretvalue{k}\n" for k in range(9)))
    for _ in range(20):
        session.copier.copy()
    assert read().count("line ") == 9
    assert "verysecret" not in read()


def test_a_copy_that_is_too_large_gets_only_the_end(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs, "MAX_BYTES", 100)
    monkeypatch.setattr(worker_logs, "_END_BYTES", 40)
    session.write("x" * 99 + "\n")
    session.copier.copy()
    session.write("password=verysecretvalue" * 3 + "\n" + "the end\n")
    session.copier.copy()
    session.copier.copy()
    assert "the end" not in read()
    session.copier.copy(is_last=True)
    assert read() == "x" * 99 + "\nthe end\n"


def test_the_file_of_an_older_process_with_the_same_pid_is_not_copied(session: Session) -> None:
    os.utime(session.write("of another run\n"), (1.0, 1.0))
    session.copier.copy()
    assert not list(session.folder.parent.glob("*.log"))


def test_a_file_that_disappears_does_not_stop_the_others(session: Session) -> None:
    gone = session.write("gone\n", kind="out")
    session.copier.copy()
    gone.unlink()
    session.write("here\n")
    session.copier.copy()
    assert read() == "gone\nhere\n"
