"""The console: one line per step, columns that do not move, colours on terminals alone."""

from __future__ import annotations

import io
import re
import time
from typing import Literal

import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st

from verl.tracking.console import Console, duration

pytestmark = pytest.mark.unit

STEP = {
    "reward/mean": 0.531,
    "actor/kl_loss": 0.0012,
    "actor/entropy": 0.81,
    "actor/pg_clipfrac": 0.02,
    "actor/grad_norm": 0.42,
    "response_length/mean": 4.0,
    "timing_s/gen": 0.6,
    "timing_s/prepare": 0.4,
    "timing_s/update": 1.2,
    "timing_s/sync": 0.1,
    "timing_s/step": 2.4,
    "perf/throughput": 2913.2,
}


def lines(
    *steps: tuple[int, dict[str, float]],
    total: int | None = 100,
    terminal: bool = False,
    width: int = 40,
    color: Literal["auto"] | None = "auto",
) -> list[str]:
    out = io.StringIO()
    rich_console = rich.console.Console(
        file=out, force_terminal=terminal, highlight=False, width=width, color_system=color
    )
    console = Console(total, rich_console)
    for step, metrics in steps:
        console.step(metrics, step)
    return out.getvalue().splitlines()


def test_a_step_is_one_line_with_every_number_in_order() -> None:
    (line,) = lines((12, STEP))
    assert " ".join(line.split()) == (
        "step 12/100 reward 0.531 kl 0.0012 entropy 0.81 clipped 0.02 grad norm 0.42 tokens 4 "
        "| generate 0.6s train 1.6s sync 0.1s total 2.4s 2,913 tokens/s eta 3m31s"
    )


def test_a_supervised_step_shows_its_loss_and_learning_rate() -> None:
    step = {
        "train/loss": 1.2345,
        "train/lr": 2e-5,
        "train/grad_norm": 0.5,
        "timing_s/update": 1.0,
        "timing_s/step": 1.1,
    }
    (line,) = lines((3, step))
    assert (
        " ".join(line.split()) == "step 3/100 loss 1.2345 lr 2.0e-05 grad norm 0.50 | train 1.0s total 1.1s eta 1m47s"
    )


@given(st.floats(min_value=-1e30, max_value=1e30), st.floats(min_value=0, max_value=9e6))
def test_columns_keep_their_positions_for_any_numbers(value: float, seconds: float) -> None:
    learning = {name: value for name in STEP if not name.startswith(("timing_s/", "perf/"))}
    times = {name: seconds for name in STEP if name.startswith("timing_s/")}
    usual, odd = lines((1, STEP), (100, learning | times | {"perf/throughput": 1.0}))
    assert odd.index("|") == usual.index("|")
    assert odd.index("tokens/s") == usual.index("tokens/s")


def test_not_a_number_is_shown_and_a_missing_number_is_a_dash() -> None:
    usual, nan, missing = lines(
        (1, STEP),
        (2, STEP | {"actor/grad_norm": float("nan")}),
        (3, {k: v for k, v in STEP.items() if k != "actor/entropy"}),
    )
    assert "grad norm   nan" in nan
    assert "entropy     -" in missing
    assert len({line.index("|") for line in (usual, nan, missing)}) == 1


def test_a_column_that_the_first_step_lacks_is_not_shown() -> None:
    (line,) = lines((1, {"reward/mean": 1.0}))
    assert "entropy" not in line
    assert "reward" in line


def test_lines_are_never_folded_and_a_file_gets_no_colours() -> None:
    plain, coloured = lines((1, STEP))[0], lines((1, STEP), terminal=True)[0]
    assert len(plain) > 100
    assert "\x1b" not in plain
    assert "\x1b[" in coloured


MORE = {"critic/vf_loss": 0.25, "process/accuracy": 0.5, "sampling/groups_dropped": 3.0}


@pytest.mark.parametrize(
    ("width", "metrics", "labels"),
    [
        (80, STEP, "reward | generate total eta"),
        (80, STEP | MORE, "reward | generate total eta"),
        (120, STEP, "reward kl | generate train sync total eta"),
        (160, STEP, "reward kl entropy grad norm tokens | generate train sync total eta"),
    ],
)
def test_a_terminal_shows_the_most_important_columns_that_fit(
    width: int, metrics: dict[str, float], labels: str
) -> None:
    steps = ((1, metrics), (99, metrics | {"timing_s/step": 1e5}))
    for line in lines(*steps, terminal=True, width=width, color=None):
        assert len(line) <= width
        assert [word for word in line.split()[2:] if word[0] == "|" or word[0].isalpha()] == labels.split()


def test_the_eta_follows_recent_steps() -> None:
    quick = [(step, STEP | {"timing_s/step": 1.0}) for step in range(1, 41)]
    slow_start = [(1, STEP | {"timing_s/step": 1000.0}), *quick[1:]]
    assert "eta 1m00s" in lines(*slow_start)[-1]
    assert "eta" not in lines((1, STEP), total=None)[0]


def test_validation_banner_advice_and_notes_are_lines_of_their_own() -> None:
    out = io.StringIO()
    console = Console(100, rich.console.Console(file=out, width=40))
    console.banner("prompts a step   64\nsamples a step  512\n", title="sizes")
    console.validation({"val/addition/mean@1": 0.71234, "reward/mean": 1.0}, 12)
    console.advice("try [this]")
    console.note("saved")
    text = out.getvalue().splitlines()
    assert text[0].startswith("── sizes ─")
    assert text[1:3] == ["prompts a step   64", "samples a step  512"]
    assert text[4:] == ["validation  12/100  addition/mean@1 0.712", "  ! try [this]", "saved"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (45.4, "45s"), (59.9, "1m00s"), (200, "3m20s"), (3900, "1h05m"), (183600, "2d03h")]
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_stage_is_a_line_in_a_file_and_a_spinner_with_progress_on_a_terminal() -> None:
    plain, terminal = io.StringIO(), io.StringIO()
    console = Console(out=rich.console.Console(file=plain))
    with console.stage("starting Ray"), console.stage("validating", is_logged=False):
        pass
    assert plain.getvalue() == "starting Ray ...\n"
    console = Console(out=rich.console.Console(file=terminal, force_terminal=True, width=100, color_system=None))
    with console.stage("starting Ray"), console.stage("generating", lambda: "3 of 64 responses"):
        console.note("a line above")
        time.sleep(0.4)
    assert re.search(r"starting Ray +0s\n.*generating +0s  3 of 64 responses", terminal.getvalue()), "a line each"
    assert "a line above" in terminal.getvalue()
    before = terminal.getvalue()
    time.sleep(0.4)
    assert terminal.getvalue() == before, "nothing is drawn after the last stage"


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_do_not_reach_the_terminal(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(10, rich.console.Console(file=out, force_terminal=terminal, color_system=None, width=200))
    hostile = "\x1b]0;title\x07\x9b2J\x7f"
    with console.stage(hostile):
        console.validation({f"val/{hostile}": 0.5}, 1)
        console.banner("sizes", hostile)
    assert "]0;title" in out.getvalue()
    shown = out.getvalue()
    for sequence in ("\x1b]0", "\x07", "\x9b", "\x7f"):
        assert sequence not in shown
    assert " 0.500" in shown


def test_advice_is_reported_also_if_it_was_given_before() -> None:
    console, reported = Console(out=rich.console.Console(file=io.StringIO())), list[tuple[str, str]]()
    console.advice("first", "no-signal")
    with console.report_advice(lambda *advice: reported.append(advice)):
        console.advice("second")
    console.advice("third")
    assert reported == [("first", "no-signal"), ("second", "")]
    with console.report_advice(lambda *advice: reported.append(advice)):
        assert reported[2:] == [("third", "")]


def test_the_rule_of_an_advice_can_be_looked_up() -> None:
    out = io.StringIO()
    console = Console(out=rich.console.Console(file=out, width=20))
    console.advice("all rewards are equal", "no-signal")
    console.advice("something else")
    assert out.getvalue() == "  ! all rewards are equal (verl explain no-signal)\n  ! something else\n"
