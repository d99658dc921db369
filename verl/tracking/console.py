"""Console output of a run: a banner at the start, one line per step and per validation, advice, and a live panel.

Columns keep their positions through the whole run, so that a curve can be read down a column. Terminals get colors, the
columns that fit their width, and below all lines a panel that shows what the run is doing; all metrics are in
metrics.jsonl.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import rich.console
from rich.text import Text

from verl.errors import note_on_error
from verl.redaction import redact, show_controls
from verl.tracking.live_lines import LiveLines
from verl.tracking.panel import HZ, Panel
from verl.tracking.run_history import RunHistory
from verl.tracking.stages import ReadProgress, Stage, duration
from verl.tracking.step_line import StepLines


class Console:
    """Writer to standard output, with secrets redacted.

    On a terminal, `is_animated` allows lines that are redrawn: the stages in progress, and inside `panel` the numbers
    of the run.
    """

    def __init__(self, total_steps: int | None = None, out: rich.console.Console | None = None) -> None:
        self._out = out or rich.console.Console(highlight=False)
        self.history = RunHistory(total_steps)
        self.is_animated = self._out.is_interactive and self._out.encoding.startswith("utf")
        self._step_lines, self._panel_lines = StepLines(), Panel(self.history)
        self._stages: tuple[Stage, ...] = ()
        self._has_panel = False
        self._live: LiveLines | None = None
        self._unreported: list[tuple[str, str]] = []
        self._report: Callable[[str, str], None] = self._keep_unreported

    @contextmanager
    def stage(self, name: str, progress: ReadProgress = str, *, is_logged: bool = True) -> Iterator[None]:
        """Show what the run is doing: on a terminal with a spinner and its seconds, elsewhere as a line.

        Args:
            name: What is being done, such as "starting Ray". Stages may overlap.
            progress: Returns how far it is, such as `Progress(12, 64)`.
            is_logged: Whether to print a line where there is no terminal.

        An exception that leaves the block gets a note with the name.
        """
        if not self.is_animated:
            if is_logged:
                self.note(f"{name} ...")
            with note_on_error(f"while {name}"):
                yield
            return
        stage = Stage(redact(name), progress)
        self._stages += (stage,)
        self._update_live()
        try:
            with note_on_error(f"while {name}"):
                yield
        finally:
            self._stages = tuple(each for each in self._stages if each is not stage)
            self._update_live()

    @contextmanager
    def panel(self) -> Iterator[None]:
        """Show the numbers of the run on a terminal, also between stages."""
        self._has_panel = self.is_animated
        self._update_live()
        try:
            yield
        finally:
            self._has_panel = False
            self._update_live()

    @contextmanager
    def running_step(self, step: int) -> Iterator[None]:
        """Say in the panel that this step is in progress."""
        self.history.running = step, time.time()
        try:
            with note_on_error(f"in step {step}"):
                yield
        finally:
            self.history.running = None

    def banner(self, text: str, title: str = "") -> None:
        """Print a block of text between two rules, such as the derived sizes of a run."""
        rule = f"── {title} " if title else ""
        self._write(Text(rule + "─" * (72 - len(rule)), style="dim"))
        self._write(Text(redact(text).rstrip("\n")))
        self._write(Text("─" * 72, style="dim"))

    def step(self, metrics: Mapping[str, float], step: int, at: float | None = None) -> None:
        """Print the line of one step. A terminal shows the columns that fit; files get all of them.

        Args:
            at: When the step ended, in Unix seconds; None for now.
        """
        self.history.record_step(metrics, step, at)
        remaining_s = self.history.remaining_s()
        remaining = "" if remaining_s is None else duration(remaining_s)
        width = self._out.width if self._out.is_terminal else None
        self._write(self._step_lines.render(metrics, self._describe_step(step), remaining, width))

    def validation(self, metrics: Mapping[str, float], step: int, at: float | None = None) -> None:
        """Print the line of one validation: all `val/` metrics, without the prefix."""
        self.history.record_validation(metrics, step, at)
        line = Text("validation ").append(self._describe_step(step), style="bold")
        for name, value in metrics.items():
            if name.startswith("val/"):
                line.append(f"  {name.removeprefix('val/')} ", style="dim").append(f"{value:.3f}", style="bold magenta")
        self._write(line)

    def advice(self, text: str, rule: str = "") -> None:
        """Print a warning, what to try, and the rule of `verl.diagnosis` to look up; "" if it is not from a rule."""
        text = redact(text)
        self.history.record_warning(text)
        line = Text("  ! ", style="bold yellow").append(text, style="yellow")
        self._write(line.append(f" (verl explain {rule})", style="dim") if rule else line)
        self._report(text, rule)

    @contextmanager
    def report_advice(self, report: Callable[[str, str], None]) -> Iterator[None]:
        """Call `report` with the text and rule of every advice of the block, and of those before that it missed."""
        before, self._report = self._unreported, report
        self._unreported = []
        for text, rule in before:
            report(text, rule)
        try:
            yield
        finally:
            self._report = self._keep_unreported

    def summary(self) -> None:
        """Print the panel once, as it is now."""
        for line in self._panel_lines.render_once(self._out.width):
            self._write(line)

    def note(self, text: str) -> None:
        self._write(Text(redact(text)))

    def hints(self, texts: Iterable[str]) -> None:
        """Print hints about the settings, such as values that are probably not intended."""
        for text in texts:
            self.note(f"hint: {text}")

    def _describe_step(self, step: int) -> str:
        if self.history.total_steps is None:
            return f"{step:>6}"
        width = len(str(self.history.total_steps))
        return f"{step:>{width}}/{self.history.total_steps}"

    def _keep_unreported(self, text: str, rule: str) -> None:
        self._unreported.append((text, rule))

    def _update_live(self) -> None:
        """Start or stop drawing below the printed lines."""
        is_live = bool(self._stages or self._has_panel)
        if is_live and self._live is None:
            self._live = LiveLines(self._out, self._draw, HZ)
            self._live.start()
        elif not is_live and self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, width: int, height: int) -> list[Text]:
        return self._panel_lines.render(self._stages, width, height, has_numbers=self._has_panel)

    def _write(self, line: Text) -> None:
        line.plain = show_controls(line.plain)  # names of metrics may come from rows
        try:
            self._out.print(line, soft_wrap=True)  # never folded
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk below a redirection: the line is lost
                raise
