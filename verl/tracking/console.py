"""What a person sees: a banner at the start, one line per step, one per validation, advice in between.

Lines have the same columns in the same places through the whole run, on a terminal and in a file alike, so that an eye
that runs down a column sees the curve. Colours come on terminals only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import rich.console
from rich.text import Text

from verl.redaction import redact

__all__ = ["Console", "duration"]


@dataclass(frozen=True, slots=True)
class _Column:
    label: str
    keys: tuple[str, ...]  # the first that is present is shown
    form: str
    width: int
    style: str = ""

    def find(self, metrics: Mapping[str, float]) -> float | None:
        return next((metrics[key] for key in self.keys if key in metrics), None)


_LEARNING = (
    _Column("loss", ("train/loss",), ".4f", 6, "bold green"),
    _Column("lr", ("train/lr",), ".1e", 7),
    _Column("reward", ("reward/mean",), ".3f", 6, "bold green"),
    _Column("kl", ("actor/kl_loss", "actor/reward_kl", "actor/ppo_kl"), ".4f", 7),
    _Column("entropy", ("actor/entropy",), ".2f", 5),
    _Column("clip", ("actor/pg_clipfrac",), ".2f", 5),
    _Column("grad", ("actor/grad_norm", "train/grad_norm"), ".2f", 5),
    _Column("critic", ("critic/vf_loss",), ".4f", 6),
    _Column("process", ("process/accuracy",), ".2f", 5),
    _Column("dropped", ("sampling/groups_dropped",), ".0f", 4),
    _Column("len", ("response_length/mean",), ".1f", 6),
)
_PHASES = ("gen", "prep", "update", "sync")
_TIMES = tuple(_Column(phase, (f"timing_s/{phase}",), ".1f", 4, "cyan") for phase in _PHASES)
_RECENT = 20


class Console:
    """Writes to standard output, without secrets. The columns are those that some step has had; a number that is
    missing is a dash."""

    def __init__(self, total_steps: int | None = None, out: rich.console.Console | None = None) -> None:
        self.total_steps = total_steps
        self._out = out or rich.console.Console(highlight=False)
        self._columns: tuple[_Column, ...] = ()
        self._step_times: deque[float] = deque(maxlen=_RECENT)

    def banner(self, text: str, title: str = "") -> None:
        """What will be run, before it runs: the table of derived sizes, the model, the folder."""
        rule = f"── {title} " if title else ""
        self._write(Text(rule + "─" * (72 - len(rule)), style="dim"))
        self._write(Text(redact(text).rstrip("\n")))
        self._write(Text("─" * 72, style="dim"))

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        """The line of one step."""
        self._columns = tuple(
            column for column in _LEARNING + _TIMES if column in self._columns or column.find(metrics) is not None
        )
        line = Text("step  ").append(self._progress(step), style="bold")
        for column in self._columns:
            if column in _LEARNING:
                line.append("  ").append_text(_cell(column, metrics))
        line.append("  |")
        for column in self._columns:
            if column in _TIMES:
                line.append("  " if column.label != _PHASES[0] else " ").append_text(_cell(column, metrics, "s"))
        self._write(line.append_text(self._speed(metrics, step)))

    def validation(self, metrics: Mapping[str, float], step: int) -> None:
        """The line of one validation: all `val/` numbers, without the prefix."""
        line = Text("valid ").append(self._progress(step), style="bold")
        for name, value in metrics.items():
            if name.startswith("val/"):
                line.append(f"  {name.removeprefix('val/')} ", style="dim").append(f"{value:.3f}", style="bold magenta")
        self._write(line)

    def advice(self, text: str) -> None:
        """One line of advice, from the diagnosis."""
        self._write(Text("  ! ", style="bold yellow").append(redact(text), style="yellow"))

    def note(self, text: str) -> None:
        """One plain line: what was saved, loaded, waited for or dropped."""
        self._write(Text(redact(text)))

    def _progress(self, step: int) -> str:
        if self.total_steps is None:
            return f"{step:>6}"
        width = len(str(self.total_steps))
        return f"{step:>{width}}/{self.total_steps}"

    def _speed(self, metrics: Mapping[str, float], step: int) -> Text:
        text = Text()
        if (seconds := metrics.get("timing_s/step")) is not None:
            self._step_times.append(seconds)
            text.append(f"  = {_number(seconds, '.1f', 5)}s")
        if (throughput := metrics.get("perf/throughput")) is not None:
            text.append(f"  {_number(throughput, ',.0f', 7)} tok/s", style="cyan")
        if self.total_steps is not None and self._step_times:
            left = max(0, self.total_steps - step) * sum(self._step_times) / len(self._step_times)
            text.append(f"  eta {duration(left)}", style="dim")
        return text

    def _write(self, line: Text) -> None:
        self._out.print(line, soft_wrap=True)  # never folded: a line is a line, in files too


def _cell(column: _Column, metrics: Mapping[str, float], unit: str = "") -> Text:
    value = column.find(metrics)
    text = "-".rjust(column.width) if value is None else _number(value, column.form, column.width)
    return Text(f"{column.label} ", style="dim").append(
        text + (unit if value is not None else " " * len(unit)), column.style
    )


def _number(value: float, form: str, width: int) -> str:
    """Right-aligned in `width`; a number too long for that loses decimals, then goes to exponents: columns stay."""
    texts = (
        format(value, form),
        format(value, ".1f"),
        format(value, ".0f"),
        f"{value:.0e}".replace("+0", "").replace("+", ""),
    )
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)


def duration(seconds: float) -> str:
    """Two units at most: `45s`, `3m20s`, `1h05m`, `2d03h`."""
    total = round(seconds)
    for name, unit, minor_name, minor in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if total >= unit:
            return f"{total // unit}{name}{total % unit // minor:02d}{minor_name}"
    return f"{total}s"
