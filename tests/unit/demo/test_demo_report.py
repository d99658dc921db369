"""The demo's last page."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.commands.arguments import COMMANDS
from verl.commands.demo import read_arguments
from verl.demo.folder import Assets
from verl.demo.report import Example, choose_sample, describe_next, render_curve, render_report

pytestmark = pytest.mark.unit


def test_the_report_shows_before_after_curve_and_responses() -> None:
    records = [
        {"step": 0, "val/addition/mean@1": 0.41},
        {"step": 1, "reward/mean": 0.30},
        {"step": 2, "reward/mean": 0.70, "val/addition/mean@1": 0.5},
        {"step": 3, "reward/mean": 0.90},
        {"step": 3, "val/addition/mean@1": 0.92},
    ]
    text = render_report(records, [Example("12+34=", "046", "047", "046")])
    assert "before  (step   0)    41.0 %" in text
    assert "after   (step   3)    92.0 %" in text
    assert "+51.0 points" in text
    assert "3 steps, from 0.30 to 0.90" in text
    assert "12+34=" in text
    assert "047   ✗  046   ✓  046" in text


def test_the_sample_of_problems_represents_all_of_them() -> None:
    kinds = {("046", "046"): 48, ("0", "046"): 33, ("0", "0"): 16, ("046", "0"): 3}
    examples = [Example("12+34=", "046", *kind) for kind, count in kinds.items() for _ in range(count)]
    chosen = Counter((example.before, example.after) for example in choose_sample(examples))
    assert chosen == {("046", "046"): 3, ("0", "046"): 2, ("0", "0"): 1}
    assert "of 100 held-out problems 33 turned right, 3 turned wrong" in render_report([], examples)
    assert choose_sample(examples[:2]) == examples[:2]


def test_a_run_without_steps_has_an_empty_report() -> None:
    assert render_report([]) == ""


@given(st.lists(st.floats(-5, 5), max_size=200), st.integers(1, 80))
def test_a_curve_is_never_wider_than_asked_and_follows_order(values: list[float], width: int) -> None:
    drawn = render_curve(values, width)
    assert len(drawn) == min(width, len(values))
    rising = render_curve(sorted(values), width)
    assert list(rising) == sorted(rising)


def test_options_of_the_demo_and_settings_of_the_run_are_separated() -> None:
    folder, loaded = read_arguments(["--dir", "here", "--steps", "7", "data.train_batch_size=32"])
    assert folder == Path("here")
    assert loaded.config.trainer.total_training_steps == 7
    assert loaded.config.data.train_batch_size == 32
    assert loaded.config.trainer.checkpoint_dir == Path("here/run")


def test_the_demo_names_the_commands_that_look_at_its_run_and_use_its_model() -> None:
    text = describe_next(Assets(Path("demo")), Path("demo/trained"), Path("demo/run"))
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("  ")]
    assert [command[:3] for command in commands] == [
        ["verl", "report", "demo/run"],
        ["verl", "show", "demo/run"],
        ["verl", "generate", "demo/test.parquet"],
        ["verl", "eval", "responses.parquet"],
    ]
    assert {command[1] for command in commands} <= COMMANDS.keys()
    assert "model.path=demo/trained" in commands[2]
