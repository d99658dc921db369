"""The live panel: its lines fit any terminal, show no control characters or secrets, and never end a run."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import rich.console
from rich.cells import cell_len

from verl.tracking import explanations
from verl.tracking.console import Console
from verl.tracking.panel import CELLS, OTHER_LABELS, Panel, draw_sparkline
from verl.tracking.run_history import KEPT, RunHistory
from verl.tracking.stages import Progress, Stage
from verl.tracking.step_line import LEARNING, TIMES

pytestmark = pytest.mark.unit

STEP = {
    "reward/mean": 0.531,
    "actor/kl_loss": 0.0012,
    "actor/entropy": 0.81,
    "actor/grad_norm": 0.42,
    "response_length/mean": 412.0,
    "response_length/clip_ratio": 0.03,
    "training/staleness": 0.0,
    "timing_s/step": 10.0,
    "perf/throughput": 2913.2,
}
WARNING = "the policy changes too fast: " + "actor/ppo_kl is 0.7, above the warning limit of 0.5; " * 3
WIDTHS = (60, 80, 120, 160)


def history_of(steps: int, **more: float) -> RunHistory:
    history = RunHistory(100)
    for step in range(1, steps + 1):
        history.record_step({name: value * step for name, value in (STEP | more).items()}, step)
    return history


def render(history: RunHistory, *stages: Stage, width: int = 120, height: int = 40) -> list[str]:
    return [line.plain for line in Panel(history).render(stages, width, height)]


@contextmanager
def terminal(width: int = 100, height: int = 40) -> Iterator[tuple[Console, io.StringIO]]:
    file = io.StringIO()
    out = rich.console.Console(
        file=file, force_terminal=True, width=width, height=height, color_system=None, _environ={"TERM": "xterm"}
    )
    yield Console(100, out), file


def shown(file: io.StringIO) -> list[str]:
    """Every line that was drawn or printed."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n").split("\n")


@pytest.mark.parametrize("width", [10, 30, *WIDTHS, 300])
@pytest.mark.parametrize("height", [4, 10, 24, 60])
def test_the_panel_fits_the_terminal(width: int, height: int) -> None:
    history = history_of(70, **{"training/staleness": 1.0, "actor/distillation_kl": 0.1})
    history.record_validation({"val/語/mean@1": 0.5}, 70)
    history.record_warning(WARNING)
    stages = [Stage("生成" * 9, lambda: Progress(412, 512, left_s=4.0)), Stage("validating")]
    lines = render(history, *stages, width=width, height=height)
    assert 1 <= len(lines) <= max(1, min(9, height // 2))
    assert max(map(cell_len, lines)) < width


@pytest.mark.parametrize("width", WIDTHS)
def test_the_panel_shows_the_step_its_phase_and_all_numbers(width: int) -> None:
    history = history_of(12)
    history.record_validation({"val/a/mean@1": 0.25, "val/b/mean@1": 0.75, "val/a/pass@4": 1.0}, 12)
    history.record_warning(WARNING)
    history.running = 13, time.time()
    lines = render(history, Stage("generating", lambda: Progress(412, 512, left_s=4.0)), width=width)
    text = "\n".join(lines)
    assert lines[0].startswith("── step 13/100 ━")
    assert lines[0].endswith("elapsed 0s  eta 1h35m")
    assert "412 of 512 responses, about 4s left" in lines[1]
    assert ("━" in lines[1]) == (width > 60)
    for name in ("reward", "validation   0.500", "kl", "entropy", "tokens", "truncated", "grad norm", "tokens/s"):
        assert name in text
    assert re.search("reward +6.372 ▁[▁-▇]+█", text)
    assert "staleness" not in text, "it is always 0"
    assert lines[-1].startswith("1 warning: the policy changes too fast")
    assert lines[-1].endswith("…")


def test_the_positions_of_numbers_do_not_depend_on_the_numbers() -> None:
    small, large = (render(history_of(3, **{"reward/mean": value}), width=100) for value in (0.1, -1234567.0))
    assert [line.index("entropy") for line in small if "entropy" in line] == [
        line.index("entropy") for line in large if "entropy" in line
    ]


def test_a_run_without_total_or_steps_says_what_it_waits_for() -> None:
    header, state = render(RunHistory())
    assert header.startswith("── step 0 ─")
    assert "eta" not in header
    assert state.endswith("waiting for the first step")


def test_the_age_of_the_last_step_is_shown_if_no_stage_is_known() -> None:
    history = RunHistory(100)
    history.record_step(STEP, 1, at=time.time() - 4)
    assert "last step 4s ago, the next is expected in about 6s" in render(history)[1]
    history.record_step(STEP, 2, at=time.time() - 30)
    assert "last step 30s ago, the next was expected 20s ago" in render(history)[1]
    history.total_steps = history.steps[-1].step
    assert "the last step ended 30s ago" in render(history)[1]


def test_steps_that_a_resumed_run_repeats_replace_the_earlier_ones() -> None:
    history = history_of(70)
    assert [each.step for each in history.steps] == list(range(71 - KEPT, 71))
    history.record_step(STEP, 60)
    assert history.steps[-1].metrics == STEP
    assert [each.step for each in history.steps][-2:] == [59, 60]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([2.0], "▄"),
        ([1.0, 1.0], "▄▄"),
        ([0.0, 1.0, 2.0, 7.0], "▁▂▃█"),
        ([0.0, float("nan"), float("inf"), 1.0], "▁××█"),
        ([-1e300, 1e300], "▁█"),
    ],
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest_value(values: list[float], line: str) -> None:
    assert draw_sparkline(values) == line


def test_permanent_lines_are_the_same_with_and_without_the_panel() -> None:
    def print_all(console: Console) -> None:
        for step in range(1, 4):
            console.step(STEP, step)
            console.validation({"val/a/mean@1": 0.5}, step)
            console.advice(WARNING)

    with terminal() as (console, file):
        print_all(console)
        plain = shown(file)
    with terminal() as (console, file):
        with console.panel(), console.stage("generating"):
            print_all(console)
        with_panel = shown(file)
    assert [line for line in plain if line] == [line for line in with_panel if line in set(plain) and line]
    assert len(with_panel) > len(plain)


def test_nothing_is_drawn_off_a_terminal_or_if_animation_is_off() -> None:
    file = io.StringIO()
    console = Console(100, rich.console.Console(file=file))
    with console.panel(), console.running_step(1), console.stage("generating", is_logged=False):
        time.sleep(0.3)
    assert file.getvalue() == ""
    with terminal() as (console, file):
        console.is_animated = False
        with console.panel(), console.running_step(1), console.stage("generating", is_logged=False):
            time.sleep(0.3)
        assert file.getvalue() == ""


def test_the_panel_changes_between_stages_and_leaves_nothing_behind() -> None:
    with terminal() as (console, file):
        with console.panel():
            console.step(STEP, 1)
            time.sleep(0.6)
            during = file.getvalue()
            time.sleep(0.6)
            assert len(file.getvalue()) > len(during)
        after = file.getvalue()
        assert after.endswith("\x1b[?25h\r") or after.endswith("\x1b[2K")
        time.sleep(0.4)
        assert file.getvalue() == after


def test_errors_of_progress_and_of_drawing_do_not_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("broken")

    with terminal() as (console, file):
        with console.panel(), console.stage("generating", fail):
            console.note("a line")
        assert "generating" in file.getvalue()
    with terminal() as (console, file):
        monkeypatch.setattr(Panel, "render", fail)
        with console.panel(), console.stage("generating"):
            console.note("a line")
            time.sleep(0.3)
        assert "a line" in shown(file)


def test_a_terminal_that_is_gone_does_not_end_the_run_by_drawing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    out = rich.console.Console(file=Gone(), force_terminal=True, _environ={"TERM": "xterm"})
    console = Console(100, out)
    console.is_animated = True
    with console.panel(), console.stage("generating"):
        time.sleep(0.3)


def test_control_characters_and_secrets_do_not_reach_the_terminal() -> None:
    controls, secret = "\x1b]0;title\x07\x9b2J\x7f", "http://ann:pa55word@host"
    with terminal(160) as (console, file):
        with console.panel(), console.stage(controls + secret, lambda: secret + controls):
            console.advice(f"{controls} {secret}")
            console.validation({f"val/{controls}/mean@1": 0.5}, 1)
            time.sleep(0.3)
        text = file.getvalue()
    assert "]0;title" in text
    for sequence in ("\x1b]0", "\x07", "\x9b", "\x7f", "pa55word"):
        assert sequence not in text


def test_a_narrower_window_erases_the_rows_that_it_has_added() -> None:
    with terminal(120) as (console, file), console.panel():
        console.step(STEP, 1)
        height = len(Panel(console.history).render((), 120, 40))
        console._out.width = 59
        before = len(file.getvalue())
        assert console._live is not None
        console._live.refresh()
        drawn = file.getvalue()[before:]
        assert height < drawn.count("\x1b[1A") + 1 <= 3 * height
        assert max(map(cell_len, shown(file)[-5:])) < 59


def test_every_label_on_a_terminal_has_an_explanation() -> None:
    labels = {column.label for column in (*LEARNING, *TIMES, *CELLS)} | {*OTHER_LABELS}
    for label in labels:
        [explanation] = explanations.find_explanations(label)
        assert explanation.label == label
        assert explanation.meaning.endswith(".")
