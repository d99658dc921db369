"""Console output of a run: a banner at the start, one line per step and per validation, and advice.

Columns keep their positions through the whole run, so that a curve can be read down a column. Terminals get colors, and
the columns that fit their width; all metrics are in metrics.jsonl.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import rich.console
from rich.text import Text

from verl.redaction import redact


@dataclass(frozen=True, slots=True)
class _Column:
    label: str
    keys: tuple[str, ...]  # the first that the metrics have is shown
    form: str
    width: int
    priority: int  # a narrow terminal drops the columns with the highest numbers first
    style: str = ""
    unit: str = ""

    def find(self, metrics: Mapping[str, float]) -> float | None:
        return next((metrics[key] for key in self.keys if key in metrics), None)

    @property
    def total_width(self) -> int:
        """The characters it takes in a line, with the gap to its neighbor."""
        return len(f"  {self.label} ") + self.width + len(self.unit)


_LEARNING = (
    _Column("loss", ("train/loss",), ".4f", 6, 0, "bold green"),
    _Column("lr", ("train/lr",), ".1e", 7, 3),
    _Column("reward", ("reward/mean",), ".3f", 6, 0, "bold green"),
    _Column("kl", ("actor/kl_loss", "actor/reward_kl", "actor/ppo_kl"), ".4f", 7, 3),
    _Column("teacher kl", ("actor/distillation_kl",), ".4f", 7, 2),
    _Column("entropy", ("actor/entropy",), ".2f", 5, 6),
    _Column("clip", ("actor/pg_clipfrac",), ".2f", 5, 9),
    _Column("grad", ("actor/grad_norm", "train/grad_norm"), ".2f", 5, 4),
    _Column("critic", ("critic/vf_loss",), ".4f", 6, 7),
    _Column("process", ("process/accuracy",), ".2f", 5, 7),
    _Column("dropped", ("sampling/groups_dropped",), ".0f", 4, 10),
    _Column("len", ("response_length/mean",), ".1f", 6, 5),
)
_TIMES = (
    _Column("gen", ("timing_s/gen",), ".1f", 4, 11, "cyan", "s"),
    _Column("prep", ("timing_s/prepare",), ".1f", 4, 13, "cyan", "s"),
    _Column("update", ("timing_s/update",), ".1f", 4, 12, "cyan", "s"),
    _Column("sync", ("timing_s/sync",), ".1f", 4, 13, "cyan", "s"),
    _Column("=", ("timing_s/step",), ".1f", 5, 2, unit="s"),
    _Column("", ("perf/throughput",), ",.0f", 7, 8, "cyan", " tok/s"),
)
_ETA = _Column("eta", (), "", 6, 1, "dim")
_RECENT = 20


class Console:
    """Writer to standard output, with secrets redacted.

    The columns of step lines are those that any step so far has had; a missing number is a dash.
    """

    def __init__(self, total_steps: int | None = None, out: rich.console.Console | None = None) -> None:
        self.total_steps = total_steps
        self._out = out or rich.console.Console(highlight=False)
        self._columns: tuple[_Column, ...] = ()
        self._step_times: deque[float] = deque(maxlen=_RECENT)

    def banner(self, text: str, title: str = "") -> None:
        """Print a block of text between two rules, such as the derived sizes of a run."""
        rule = f"── {title} " if title else ""
        self._write(Text(rule + "─" * (72 - len(rule)), style="dim"))
        self._write(Text(redact(text).rstrip("\n")))
        self._write(Text("─" * 72, style="dim"))

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the line of one step. A terminal shows the columns that fit; files get all of them."""
        self._columns = tuple(
            column for column in _LEARNING + _TIMES if column in self._columns or column.find(metrics) is not None
        )
        line = Text("step  ").append(self._progress(step), style="bold")
        remaining = self._remaining(metrics, step)
        columns = self._fitting_columns(len(line) + len("  |"), has_eta=bool(remaining))
        for column in columns:
            if column in _LEARNING:
                line.append("  ").append_text(_cell(column, metrics))
        line.append("  |")
        for column in columns:
            if column in _TIMES:
                line.append("  ").append_text(_cell(column, metrics))
        if _ETA in columns:
            line.append(f"  {_ETA.label} {remaining}", style=_ETA.style)
        self._write(line)

    def validation(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the line of one validation: all `val/` metrics, without the prefix."""
        line = Text("valid ").append(self._progress(step), style="bold")
        for name, value in metrics.items():
            if name.startswith("val/"):
                line.append(f"  {name.removeprefix('val/')} ", style="dim").append(f"{value:.3f}", style="bold magenta")
        self._write(line)

    def advice(self, text: str) -> None:
        self._write(Text("  ! ", style="bold yellow").append(redact(text), style="yellow"))

    def note(self, text: str) -> None:
        self._write(Text(redact(text)))

    def hints(self, texts: Iterable[str]) -> None:
        """Print hints about the settings, such as values that are probably not intended."""
        for text in texts:
            self.note(f"hint: {text}")

    def _progress(self, step: int) -> str:
        if self.total_steps is None:
            return f"{step:>6}"
        width = len(str(self.total_steps))
        return f"{step:>{width}}/{self.total_steps}"

    def _remaining(self, metrics: Mapping[str, float], step: int) -> str:
        """The estimated time to the last step, from recent steps; empty if it is unknown."""
        if (seconds := metrics.get("timing_s/step")) is not None:
            self._step_times.append(seconds)
        if self.total_steps is None or not self._step_times:
            return ""
        return duration(max(0, self.total_steps - step) * sum(self._step_times) / len(self._step_times))

    def _fitting_columns(self, used: int, *, has_eta: bool) -> list[_Column]:
        columns = [*self._columns, _ETA] if has_eta else [*self._columns]
        if not self._out.is_terminal:
            return columns
        shown = set()
        for column in sorted(columns, key=lambda column: column.priority):
            used += column.total_width
            if used > self._out.width:
                break
            shown.add(column)
        return [column for column in columns if column in shown]

    def _write(self, line: Text) -> None:
        try:
            self._out.print(line, soft_wrap=True)  # never folded
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk below a redirection: the line is lost
                raise


def _cell(column: _Column, metrics: Mapping[str, float]) -> Text:
    value = column.find(metrics)
    text = "-".rjust(column.width) if value is None else _number(value, column.form, column.width)
    unit = column.unit if value is not None else " " * len(column.unit)
    return Text(f"{column.label} ", style="dim").append(text + unit, column.style)


def _number(value: float, form: str, width: int) -> str:
    """Format right-aligned in `width`: a number that is too long loses decimals, then gets an exponent."""
    texts = (
        format(value, form),
        format(value, ".1f"),
        format(value, ".0f"),
        f"{value:.0e}".replace("+0", "").replace("+", ""),
    )
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)


def duration(seconds: float) -> str:
    """Format with at most two units: `45s`, `3m20s`, `1h05m`, `2d03h`."""
    total = round(seconds)
    for name, unit, minor_name, minor in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if total >= unit:
            return f"{total // unit}{name}{total % unit // minor:02d}{minor_name}"
    return f"{total}s"
