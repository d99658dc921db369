"""Token counts of all prompts: one pass over the data at start, in several processes if there is much of it, and cached
on disk for the next start.

The processes run this module as a command and are fed through pipes: unlike those of `multiprocessing` they do not run
the user's script again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from verl.data.chat import PromptError, encode_prompts
from verl.data.files import ColumnChunk, Columns, Rows, to_python
from verl.errors import DataError
from verl.private_files import make_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Lengths = npt.NDArray[np.int32]
ROWS_FOR_A_PROCESS = 50_000  # fewer are measured faster than a process starts
ROWS_TO_KEEP = 10_000  # fewer are not worth caching
MOST_PROCESSES = 8
ITEM = 64  # characters that take as long to render as any value
RENDERING = 2  # changes when the same prompt, tokenizer and template have other ids
SETTLED_S = 2.0  # a file written more recently may change again within the resolution of its time


@lru_cache(maxsize=8)
def get_longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of the longest token: text of N times as many has more than N tokens."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def count_characters(value: Any) -> int:
    """Return the number of characters of all texts in a prompt, message or schema."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 0
    return sum(map(count_characters, value))


def measure_size(value: Any) -> int:
    """Return the size of a JSON value, to which the time to render it is proportional: its characters, those of keys
    and the digits of numbers included, and `ITEM` for every value."""
    if isinstance(value, str):
        return ITEM + len(value)
    if isinstance(value, int):
        return ITEM + value.bit_length() // 3
    if isinstance(value, Mapping):
        return ITEM + sum(measure_size(key) + measure_size(each) for key, each in value.items())
    return ITEM + sum(map(measure_size, value)) if isinstance(value, (list, tuple)) else ITEM


class LengthMeasurer(Protocol):
    """Measures a chunk of a column; it may be sent to another process."""

    def __call__(self, chunk: ColumnChunk) -> Lengths:
        """Return the token count of each value; raise `PromptError` for one that cannot be tokenized."""
        ...

    def fingerprint(self) -> str | None:
        """Return a hash that is equal for equal measurers; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts the tokens of prompts."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any]

    def __call__(self, chunk: ColumnChunk) -> Lengths:
        ids = encode_prompts(self.tokenizer, to_python(chunk), self.template_kwargs)
        return np.array([len(each) for each in ids], np.int32)

    def fingerprint(self) -> str | None:
        """Return a hash of tokenizer and template; None for a tokenizer written in Python."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        parts = [
            *(RENDERING, type(self.tokenizer).__qualname__, backend.to_str(), self.tokenizer.chat_template),
            *(self.tokenizer.special_tokens_map, self.template_kwargs, version("transformers"), version("tokenizers")),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


class LengthCache:
    """Lengths on disk: one file per version of a data file and measurer. Its errors never fail a run."""

    def __init__(self, folder: Path | None, column: Columns, counter: LengthMeasurer) -> None:
        self._folder, self._column = folder, column
        self._counter = None if folder is None else counter.fingerprint()

    def entry(self, path: Path, rows: int) -> Path | None:
        """Return the path for the lengths of the first `rows` rows of the current file; None if not cached."""
        if self._folder is None or self._counter is None or rows < ROWS_TO_KEEP:
            return None
        stat = path.stat()
        key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, rows, self._column, self._counter]
        return self._folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.npy"

    def load(self, entry: Path | None, rows: int) -> Lengths | None:
        if entry is None:
            return None
        try:
            lengths = np.load(entry, allow_pickle=False)
        except (OSError, ValueError, EOFError):  # missing or damaged
            return None
        return lengths if lengths.shape == (rows,) and lengths.dtype == np.int32 else None

    def save(self, entry: Path | None, path: Path, lengths: Lengths) -> None:
        """Cache the lengths of a file, unless it has changed meanwhile or very recently."""
        if entry is None or self.entry(path, len(lengths)) != entry or time.time() - path.stat().st_mtime < SETTLED_S:
            return
        part = entry.with_suffix(f".{os.getpid()}.part")
        try:
            make_folder(entry.parent)
            with part.open("wb") as file:
                np.save(file, lengths)
            part.replace(entry)
        except OSError:  # the folder is not writable: the next start measures again
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
    """Return [rows] int32, the token counts of the first `rows` prompts of all files, and whether all were cached.

    `processes`: 0 or 1 measures in this process, None chooses. `folder`: where lengths are cached; None: nowhere.
    """
    cache = LengthCache(folder, column, counter)
    counts: list[int] = []
    for file in files:
        counts.append(min(len(file), rows - sum(counts)))
    entries = [cache.entry(file.path, count) for file, count in zip(files, counts, strict=True)]
    result = [cache.load(entry, count) for entry, count in zip(entries, counts, strict=True)]
    missing = [index for index, lengths in enumerate(result) if lengths is None]
    missing_rows = sum(counts[k] for k in missing)
    with _start_measuring(counter, _choose_processes(processes, missing_rows)) as submit:
        for k in missing:
            measured = [*_measure_file(files[k], counts[k], column, submit)]
            result[k] = lengths = np.concatenate([np.empty(0, np.int32), *measured])
            cache.save(entries[k], files[k].path, lengths)
    return np.concatenate([lengths for lengths in result if lengths is not None]), not missing_rows


def _choose_processes(wanted: int | None, rows: int) -> int:
    """Return how many processes to start, at most as many as there is work for."""
    if wanted is None:
        wanted = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    worth = min(wanted, rows // ROWS_FOR_A_PROCESS)
    return worth if worth > 1 else 0


def _measure_file(file: Rows, rows: int, column: Columns, submit: Submit) -> Iterator[Lengths]:
    """Yield the lengths of the first `rows` rows, chunk by chunk, with a few chunks in flight."""
    pending: deque[tuple[int, Future[Lengths]]] = deque()

    def oldest() -> Lengths:
        start, future = pending.popleft()
        try:
            return future.result()
        except PromptError as error:
            where = f", column '{column}'" if isinstance(column, str) else ""
            raise DataError(f"{file.location(start + error.index)}{where}: {error}") from None

    start = 0
    for chunk in file.iter_chunks(column):
        if start >= rows:
            break
        chunk = chunk[: rows - start]
        pending.append((start, submit(chunk)))
        start += len(chunk)
        if len(pending) > 2 * MOST_PROCESSES:
            yield oldest()
    while pending:
        yield oldest()


Submit = Callable[[ColumnChunk], "Future[Lengths]"]


@contextmanager
def _start_measuring(counter: LengthMeasurer, processes: int) -> Iterator[Submit]:
    """Yield a function that measures chunks in some processes, or (0) in a thread of this one."""
    own = threading.local()  # each thread has a process

    def measure(chunk: ColumnChunk) -> Lengths:
        if not processes:
            return counter(chunk)
        if not hasattr(own, "process"):
            own.process = closing.enter_context(_Process(counter))
        return own.process(chunk)

    with ExitStack() as closing:
        threads = ThreadPoolExecutor(max(1, processes))
        try:
            yield lambda chunk: threads.submit(measure, chunk)
        finally:
            threads.shutdown(cancel_futures=True)


class _Process:
    """This module in another process: it receives a measurer, then chunks, and returns lengths or an exception."""

    def __init__(self, counter: LengthMeasurer) -> None:
        # One thread each: several processes with a thread per core would slow each other down.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "verl.data.lengths"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | environment)
        self._unsent: list[Any] = [counter]

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def __call__(self, chunk: ColumnChunk) -> Lengths:
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        try:
            for message in (*self._unsent, chunk):
                pickle.dump(message, sink)
            self._unsent.clear()
            sink.flush()
            reply = pickle.load(source)
        except (OSError, EOFError) as error:
            raise DataError(
                f"a process that tokenizes prompts ended with exit code {self._process.wait()}; its output is above. "
                "Set data.num_workers=0 to tokenize in the main process"
            ) from error
        if isinstance(reply, BaseException):
            raise reply
        return reply


def _serve() -> None:
    """Measure chunks from standard input until it ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not enter the pipe
    try:
        counter = pickle.load(source)
        while True:
            chunk = pickle.load(source)
            try:
                reply: Any = counter(chunk)
            except Exception as error:  # noqa: BLE001 - raised again in the calling process
                reply = error
            pickle.dump(reply, sink)
            sink.flush()
    except EOFError:
        return


if __name__ == "__main__":
    _serve()
