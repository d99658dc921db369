"""Console output of a run: a banner at the start, one line per step and per validation, and advice.

Columns keep their positions through the whole run, so that a curve can be read down a column. Terminals get colors, and
the columns that fit their width; all metrics are in metrics.jsonl.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import rich.console
from rich.live import Live
from rich.text import Text

from verl.redaction import redact, show_controls


@dataclass(frozen=True, slots=True)
class _Column:
    label: str
    keys: tuple[str, ...]  # the first that the metrics have is shown
    form: str
    width: int
    priority: int  # a narrow terminal drops the columns with the highest numbers first
    style: str = ""
    unit: str = ""
    is_sum: bool = False  # of all keys, instead of the first

    def find(self, metrics: Mapping[str, float]) -> float | None:
        found = [metrics[key] for key in self.keys if key in metrics]
        return (sum(found) if self.is_sum else found[0]) if found else None

    @property
    def total_width(self) -> int:
        """The characters it takes in a line, with the gap to its neighbor."""
        return len(f"  {self.label} ") + self.width + len(self.unit)


_LEARNING = (
    _Column("loss", ("train/loss",), ".4f", 6, 0, "bold green"),
    _Column("lr", ("train/lr",), ".1e", 7, 5),
    _Column("reward", ("reward/mean",), ".3f", 6, 0, "bold green"),
    _Column("kl", ("actor/kl_loss", "actor/reward_kl", "actor/ppo_kl"), ".4f", 6, 4),
    _Column("teacher kl", ("actor/distillation_kl",), ".4f", 6, 4),
    _Column("entropy", ("actor/entropy",), ".2f", 5, 8),
    _Column("clipped", ("actor/pg_clipfrac",), ".2f", 5, 11),
    _Column("grad norm", ("actor/grad_norm", "train/grad_norm"), ".2f", 5, 7),
    _Column("value loss", ("critic/vf_loss",), ".4f", 6, 9),
    _Column("process accuracy", ("process/accuracy",), ".2f", 5, 9),
    _Column("dropped", ("sampling/groups_dropped",), ".0f", 4, 12),
    _Column("tokens", ("response_length/mean",), ".0f", 5, 6),
)
_TIMES = (
    _Column("generate", ("timing_s/gen",), ".1f", 4, 3, "cyan", "s"),
    _Column("train", ("timing_s/prepare", "timing_s/update"), ".1f", 4, 3, "cyan", "s", is_sum=True),
    _Column("sync", ("timing_s/sync",), ".1f", 4, 3, "cyan", "s"),
    _Column("total", ("timing_s/step",), ".1f", 5, 2, unit="s"),
    _Column("", ("perf/throughput",), ",.0f", 7, 10, "cyan", " tokens/s"),
)
_ETA = _Column("eta", (), "", 6, 1, "dim")
_RECENT = 20
_SPINNER, _SPINNER_HZ = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", 4


@dataclass(eq=False, slots=True)
class _Stage:
    name: str
    progress: Callable[[], str]
    start: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        elapsed, progress = duration(time.monotonic() - self.start), self.progress()
        return f"{self.name} ({elapsed}){': ' * bool(progress)}{progress}"


class Console:
    """Writer to standard output, with secrets redacted.

    The columns of step lines are those that any step so far has had; a missing number is a dash.
    """

    def __init__(self, total_steps: int | None = None, out: rich.console.Console | None = None) -> None:
        self.total_steps = total_steps
        self._out = out or rich.console.Console(highlight=False)
        self._columns: tuple[_Column, ...] = ()
        self._step_times: deque[float] = deque(maxlen=_RECENT)
        self._stages: list[_Stage] = []
        self._live: Live | None = None
        self._unreported: list[str] = []
        self._report: Callable[[str], None] = self._unreported.append
        self.is_animated = self._out.is_terminal

    @contextmanager
    def stage(self, name: str, progress: Callable[[], str] = str, *, is_logged: bool = True) -> Iterator[None]:
        """Show what the run is doing: on a terminal with a spinner and its seconds, elsewhere as a line.

        Args:
            name: What is being done, such as "starting Ray". Stages may overlap.
            progress: Returns how far it is, such as "12 of 64".
            is_logged: Whether to print a line where there is no terminal.
        """
        if not self.is_animated:
            if is_logged:
                self.note(f"{name} ...")
            yield
            return
        self._stages.append(stage := _Stage(name, progress))
        if self._live is None:
            self._live = Live(
                get_renderable=self._render_stages,
                console=self._out,
                refresh_per_second=_SPINNER_HZ,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        try:
            yield
        finally:
            self._stages.remove(stage)
            if not self._stages and self._live is not None:
                self._live.stop()
                self._live = None

    def _render_stages(self) -> Text:
        frame = _SPINNER[int(time.monotonic() * _SPINNER_HZ) % len(_SPINNER)]
        text = show_controls("; ".join(map(str, [*self._stages])))
        return Text(f"{frame} {text}", style="cyan", no_wrap=True, overflow="ellipsis")

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
        line = Text("step ").append(self._progress(step), style="bold")
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
        line = Text("validation ").append(self._progress(step), style="bold")
        for name, value in metrics.items():
            if name.startswith("val/"):
                line.append(f"  {name.removeprefix('val/')} ", style="dim").append(f"{value:.3f}", style="bold magenta")
        self._write(line)

    def advice(self, text: str) -> None:
        text = redact(text)
        self._write(Text("  ! ", style="bold yellow").append(text, style="yellow"))
        self._report(text)

    @contextmanager
    def report_advice(self, report: Callable[[str], None]) -> Iterator[None]:
        """Call `report` with every advice of the block, and with those before it that were not reported."""
        before, self._report = self._unreported, report
        self._unreported = []
        for text in before:
            report(text)
        try:
            yield
        finally:
            self._report = self._unreported.append

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
        line.plain = show_controls(line.plain)  # names of metrics may come from rows
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
