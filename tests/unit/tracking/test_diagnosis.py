"""Each problem is detected when it exists, not when it does not, and is not repeated at every step."""

from __future__ import annotations

import math
import re

import pytest

from verl.config.load import load
from verl.tracking.diagnosis import Diagnosis

pytestmark = pytest.mark.unit


def diagnose(metrics: dict[str, float]) -> list[str]:
    return Diagnosis().advise(metrics, 1)


HEALTHY = {
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/groups_without_signal": 0.5,
    "training/rollout_probs_diff_mean": 0.004,
    "actor/kl_loss": 0.02,
    "actor/ppo_kl": -0.01,
    "actor/skipped_steps": 0.0,
    "response_length/clip_ratio": 0.1,
    "actor/grad_norm": 0.3,
}

PROBLEMS = [
    ({"reward/max": 0.0}, "same reward, 0", "actor_rollout_ref.rollout.n="),
    ({"reward/groups_without_signal": 0.95}, "95% of the prompts", "actor_rollout_ref.rollout.n="),
    ({"reward/mean": 0.5, "reward/std": 40.0, "reward/max": 1e4}, "reward/max is 1e+04", "clip: [-1, 1]"),
    ({"reward/mean": 0.5, "reward/std": 1.0, "reward/min": -50.0}, "reward/min is -50", "clip: [-1, 1]"),
    ({"training/rollout_probs_diff_mean": 0.02}, "0.0200", "disable_cascade_attn=True"),
    ({"actor/kl_loss": 3.0}, "actor/kl_loss is 3", "kl_loss_coef="),
    ({"actor/ppo_kl": -2.0}, "actor/ppo_kl is -2", "optim.lr"),
    ({"actor/skipped_steps": 1.0, "actor/grad_norm": math.inf}, "1 optimizer step(s)", "grad_clip="),
    ({"actor/grad_norm": math.nan}, "NaN: actor/grad_norm", "grad_clip="),
    ({"episode/ended_unscored": 1.0}, "truncated and get 0", "data.max_response_length"),
    ({"response_length/clip_ratio": 0.8}, "80% of the responses", "data.max_response_length"),
]


@pytest.mark.parametrize(("change", "seen", "remedy"), PROBLEMS)
def test_a_problem_is_one_line_with_what_is_wrong_and_what_to_try(
    change: dict[str, float], seen: str, remedy: str
) -> None:
    (line,) = diagnose(HEALTHY | change)
    assert seen in line
    assert remedy in line
    assert "\n" not in line


def test_a_skipped_step_is_not_blamed_on_the_gradient_alone() -> None:
    (line,) = diagnose(HEALTHY | {"actor/skipped_steps": 1.0})
    assert "not finite" in line
    assert "no generated tokens" in line


def test_the_kl_of_the_loss_is_not_called_per_token() -> None:
    (line,) = diagnose(HEALTHY | {"actor/kl_loss": 3.0})
    assert "token" not in line
    assert "loss_agg_mode" in line


def test_health_and_silence_give_no_advice() -> None:
    assert diagnose(HEALTHY) == []
    assert diagnose({}) == []


def test_several_problems_give_several_lines() -> None:
    assert len(diagnose(HEALTHY | {"reward/max": 0.0, "response_length/clip_ratio": 1.0})) == 2


def test_the_same_advice_comes_once_and_then_as_a_reminder() -> None:
    diagnosis = Diagnosis(remind_after=10)
    sick = HEALTHY | {"reward/max": 0.0}
    advised = [step for step in range(1, 25) if diagnosis.advise(sick, step)]
    assert advised == [1, 11, 21]


def test_a_new_problem_is_reported_at_once_even_while_another_lasts() -> None:
    diagnosis = Diagnosis()
    assert len(diagnosis.advise(HEALTHY | {"reward/max": 0.0}, 1)) == 1
    (line,) = diagnosis.advise(HEALTHY | {"reward/max": 0.0, "actor/kl_loss": 9.0}, 2)
    assert "actor/kl_loss" in line


@pytest.mark.parametrize("change", [change for change, _, _ in PROBLEMS])
def test_every_override_that_is_advised_is_a_setting_that_works(change: dict[str, float]) -> None:
    (line,) = diagnose(HEALTHY | change)
    keys = re.findall(
        r"(?<!\w)\+?(?:actor_rollout_ref|data|algorithm|trainer|reward)\.[\w.]+(?:=(?:\w[\w.]*|\[.*\]))?", line
    )
    overrides = [key.rstrip(".") for key in keys if "=" in key]
    assert keys
    load(overrides, complete=False)
    load([f"{key}=1" for key in keys if "=" not in key], complete=False)


def test_equal_rewards_are_shown_with_a_response() -> None:
    same = HEALTHY | {"reward/min": 0.0, "reward/max": 0.0}
    preview = "verl.rewards.scorers.gsm8k gave 0 to the answer '42'; the ground truth is '42'"
    [line] = Diagnosis().advise(same, 1, preview)
    assert line.endswith(preview)
    [line] = Diagnosis().advise(HEALTHY | {"reward/groups_without_signal": 0.95}, 1, preview)
    assert preview not in line


def test_a_rare_correct_response_is_not_an_outlier() -> None:
    rare = {"reward/mean": 0.001, "reward/std": 0.03, "reward/min": 0.0, "reward/max": 1.0}
    assert diagnose(HEALTHY | rare) == []


def run_of(*numbers: tuple[float, float]) -> list[str]:
    """The advice of a run that validates at every step: (mean reward of the step, mean of the validation)."""
    diagnosis, lines = Diagnosis(), list[str]()
    for step, (reward, validation) in enumerate(numbers, 1):
        diagnosis.advise(HEALTHY | {"reward/mean": reward}, step)
        lines += diagnosis.advise_validation({"val/gsm8k/mean@1": validation, "timing_s/validation": step}, step)
    return lines


def test_reward_hacking_is_reported_once_with_a_fix() -> None:
    [line] = run_of((0.2, 0.3), (0.4, 0.5), *[(0.9, 0.2)] * 9)
    assert "val/gsm8k/mean@1 fell from 0.5 to 0.2" in line
    assert "actor_rollout_ref.actor.use_kl_loss=True" in line
    assert "reward.functions" in line


@pytest.mark.parametrize(
    "numbers",
    [
        [(0.2, 0.2), (0.4, 0.4), (0.6, 0.6)],
        [(0.2, 0.2), (0.6, 0.6), (0.1, 0.1), (0.1, 0.1)],
        [(0.5, 0.50), (0.9, 0.48), (0.9, 0.47)],
        [(0.0, 0.0), (0.0, 0.0)],
    ],
)
def test_rewards_and_validations_that_agree_give_no_advice(numbers: list[tuple[float, float]]) -> None:
    assert run_of(*numbers) == []
