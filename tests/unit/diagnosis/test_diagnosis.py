"""Each problem is detected when it exists, not when it does not, and is not repeated at every step."""

from __future__ import annotations

import math
import re

import pytest

from verl.config.load import load
from verl.diagnosis.diagnosis import Diagnosis
from verl.diagnosis.diagnosis import diagnose as diagnose_run
from verl.diagnosis.rule import Rule
from verl.diagnosis.rules import RULES, find_rule

pytestmark = pytest.mark.unit


def diagnose(metrics: dict[str, float]) -> list[str]:
    return [advice.text for advice in Diagnosis().advise(metrics, 1)]


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

NOT_NUMBERS = {"reward.functions"}
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
    (advice,) = diagnosis.advise(HEALTHY | {"reward/max": 0.0, "actor/kl_loss": 9.0}, 2)
    assert advice.rule == "kl-explosion"
    assert "actor/kl_loss" in advice.text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_override_that_is_advised_is_a_setting_that_works(rule: Rule) -> None:
    pattern = r"`(\+?(?:actor_rollout_ref|data|algorithm|async_training|trainer|reward)\.[\w.]+(?:=[^`]+)?)`"
    keys = re.findall(pattern, rule.remedy)
    assert keys or rule.name == "slow-rank"
    load([key for key in keys if "=" in key], complete=False)
    load([f"{key}=1" for key in keys if "=" not in key and key not in NOT_NUMBERS], complete=False)


def test_equal_rewards_are_shown_with_a_response() -> None:
    same = HEALTHY | {"reward/min": 0.0, "reward/max": 0.0}
    preview = "verl.rewards.scorers.gsm8k gave 0 to the answer '42'; the ground truth is '42'"
    [advice] = Diagnosis().advise(same, 1, preview)
    assert advice.text.endswith(preview)
    [advice] = Diagnosis().advise(HEALTHY | {"reward/groups_without_signal": 0.95}, 1, preview)
    assert preview not in advice.text


def test_a_rare_correct_response_is_not_an_outlier() -> None:
    rare = {"reward/mean": 0.001, "reward/std": 0.03, "reward/min": 0.0, "reward/max": 1.0}
    assert diagnose(HEALTHY | rare) == []


def run_of(*numbers: tuple[float, float]) -> list[str]:
    """The advice of a run that validates at every step: (mean reward of the step, mean of the validation)."""
    diagnosis, lines = Diagnosis(), list[str]()
    for step, (reward, validation) in enumerate(numbers, 1):
        diagnosis.advise(HEALTHY | {"reward/mean": reward}, step)
        means = {"val/gsm8k/mean@1": validation, "timing_s/validation": float(step)}
        lines += [advice.text for advice in diagnosis.advise(means, step)]
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


def test_rules_have_names_of_their_own_and_say_everything() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)
        assert find_rule(rule.name) is find_rule(rule.name.replace("-", " ").upper()) is rule
        assert rule.metrics
        assert all(text.endswith(".") for text in (rule.meaning, rule.limits)), rule.name
        assert not rule.remedy.endswith("."), "the name of the rule, or a response, follows"
        assert "\n" not in rule.meaning + rule.limits + rule.remedy


def test_fine_tuning_gets_the_rules_that_make_sense_for_it_with_its_own_settings() -> None:
    healthy = {"train/loss": 1.0, "train/grad_norm": 0.5, "train/skipped_steps": 0.0, "reward/min": 0.0}
    growing = [0.5] * 5 + [norm for norm in (1.0, 2.0, 4.0, 9.0) for _ in range(10)]
    assert diagnose_run([(1, healthy | {"reward/max": 0.0, "actor/kl_loss": 9.0})]) == []
    [(_, skipped)] = diagnose_run([(1, healthy | {"train/skipped_steps": 1.0, "train/grad_norm": 0.0})])
    assert skipped.text.startswith("step 1 did not change the weights: no token of it is trained; ")
    [(_, drift)] = diagnose_run((k, healthy | {"train/grad_norm": norm}) for k, norm in enumerate(growing, 1))
    assert (drift.rule, "optim.lr" in drift.text, "actor_rollout_ref" in drift.text) == ("gradient-drift", True, False)


def test_a_run_that_has_ended_gets_the_same_advice() -> None:
    steps = [(step, HEALTHY | {"reward/mean": 0.9}) for step in range(1, 5)]
    assert diagnose_run(steps) == []
    steps[2][1]["actor/kl_loss"] = 3.0
    steps[2][1]["val/gsm8k/mean@1"] = 0.5
    [(step, advice)] = diagnose_run(steps)
    assert (step, advice.rule) == (3, "kl-explosion")
