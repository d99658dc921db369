"""The SQLite file that scoring processes share: replies of the judge, and the rate limit of its endpoint."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from verl.errors import RewardError
from verl.private_files import create_private_file, make_folder

_BUSY_S = 30.0


@lru_cache
def _read_boot_id() -> str:
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else ""


class JudgeCache:
    """Replies by the hash of their request, and the time of the next request to `endpoint`. Safe across processes."""

    def __init__(self, path: Path, endpoint: str) -> None:
        self._path, self._endpoint = path, endpoint

    def get_reply(self, name: str) -> str | None:
        with self._transaction() as db:
            row = db.execute("SELECT reply FROM replies WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def put_reply(self, name: str, reply: str) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (name, reply))

    def reserve_turn(self, interval_s: float) -> float:
        """Reserve the next request, at most one per `interval_s`, and return the seconds to wait for it."""
        return self._advance(0.0, interval_s)

    def delay_turns(self, seconds: float) -> None:
        """Let no request start within the next `seconds`."""
        self._advance(seconds, 0.0)

    def _advance(self, delay_s: float, interval_s: float) -> float:
        with self._transaction() as db:
            # The monotonic clock cannot be set; all processes of a machine share it, and it restarts at boot.
            clock, now = f"{_read_boot_id()} {self._endpoint}", time.monotonic()
            row = db.execute("SELECT next FROM turns WHERE endpoint = ?", (clock,)).fetchone()
            turn = max(now + delay_s, 0.0 if row is None else float(row[0]))
            db.execute("INSERT OR REPLACE INTO turns VALUES (?, ?)", (clock, turn + interval_s))
        return turn - now

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Open the file exclusively."""
        try:
            make_folder(self._path.parent)
            create_private_file(self._path)
            with contextlib.closing(sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                db.execute("CREATE TABLE IF NOT EXISTS replies (name TEXT PRIMARY KEY, reply TEXT NOT NULL)")
                db.execute("CREATE TABLE IF NOT EXISTS turns (endpoint TEXT PRIMARY KEY, next REAL NOT NULL)")
                yield db
                db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise RewardError(
                f"reward_kwargs.cache: {self._path} cannot be used: {error}. Set cache=... to a writable file of yours "
                "on a local disk"
            ) from error
