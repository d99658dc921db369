"""The lines of the live panel: the step, the stages in progress, recent numbers as sparklines, and the last warning."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text

from verl.redaction import show_controls
from verl.tracking.run_history import RunHistory
from verl.tracking.stages import Progress, Stage, duration
from verl.tracking.step_line import LEARNING, TIMES, Column, format_number

_SPINNER, HZ = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", 4
_BARS = "▁▂▃▄▅▆▇█"
_MAX_LINES = 9
_CELL_WIDTH, _GAP = 37, 3  # with a sparkline of 10 bars and the change
_LABEL_WIDTH, _NUMBER_WIDTH, _CHANGE_WIDTH, _MAX_BARS = 10, 7, 8, 24
_BAR_WIDTH = 24
_VALIDATION = Column("validation", ".3f", 6, style="bold magenta")
_SHOWN = ("loss", "reward", "validation", "kl", "teacher kl", "entropy", "tokens", "truncated", "grad norm", "lr")
_COLUMNS = {
    column.label: column
    for column in (*LEARNING, *TIMES, _VALIDATION, Column("truncated", ".0%", 6), Column("staleness", ".0f", 6))
}
CELLS = tuple(_COLUMNS[label] for label in (*_SHOWN, "staleness", "tokens/s"))
"""The numbers of the panel, the most important first; those that the run does not have take no space."""
OTHER_LABELS = ("step", "elapsed", "eta", "warnings")


class Panel:
    """The panel of a run. Numbers are rendered once per step and width: lines are drawn several times a second."""

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._cells: tuple[object, list[Text]] = (None, [])  # what the lines were rendered from, and the lines

    def render(self, stages: Sequence[Stage], width: int, height: int, *, has_numbers: bool = True) -> list[Text]:
        """Return the lines that fit a terminal of this size.

        Args:
            stages: What is being done now, each of which gets a line.
            has_numbers: Whether to show the numbers of the run, or only the stages, as during the start.
        """
        width, limit = width - 1, max(1, min(_MAX_LINES, height // 2))  # a full line would wrap in a smaller window
        if not has_numbers:
            return _fit(_render_stages(stages, width)[:limit], width)
        history = self._history
        lines = (_render_stages(stages, width) if stages else [_spinning(_render_pause(history))])[:limit]
        if len(lines) < limit:
            lines.insert(0, _render_header(history, width))
        warning = [_render_warning(history)] if history.warning_count and len(lines) < limit else []
        cells = self._render_cells(width)[: limit - len(lines) - len(warning)]
        return [*_fit(lines, width), *cells, *_fit(warning, width)]

    def render_once(self, width: int) -> list[Text]:
        """Return all lines, without a spinner."""
        history = self._history
        lines = [_render_header(history, width), _render_pause(history), *_render_cells(history, width)]
        return _fit([*lines, *([_render_warning(history)] if history.warning_count else [])], width)

    def _render_cells(self, width: int) -> list[Text]:
        """The numbers, several in each line, at the same positions as long as the width stays."""
        source = (width, self._history.steps, self._history.validations)
        if source != self._cells[0]:
            self._cells = source, _fit(_render_cells(self._history, width), width)
        return self._cells[1]


def _fit(lines: list[Text], width: int) -> list[Text]:
    for line in lines:
        line.plain = show_controls(line.plain)
        line.truncate(width, overflow="ellipsis")
    return lines


def _render_header(history: RunHistory, width: int) -> Text:
    """The step, a bar of the steps that are done, and the time that has passed and is left."""
    done, total = (history.steps[-1].step if history.steps else 0), history.total_steps
    times = f" elapsed {duration(max(0.0, time.time() - history.start))}"
    if (eta_s := history.eta_s()) is not None:
        times += f"  eta {duration(eta_s)}"
    line = Text("── ", style="dim").append("step ", style="not dim")
    line.append(f"{history.last_step}{f'/{total}' if total else ''} ", style="not dim bold")
    line.append_text(_render_bar(done / total if total else 0.0, max(0, width - len(line) - len(times)), "green"))
    return line.append(times, style="dim")


def _render_stages(stages: Sequence[Stage], width: int) -> list[Text]:
    name_width = min(max((len(stage.name) for stage in stages), default=0), width // 2)
    return [_spinning(_render_stage(stage, name_width, width)) for stage in stages]


def _render_pause(history: RunHistory) -> Text:
    """What is known if no stage is: a step that has no stages, or the age of the last step."""
    if history.running is not None:
        return Text("training ").append(f"{duration(time.time() - history.running[1])}", style="dim")
    if not history.steps:
        return Text("waiting for the first step")
    age_s = max(0.0, time.time() - history.steps[-1].time)
    if history.steps[-1].step == history.total_steps:
        return Text(f"the last step ended {duration(age_s)} ago")
    line = Text(f"last step {duration(age_s)} ago")
    if history.step_s is None:
        return line
    left_s = history.step_s - age_s
    expected = f"is expected in about {duration(left_s)}" if left_s >= 0 else f"was expected {duration(-left_s)} ago"
    return line.append(f", the next {expected}", style="dim")


def _render_stage(stage: Stage, name_width: int, width: int) -> Text:
    line = Text(stage.name.ljust(name_width)[:name_width])
    line.append(f" {stage.elapsed():>6}", style="dim")
    progress = stage.read_progress()
    text = str(progress)
    if isinstance(progress, Progress) and progress.finished:
        bar_width = min(_BAR_WIDTH, width - len(line) - len(text) - 6)
        if bar_width >= 8:
            line.append("  ").append_text(_render_bar(progress.share, bar_width, "cyan"))
    return line.append(f"  {text}") if text else line


def _render_cells(history: RunHistory, width: int) -> list[Text]:
    count = max(2, min(4, (width + _GAP) // (_CELL_WIDTH + _GAP))) if width >= 56 else 1
    cell_width = (width - _GAP * (count - 1)) // count
    cells = [_render_cell(column, values, cell_width) for column in CELLS if (values := _read_values(history, column))]
    return [Text(" " * _GAP).join(cells[start : start + count]) for start in range(0, len(cells), count)]


def _render_cell(column: Column, values: Sequence[float], width: int) -> Text:
    text = Text(f"{column.label:<{_LABEL_WIDTH}} ", style="dim")
    text.append(format_number(values[-1], column.form, _NUMBER_WIDTH), style=column.style or "default")
    has_change = width >= _CELL_WIDTH
    bar_count = width - len(text) - 1 - _CHANGE_WIDTH * has_change
    values = values[-max(1, min(bar_count, _MAX_BARS)) :]
    text.append(f" {draw_sparkline(values)}", style="cyan")
    if has_change and values[-1] != values[0]:
        text.append(" " * (width - len(text) - _CHANGE_WIDTH))
        text.append(format_number(values[-1] - values[0], f"+{column.form}", _CHANGE_WIDTH), style="dim")
    text.truncate(width, pad=True)
    return text


def _read_values(history: RunHistory, column: Column) -> list[float]:
    """Return the values of recent steps, or validations; none for a number that is always 0 unless used."""
    if column is _VALIDATION:
        return [mean for each in history.validations if (mean := _find_validation_mean(each.metrics)) is not None]
    values = [value for each in history.steps[-_MAX_BARS:] if (value := column.find(each.metrics)) is not None]
    return values if column.label != "staleness" or any(values) else []


def _find_validation_mean(metrics: Mapping[str, float]) -> float | None:
    means = {name: value for name, value in metrics.items() if name.startswith("val/") and "/mean@" in name}
    whole = [value for name, value in means.items() if name.startswith("val/all/")]
    values = whole or [*means.values()] or [metrics[name] for name in ("val/loss",) if name in metrics]
    return sum(values) / len(values) if values else None


def _render_warning(history: RunHistory) -> Text:
    count = history.warning_count
    shown = " ".join(history.last_warning.split())
    title = "1 warning: " if count == 1 else f"{count} warnings, the last: "
    return Text(title, style="bold yellow").append(shown, style="yellow")


def _render_bar(share: float, width: int, style: str) -> Text:
    filled = round(min(1.0, max(0.0, share)) * width)
    return Text("━" * filled, style=style).append("─" * (width - filled), style="dim")


def _spinning(line: Text) -> Text:
    return Text(f"{_SPINNER[int(time.monotonic() * HZ) % len(_SPINNER)]} ", style="cyan").append_text(line)


def draw_sparkline(values: Iterable[float]) -> str:
    """Return one character per value, from the lowest to the highest; a value that is not finite is a cross."""
    values = [*values]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def draw(value: float) -> str:
        if not math.isfinite(value):
            return "×"
        return _BARS[3 if high == low else min(7, int((value - low) / (high - low) * 8))]

    return "".join(map(draw, values))
