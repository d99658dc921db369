"""The script that nobody has run on a GPU yet: its settings are valid, and it notices what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu.smoke import LAST, NEEDED, SAVED, Case, estimate, find_problems, list_cases
from public_models import MODELS

from verl.config.batch_sizes import count_extra_devices
from verl.config.load import load
from verl.demo.folder import Assets

pytestmark = pytest.mark.unit

CASES = list_cases([1, 2, 8], ["host", "ipc", "nccl"])


def settings_of(case: Case, folder: Path) -> list[str]:
    return case.settings(folder / "model", Assets(folder), folder / "run")


@pytest.mark.parametrize("case", [*CASES, Case(1, "host", "cpu")], ids=str)
def test_the_settings_of_every_case_are_valid(case: Case, tmp_path: Path) -> None:
    steps = [f"trainer.total_training_steps={LAST}"]
    config = load([*settings_of(case, tmp_path), *steps])[0].config
    assert config.trainer.n_gpus_per_node + count_extra_devices(config) == case.gpus
    assert config.trainer.save_freq == SAVED < LAST


def test_the_estimates_are_those_of_the_plan(tmp_path: Path) -> None:

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODELS["Qwen2.5-0.5B"]))
    one, eight = (estimate(case, settings_of(case, tmp_path), "H100") for case in (CASES[0], CASES[-1]))
    assert 4 < one["gib"] < 40
    assert eight["gib"] < one["gib"], "its weights and moments are sharded"
    assert eight["tokens_per_s"] > one["tokens_per_s"] > 0


def line(step: int, **changes: float) -> dict[str, Any]:
    return {
        "step": step,
        "timing_s/step": 1.0,
        **dict.fromkeys(NEEDED.values(), 1.0),
        "weights/version": step,
        **changes,
    }


def test_a_complete_run_has_no_problems() -> None:
    saved = {"step": SAVED, "timing_s/save": 1.0}
    assert not [*find_problems([line(1), line(2), saved, line(3)])]


def test_a_run_that_did_not_resume_is_noticed() -> None:
    [problem] = find_problems([line(1), line(2)])
    assert "did not train, save or resume" in problem


def test_engines_with_old_weights_are_noticed() -> None:
    [problem] = find_problems([line(1), line(2, **{"weights/version": 1.0}), line(3)])
    assert problem == "step 2: the engines hold version 1 of the weights"


def test_a_step_without_a_probe_is_noticed() -> None:
    broken = {name: value for name, value in line(2).items() if name != NEEDED["probe"]}
    [problem] = find_problems([line(1), broken, line(3)])
    assert problem.startswith("step 2: no probe")
