"""Terminal output of `verl data`: rows with their tokens, length histograms, scorers, and problems with fixes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from verl.data.inspection import DataFiles, InspectionReport, RowPreview
from verl.errors import DataError

if TYPE_CHECKING:
    from verl.data.dataset import DataReport
    from verl.data.files import Rows

_WIDTH = 72
_BAR = 36
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST_BINS = 14
_MOST_VALUE = 400
_HEAD, _TAIL = 40, 12
"""Tokens shown of a long prompt, unless its row was requested with --row."""


class Example(Protocol):
    """Tokens [T] and which of them are trained [T]."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...
    @property
    def mask(self) -> npt.NDArray[np.bool_]: ...


class Examples(Protocol):
    """A data set of supervised fine-tuning (`verl.sft`), as this module needs it."""

    tokenizer: Any
    lengths: Any  # int [N]
    report: DataReport

    @property
    def files(self) -> Sequence[Rows]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> Example: ...


def show_rows(data: DataFiles, out: Console, rows: Sequence[int], *, whole: bool) -> None:
    """Print the files, their columns and some rows, shortened unless `whole`."""
    _files(data.files, out)
    _rule(out, "columns")
    _table(out, [(name, use) for name, use in data.describe_columns().items()])
    for row in rows:
        _rule(out, f"row {row}")
        _row(data, data.row(row), out, whole)


def show_report(data: DataFiles, report: InspectionReport, out: Console, *, max_prompt_length: int, fate: str) -> None:
    """Print the report on all rows; `fate` describes what happens to prompts that are too long."""
    _rule(out, f"lengths of the prompts, in {data.unit}")
    _lengths(data, report, out, max_prompt_length, fate)
    _rule(out, "data sources")
    counts = report.sources.most_common()
    _table(
        out,
        [
            (
                repr(name),
                f"{count:>9,} {'row ' if count == 1 else 'rows'}   {data.describe_scorer(name) or 'no scorer'}",
            )
            for name, count in counts
        ],
    )
    _rule(out, "problems")
    _problems(report, out)


def show_examples(data: Examples, out: Console, rows: Sequence[int], *, max_length: int, whole: bool) -> None:
    """Print SFT examples: the files, some rows with their trained tokens, and the lengths of all."""
    for row in rows:
        if not 0 <= row < len(data):
            raise DataError(f"--row {row}: rows go from 0 to {len(data) - 1:,}")
    _files(data.files, out)
    for row in rows:
        _rule(out, f"row {row}")
        _example(data[row], data.tokenizer, out, whole)
    _rule(out, "lengths of the examples, in tokens")
    for line in bars(data.lengths, max_length, "max_length"):
        out.print(line, soft_wrap=True)
    out.print(Text(_spread(data.lengths)))
    truncated = data.report.truncated
    out.print(
        Text(
            f"{truncated:,} are longer and get truncated"
            if truncated
            else f"all are within data.max_length={max_length}"
        )
    )


def _example(example: Example, tokenizer: Any, out: Console, whole: bool) -> None:
    """Print the text with trained parts in green, those parts again (not every screen has color), and the tokens."""
    edges = [0, *(np.flatnonzero(np.diff(example.mask)) + 1).tolist(), len(example.tokens)]
    spans = [(start, tokenizer.decode(example.tokens[start:stop].tolist())) for start, stop in pairwise(edges)]
    text = Text()
    for start, words in spans:
        text.append(words, style="bold green" if example.mask[start] else "")
    _quote(text, out)
    trained = int(example.mask.sum())
    out.print(Text(f"{len(example.tokens)} tokens, of which {trained} are trained:", style="dim"))
    _table(out, [("", _value(words, whole)) for start, words in spans if example.mask[start]])
    for line in _tokens(tokenizer, example.tokens.tolist(), out.width, whole):
        out.print(line, soft_wrap=True)


def _files(files: Sequence[Rows], out: Console) -> None:
    for file in files:
        _rule(out, file.path.name)
        size = file.path.stat().st_size
        out.print(Text(f"{len(file):,} rows, {_bytes(size)}, {file.path}"), soft_wrap=True)


def _row(data: DataFiles, row: RowPreview, out: Console, whole: bool) -> None:
    out.print(Text(row.location, style="dim"), soft_wrap=True)
    if row.error:
        out.print(Text.assemble(("✗ ", "bold red"), row.error), soft_wrap=True)
    else:
        text = Text(row.text)
        text.highlight_words(data.marks, style="bold magenta")
        _quote(text, out)
    if row.token_ids is not None:
        out.print(Text(f"{len(row.token_ids)} tokens", style="dim"))
        for line in _tokens(data.tokenizer, row.token_ids, out.width, whole):
            out.print(line, soft_wrap=True)
    fields = {"data_source": row.data_source, "ground_truth": row.ground_truth, "extra_info": row.extra_info}
    _table(out, [(name, _value(value, whole)) for name, value in fields.items()])


def _quote(text: Text, out: Console) -> None:
    for line in text.split("\n", allow_blank=True):
        for piece in line.wrap(out, max(20, out.width - 2)) or [line]:
            out.print(Text.assemble(("│ ", "dim"), piece), soft_wrap=True)


def _tokens(tokenizer: Any, ids: Sequence[int], width: int, whole: bool) -> Iterator[Text]:
    """Yield lines of token texts above their ids, as many per line as fit."""
    if not whole and len(ids) > _HEAD + _TAIL + 8:
        yield from _token_lines(tokenizer, ids[:_HEAD], width)
        yield Text(f"  ... {len(ids) - _HEAD - _TAIL} more ...", style="dim")
        yield from _token_lines(tokenizer, ids[-_TAIL:], width)
    else:
        yield from _token_lines(tokenizer, ids, width)


def _token_lines(tokenizer: Any, ids: Sequence[int], width: int) -> Iterator[Text]:
    special = set(tokenizer.get_added_vocab().values())
    above, below = Text("  "), Text("  ")
    for token in ids:
        text, token_id = _show_blanks(tokenizer, token), str(token)
        room = max(cell_len(text), len(token_id)) + 2
        if len(above) > 2 and above.cell_len + room > width:
            yield from _strip_lines(above, below)
            above, below = Text("  "), Text("  ")
        above.append(text, style="bold magenta" if token in special else "cyan")
        above.append(" " * (room - cell_len(text)))
        below.append(token_id.ljust(room), style="dim")
    if len(above) > 2:
        yield from _strip_lines(above, below)


def _strip_lines(*lines: Text) -> Iterator[Text]:
    for line in lines:
        line.rstrip()
        yield line


def _show_blanks(tokenizer: Any, token: int) -> str:
    """Return the text of a token with visible blanks; a part of a character as in the vocabulary."""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        text = str(tokenizer.convert_ids_to_tokens(token))
    return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


def _value(value: Any, whole: bool) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = repr(value)
    return text if whole or len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]} ... ({len(text):,} characters)"


def _lengths(data: DataFiles, report: InspectionReport, out: Console, limit: int, fate: str) -> None:
    lengths = report.lengths
    if not len(lengths):
        out.print(Text("no prompt can be measured"))
        return
    has_tokens = data.tokenizer is not None
    for line in bars(lengths, limit if has_tokens else None):
        out.print(line, soft_wrap=True)
    out.print(Text(_spread(lengths)))
    if not has_tokens:
        out.print(Text("set actor_rollout_ref.model.path=... for lengths in tokens", style="dim"))
        return
    long = int((lengths > limit).sum())
    share = f"{long:,} of {len(lengths):,} ({long / len(lengths):.2%})"
    setting = f"data.max_prompt_length={limit}"
    summary = f"{share} exceed {setting}: {fate}" if long else f"all are within {setting}"
    out.print(Text(summary, style="yellow" if long else "green"), soft_wrap=True)


def _spread(lengths: npt.NDArray[np.int64]) -> str:
    middle, most = (int(np.percentile(lengths, part)) for part in (50, 99))
    return f"shortest {lengths.min():,}, median {middle:,}, 99% up to {most:,}, longest {lengths.max():,}"


def bins(lengths: npt.NDArray[np.int64]) -> list[tuple[int, int | None, int]]:
    """Return (start, end, count) bins of equal width; a thin tail of long ones goes into the last, open-ended one.

    >>> bins(np.array([3, 4, 4, 5]))
    [(3, 4, 1), (4, 5, 2), (5, 6, 1)]
    """
    low, high = int(lengths.min()), int(lengths.max())
    usual = int(np.percentile(lengths, 99))
    top = high if high <= 2 * usual else usual
    steps = (base * 10**power for power in range(12) for base in (1, 2, 5))
    step = next(step for step in steps if top // step - low // step < _MOST_BINS)
    edges = [*range(low // step * step, top + 1, step)]
    spans: list[tuple[int, int | None]] = [(edge, edge + step) for edge in edges]
    if high >= edges[-1] + step:
        spans.append((edges[-1] + step, None))
    return [(a, b, int(((lengths >= a) & (lengths < (high + 1 if b is None else b))).sum())) for a, b in spans]


def bars(lengths: npt.NDArray[np.int64], limit: int | None, name: str = "max_prompt_length") -> list[Text]:
    """Return a line per bin; bins beyond the limit are yellow, and the limit's bin is marked."""
    histogram = bins(lengths)
    most = max(count for *_, count in histogram)
    last = histogram[-1][1] or histogram[-1][0]
    labels = [
        f"{a:,} and more" if b is None else f"{a:,}" if b == a + 1 else f"{a:,} - {b - 1:,}" for a, b, _ in histogram
    ]
    width = max(map(len, labels))
    lines = []
    for label, (a, b, count) in zip(labels, histogram, strict=True):
        is_beyond = limit is not None and a > limit
        line = Text(f"{label:>{width}} ").append(_bar(count / most), style="yellow" if is_beyond else "cyan")
        line.append(f" {count:>{len(f'{most:,}')},}")
        if limit is not None and a <= limit and (b is None or limit < b):
            line.append(f"  ◂ {name}={limit}", style="bold yellow")
        lines.append(line)
    if limit is not None and limit >= last and histogram[-1][1] is not None:
        lines.append(Text(f"{'':>{width}} {'':{_BAR}} {'':>{len(f'{most:,}')}}  ◂ {name}={limit}", style="dim"))
    return lines


def _bar(share: float) -> str:
    """Return a bar of up to `_BAR` blocks, at least a sliver for any share above 0."""
    eighths = max(1, round(share * _BAR * 8)) if share else 0
    full, rest = divmod(eighths, 8)
    return (_EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")).ljust(_BAR)


def _problems(report: InspectionReport, out: Console) -> None:
    if not report.problems:
        out.print(Text("✓ none found", style="green"))
    for problem in sorted(report.problems, key=lambda problem: not problem.fatal):
        style = "red" if problem.fatal else "yellow"
        mark = ("✗ " if problem.fatal else "! ", f"bold {style}")
        out.print(Text.assemble(mark, problem.text), soft_wrap=True)
        if problem.fix:
            out.print(Text(f"  {problem.fix}", style=style), soft_wrap=True)


def _table(out: Console, rows: Sequence[tuple[str, str]]) -> None:
    width = max((cell_len(name) for name, _ in rows), default=0)
    for name, value in rows:
        out.print(Text.assemble((name.ljust(width + 2), "bold"), value), soft_wrap=True)


def _rule(out: Console, title: str) -> None:
    start = f"── {title} "
    out.print(Text(start + "─" * max(0, _WIDTH - cell_len(start)), style="dim"), soft_wrap=True)


def _bytes(size: int) -> str:
    units = [*takewhile(lambda unit: size >= 1000 ** (unit[0] + 1), enumerate(("kB", "MB", "GB")))]
    return f"{size / 1000 ** len(units):.3g} {units[-1][1]}" if units else f"{size} bytes"
