"""Lines at the bottom of a terminal that are redrawn several times a second, below those that are printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.text import Text

Draw = Callable[[int, int], Sequence[Text]]


class LiveLines(Live):
    """Redraws lines until it is stopped, and then erases them. Errors of drawing are hidden.

    Args:
        draw: Returns the lines for a width and a height.
    """

    def __init__(self, console: Console, draw: Draw, hz: float) -> None:
        self._lines = _Lines(draw)
        options = {"redirect_stdout": False, "redirect_stderr": False, "transient": True}
        super().__init__(self._lines, console=console, refresh_per_second=hz, **options)  # type: ignore[arg-type]

    def start(self, refresh: bool = True) -> None:
        with suppress(OSError):  # the terminal may be gone
            super().start(refresh)

    def refresh(self) -> None:
        with suppress(OSError):
            super().refresh()

    def stop(self) -> None:
        with suppress(OSError):
            super().stop()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Erase the rows that a narrower window has added, before the others are erased and drawn again."""
        extra = self._lines.count_wrapped_rows(self.console.width)
        up: list[tuple[ControlType, int]] = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)]
        erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *(up * extra))
        return [*([erase] if extra else []), *super().process_renderables(renderables)]


class _Lines:
    """The lines as they are drawn, and how wide they were when they were drawn last."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._drawn: list[tuple[Text, int, list[Segment]]] = []

    def count_wrapped_rows(self, width: int) -> int:
        """Return how many rows of a terminal of this width the last lines take beyond one each."""
        return sum((drawn - 1) // width for _, drawn, _ in self._drawn if drawn)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        try:
            lines = self._draw(*options.size)
        except Exception:  # noqa: BLE001 (a display must not end a run)
            lines = []
        known = {id(entry[0]): entry for entry in self._drawn}  # the same object is the same line
        self._drawn = [known.get(id(line)) or (line, line.cell_len, [*line.render(console, end="")]) for line in lines]
        for index, (_, _, segments) in enumerate(self._drawn):
            yield from segments
            if index < len(lines) - 1:
                yield Segment.line()
