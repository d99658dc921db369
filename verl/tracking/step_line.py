"""The permanent line of a step: its columns, and which of them fit a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.text import Text

from verl.tracking.explanations import list_metrics


@dataclass(frozen=True, slots=True)
class Column:
    """A number of a step: the first metric of its label that the step has."""

    label: str
    form: str
    width: int
    priority: int = 0  # a narrow terminal drops the columns with the highest numbers first
    style: str = ""
    unit: str = ""
    is_sum: bool = False  # of all metrics, instead of the first
    is_unit_label: bool = False  # the label comes after the number

    def find(self, metrics: Mapping[str, float]) -> float | None:
        found = [metrics[name] for name in list_metrics(self.label) if name in metrics]
        return (sum(found) if self.is_sum else found[0]) if found else None

    @property
    def total_width(self) -> int:
        """The characters it takes in a line, with the gap to its neighbor."""
        return len(f"  {self.title} ") + self.width + len(self.suffix)

    @property
    def title(self) -> str:
        return "" if self.is_unit_label else self.label

    @property
    def suffix(self) -> str:
        return f" {self.label}" if self.is_unit_label else self.unit


LEARNING = (
    Column("loss", ".4f", 6, 0, "bold green"),
    Column("lr", ".1e", 7, 5),
    Column("reward", ".3f", 6, 0, "bold green"),
    Column("kl", ".4f", 6, 4),
    Column("teacher kl", ".4f", 6, 4),
    Column("entropy", ".2f", 5, 8),
    Column("clipped", ".2f", 5, 11),
    Column("grad norm", ".2f", 5, 7),
    Column("value loss", ".4f", 6, 9),
    Column("process accuracy", ".2f", 5, 9),
    Column("dropped", ".0f", 4, 12),
    Column("tokens", ".0f", 5, 6),
)
TIMES = (
    Column("generate", ".1f", 4, 3, "cyan", "s"),
    Column("train", ".1f", 4, 3, "cyan", "s", is_sum=True),
    Column("sync", ".1f", 4, 3, "cyan", "s"),
    Column("total", ".1f", 5, 2, unit="s"),
    Column("tokens/s", ",.0f", 7, 10, "cyan", is_unit_label=True),
)
_ETA = Column("eta", "", 6, 1, "dim")


class StepLines:
    """The lines of a run's steps, whose columns keep their positions.

    The columns are those that any step so far has had; a missing number is a dash.
    """

    def __init__(self) -> None:
        self._columns: tuple[Column, ...] = ()

    def render(self, metrics: Mapping[str, float], progress: str, remaining: str, width: int | None) -> Text:
        """Return the line of one step.

        Args:
            progress: The step, such as "12/100".
            remaining: The time to the end of the run; "" if unknown.
            width: The columns of the terminal; None for all numbers.
        """
        self._columns = tuple(
            column for column in LEARNING + TIMES if column in self._columns or column.find(metrics) is not None
        )
        line = Text("step ").append(progress, style="bold")
        columns = self._fit(len(line) + len("  |"), width, has_eta=bool(remaining))
        for column in columns:
            if column in LEARNING:
                line.append("  ").append_text(_cell(column, metrics))
        line.append("  |")
        for column in columns:
            if column in TIMES:
                line.append("  ").append_text(_cell(column, metrics))
        if _ETA in columns:
            line.append(f"  {_ETA.label} {remaining}", style=_ETA.style)
        return line

    def _fit(self, used: int, width: int | None, *, has_eta: bool) -> list[Column]:
        columns = [*self._columns, _ETA] if has_eta else [*self._columns]
        if width is None:
            return columns
        shown = set()
        for column in sorted(columns, key=lambda column: column.priority):
            used += column.total_width
            if used > width:
                break
            shown.add(column)
        return [column for column in columns if column in shown]


def _cell(column: Column, metrics: Mapping[str, float]) -> Text:
    value = column.find(metrics)
    text = "-".rjust(column.width) if value is None else format_number(value, column.form, column.width)
    suffix = column.suffix if value is not None else " " * len(column.suffix)
    return Text(f"{column.title} ", style="dim").append(text + suffix, column.style)


def format_number(value: float, form: str, width: int) -> str:
    """Format right-aligned in `width`: a number that is too long loses decimals, then gets an exponent."""
    texts = (
        format(value, form),
        format(value, ".1f"),
        format(value, ".0f"),
        f"{value:.0e}".replace("+0", "").replace("+", ""),
    )
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)
