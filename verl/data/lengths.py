"""How many tokens each prompt has: one pass over the data at start, in several processes if there is much of it, and
kept on disk for the next start.

The processes are plain Python programs fed through pipes, this module run as a command: unlike those of
`multiprocessing` they do not run the user's script again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from verl.data.chat import PromptError, encode_prompts
from verl.data.files import ColumnChunk, Columns, Rows, to_python
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LengthCache", "LengthMeasurer", "TokenCounter", "measure_lengths"]

Lengths = npt.NDArray[np.int32]
ROWS_FOR_A_PROCESS = 50_000  # fewer are measured sooner than a process is up
ROWS_TO_KEEP = 10_000  # fewer are measured in a blink
MOST_PROCESSES = 8
SETTLED_S = 2.0  # a file that was written more recently may be written again without a change of its time


class LengthMeasurer(Protocol):
    """What measures a piece of a column; it may be sent to another process."""

    def __call__(self, chunk: ColumnChunk) -> Lengths:
        """Tokens of each; a `PromptError` names the one that cannot be measured."""
        ...

    def fingerprint(self) -> str | None:
        """The same for two that measure alike; None if that cannot be told."""
        ...


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Measures prompts."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any]

    def __call__(self, chunk: ColumnChunk) -> Lengths:
        ids = encode_prompts(self.tokenizer, to_python(chunk), self.template_kwargs)
        return np.array([len(each) for each in ids], np.int32)

    def fingerprint(self) -> str | None:
        """The same for two that measure alike; None if that cannot be told: a tokenizer written in Python."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        parts = [
            *(type(self.tokenizer).__qualname__, backend.to_str(), self.tokenizer.chat_template),
            *(self.tokenizer.special_tokens_map, self.template_kwargs, version("transformers"), version("tokenizers")),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


class LengthCache:
    """Lengths on disk: one file for each data file as it was, measured as it was. Nothing here fails a run."""

    def __init__(self, folder: Path | None, column: Columns, counter: LengthMeasurer) -> None:
        self._folder, self._column = folder, column
        self._counter = None if folder is None else counter.fingerprint()

    def entry(self, path: Path, rows: int) -> Path | None:
        """Where the lengths of the first `rows` rows are kept, of the file as it is now; None: nowhere."""
        if self._folder is None or self._counter is None or rows < ROWS_TO_KEEP:
            return None
        stat = path.stat()
        key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, rows, self._column, self._counter]
        return self._folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.npy"

    def load(self, entry: Path | None, rows: int) -> Lengths | None:
        if entry is None:
            return None
        try:
            found = np.load(entry, allow_pickle=False)
        except (OSError, ValueError, EOFError):  # not there, or damaged
            return None
        return found if found.shape == (rows,) and found.dtype == np.int32 else None

    def save(self, entry: Path | None, path: Path, lengths: Lengths) -> None:
        """Keep what was measured of a file, unless it has changed meanwhile or only just before."""
        if entry is None or self.entry(path, len(lengths)) != entry or time.time() - path.stat().st_mtime < SETTLED_S:
            return
        part = entry.with_suffix(f".{os.getpid()}.part")
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                np.save(file, lengths)
            part.replace(entry)
        except OSError:  # the folder cannot be written: the next start measures again
            return


def measure_lengths(
    files: Sequence[Rows],
    rows: int,
    column: Columns,
    counter: LengthMeasurer,
    *,
    processes: int | None = None,
    folder: Path | None = None,
) -> tuple[Lengths, bool]:
    """[rows] int32: tokens of the prompts of the first `rows` rows of all files; and whether all were on disk.

    `processes`: 0 or 1 measures in this one, None in as many as pay. `folder`: where lengths are kept; None: nowhere.
    """
    cache = LengthCache(folder, column, counter)
    known: list[Lengths | None] = []
    counts: list[int] = []
    entries = []
    for file in files:
        counts.append(min(len(file), rows - sum(counts)))
        entries.append(cache.entry(file.path, counts[-1]))
        known.append(cache.load(entries[-1], counts[-1]))
    missing = sum(count for count, lengths in zip(counts, known, strict=True) if lengths is None)
    found = []
    with _measuring(counter, _processes(processes, missing)) as lengths_of:
        for file, count, entry, lengths in zip(files, counts, entries, known, strict=True):
            if lengths is None:
                lengths = np.concatenate([np.empty(0, np.int32), *_in_order(file, count, column, lengths_of)])
                cache.save(entry, file.path, lengths)
            found.append(lengths)
    return np.concatenate(found), missing == 0


def _processes(wanted: int | None, rows: int) -> int:
    """How many to start: 0 is none. Not more than there is work for."""
    if wanted is None:
        wanted = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    worth = min(wanted, rows // ROWS_FOR_A_PROCESS)
    return worth if worth > 1 else 0


def _in_order(file: Rows, rows: int, column: Columns, lengths_of: Submit) -> Iterator[Lengths]:
    """The lengths of the first `rows` rows, piece by piece; a few pieces are on their way at any time."""
    waiting: deque[tuple[int, Future[Lengths]]] = deque()

    def oldest() -> Lengths:
        start, future = waiting.popleft()
        try:
            return future.result()
        except PromptError as error:
            where = f", column '{column}'" if isinstance(column, str) else ""
            raise DataError(f"{file.place(start + error.index)}{where}: {error}") from None

    start = 0
    for chunk in file.iter_chunks(column):
        if start >= rows:
            break
        chunk = chunk[: rows - start]
        waiting.append((start, lengths_of(chunk)))
        start += len(chunk)
        if len(waiting) > 2 * MOST_PROCESSES:
            yield oldest()
    while waiting:
        yield oldest()


Submit = Callable[[ColumnChunk], "Future[Lengths]"]


@contextmanager
def _measuring(counter: LengthMeasurer, processes: int) -> Iterator[Submit]:
    """Something that measures pieces, side by side in so many processes, or (0) at once in this one."""
    if not processes:

        def here(chunk: ColumnChunk) -> Future[Lengths]:
            done: Future[Lengths] = Future()
            try:
                done.set_result(counter(chunk))
            except DataError as error:
                done.set_exception(error)
            return done

        yield here
        return
    with ExitStack() as closing:
        idle: SimpleQueue[_Process] = SimpleQueue()
        for _ in range(processes):
            idle.put(closing.enter_context(_Process(counter)))
        threads = ThreadPoolExecutor(processes)
        closing.callback(threads.shutdown, cancel_futures=True)

        def there(chunk: ColumnChunk) -> Lengths:
            process = idle.get()
            try:
                return process(chunk)
            finally:
                idle.put(process)

        yield lambda chunk: threads.submit(there, chunk)


class _Process:
    """This module in a process of its own: a ruler goes in first, then pieces; lengths or an exception come back."""

    def __init__(self, counter: LengthMeasurer) -> None:
        # Each has one thread: several processes with a thread for every core would be in each other's way.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl.data.lengths"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
        )
        self._first: list[Any] = [counter]  # sent with the first piece, so that all processes start side by side

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def __call__(self, chunk: ColumnChunk) -> Lengths:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            for message in (*self._first, chunk):
                pickle.dump(message, self._process.stdin)
            self._first.clear()
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError) as error:
            raise DataError(
                f"a process that tokenises prompts ended with exit code {self._process.wait()}; its last words stand "
                "above. Set data.num_workers=0 to tokenise in the main process"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve() -> None:
    """The life of such a process."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not for the pipe
    try:
        counter = pickle.load(source)
        while True:
            chunk = pickle.load(source)
            try:
                answer: Any = counter(chunk)
            except Exception as error:  # noqa: BLE001 - raised again in the process that asked
                answer = error
            pickle.dump(answer, sink)
            sink.flush()
    except EOFError:
        return


if __name__ == "__main__":
    _serve()
