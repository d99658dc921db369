"""What the processes that ask a judge share: its replies, and whose turn it is. One SQLite file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from verl.errors import RewardError

__all__ = ["Store"]

_BUSY_S = 30.0


class Store:
    """Replies by the name of what was asked, and the time of the next turn at an endpoint. Any process may open it."""

    def __init__(self, path: Path, endpoint: str) -> None:
        self._path, self._endpoint = path, endpoint

    def reply(self, name: str) -> str | None:
        with self._open() as db:
            found = db.execute("SELECT reply FROM replies WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def keep(self, name: str, reply: str) -> None:
        with self._open() as db:
            db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (name, reply))

    def turn(self, every_s: float) -> float:
        """Take the next turn, one every so many seconds over all who ask: how long to wait until it comes."""
        with self._open() as db:
            now = time.time()
            turn = max(now, self._next(db))
            self._set_next(db, turn + every_s)
        return turn - now

    def hold(self, seconds: float) -> None:
        """Nobody has a turn before so many seconds from now: the service said so."""
        with self._open() as db:
            self._set_next(db, max(self._next(db), time.time() + seconds))

    def _next(self, db: sqlite3.Connection) -> float:
        found = db.execute("SELECT next FROM turns WHERE endpoint = ?", (self._endpoint,)).fetchone()
        return 0.0 if found is None else float(found[0])

    def _set_next(self, db: sqlite3.Connection, next_: float) -> None:
        db.execute("INSERT OR REPLACE INTO turns VALUES (?, ?)", (self._endpoint, next_))

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A transaction that has the file for itself: short ones, so that nobody waits for long."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                db.execute("CREATE TABLE IF NOT EXISTS replies (name TEXT PRIMARY KEY, reply TEXT NOT NULL)")
                db.execute("CREATE TABLE IF NOT EXISTS turns (endpoint TEXT PRIMARY KEY, next REAL NOT NULL)")
                yield db
                db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            where = os.fspath(self._path)
            raise RewardError(
                f"reward_kwargs.cache: {where} cannot be used: {error}; name a file on a local disk that you may "
                "write, with cache=..."
            ) from error
