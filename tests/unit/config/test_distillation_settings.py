"""Settings of distillation: conflicts, hints, and what follows for other models and scores."""

from __future__ import annotations

import pytest

from verl.config.features import scores_responses, uses_critic, uses_task_rewards
from verl.config.load import load
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.rollout.engine import EngineView
from verl.trainer.build.algorithm_settings import algorithm_settings
from verl.trainer.build.worker_settings import episode_settings, train_settings
from verl.workers.episodes import EpisodeWorker

pytestmark = pytest.mark.unit

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
TEACHER = ["actor_rollout_ref.rollout.n=8", "distillation.enable=true", "distillation.teacher.path=teacher"]
OWN_TEMPLATE = [*TEACHER, "distillation.teacher.use_own_chat_template=true"]
ALONE = [*TEACHER, "distillation.use_task_rewards=false"]


def config_of(*overrides: str) -> Config:
    [loaded] = load(["actor_rollout_ref.model.path=student", *overrides], complete=False)
    return loaded.config


def hints(*overrides: str) -> str:
    [loaded] = load(list(overrides), complete=False)
    return "\n".join(loaded.hints)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["distillation.enable=true"], "set distillation.teacher.path="),
        ([*TEACHER, f"{LOSS}=dpo"], f"set {LOSS}=vanilla, or distillation.mode=loss"),
        ([*ALONE, "distillation.mode=loss", f"{LOSS}=sppo"], f"set {LOSS}=vanilla"),
        ([*ALONE, "algorithm.filter_groups.enable=true"], "set algorithm.filter_groups.enable=false"),
        ([*ALONE, "algorithm.use_kl_in_reward=true"], "set actor_rollout_ref.actor.use_kl_loss=true instead"),
        ([*TEACHER, "distillation.coef=0"], "must be above 0"),
        ([*TEACHER, "distillation.log_prob_min_clamp=10"], "must be below 0"),
        ([*TEACHER, "distillation.loss_max_clamp=-10"], "must be above 0"),
        (
            [*OWN_TEMPLATE, "data.truncation=left", "data.filter_overlong_prompts=false"],
            "set data.filter_overlong_prompts=true to drop long prompts, or data.truncation=error",
        ),
    ],
)
def test_conflicts_name_a_fix(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(overrides, complete=False)
    [text] = raised.value.problems
    assert says in text


@pytest.mark.parametrize(
    "overrides",
    [
        [*TEACHER, "algorithm.adv_estimator=gae"],
        [*OWN_TEMPLATE, "data.filter_overlong_prompts=true"],
        [*TEACHER, f"{LOSS}=dpo", "distillation.mode=loss"],
        [*TEACHER, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full"],
        [*ALONE, "actor_rollout_ref.rollout.n=1"],
        [*ALONE, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"],
    ],
)
def test_combinations_that_work_have_no_hint(overrides: list[str]) -> None:
    assert hints(*overrides) == ""


def test_settings_without_effect_are_reported() -> None:
    assert "distillation.coef=2.0 has no effect: distillation.enable=false" in hints("distillation.coef=2")
    template = "distillation.teacher.use_own_chat_template=true"
    assert f"{template} has no effect: distillation.enable=false" in hints(template)
    alone = hints(*ALONE, "algorithm.adv_estimator=gae", "reward.custom_reward_function.path=score.py")
    assert "algorithm.adv_estimator=gae has no effect: distillation.use_task_rewards=false" in alone
    assert "reward.custom_reward_function.path=score.py has no effect: nothing is scored" in alone
    assert "is only regularized toward its initial weights" in hints(*TEACHER, "actor_rollout_ref.model.path=teacher")


def test_clamps_are_those_of_the_algorithm_by_either_name() -> None:
    prefix = "distillation.distillation_loss"
    for keys in (
        ("distillation.log_prob_min_clamp", "distillation.loss_max_clamp"),
        (f"{prefix}.log_prob_min_clamp", f"{prefix}.loss_max_clamp"),
    ):
        distillation = algorithm_settings(config_of(*TEACHER, f"{keys[0]}=-10.0", f"{keys[1]}=8.0")).distillation
        assert distillation is not None
        assert (distillation.log_prob_min_clamp, distillation.loss_max_clamp) == (-10.0, 8.0)


def test_public_names_of_the_loss_are_accepted() -> None:
    prefix = "distillation.distillation_loss"
    public = [f"{prefix}.loss_mode=forward_kl_topk", f"{prefix}.topk=64", f"{prefix}.use_policy_gradient=False"]
    distillation = algorithm_settings(config_of(*TEACHER, *public)).distillation
    assert distillation is not None
    assert (distillation.mode, distillation.loss_mode, distillation.topk) == ("loss", "forward_kl_topk", 64)
    distillation = algorithm_settings(config_of(*TEACHER, f"{prefix}.loss_mode=k1")).distillation
    assert distillation is not None
    assert (distillation.mode, distillation.loss_mode) == ("reward", "full")


def test_distillation_alone_trains_no_critic_and_scores_only_validation() -> None:
    alone = config_of(*ALONE, "algorithm.adv_estimator=gae")
    assert not uses_critic(alone)
    assert not uses_task_rewards(alone)
    assert not scores_responses(alone)
    assert algorithm_settings(alone).estimator == "no_rewards"
    assert episode_settings(alone, {}, 1).reward is None
    validated = episode_settings(config_of(*ALONE, "data.val_files=test.parquet"), {}, 1)
    assert validated.reward is not None
    assert not EpisodeWorker(validated, EngineView.of([]))._scores_training


def test_the_teacher_is_a_frozen_model_in_the_type_that_it_computes_in() -> None:
    settings = train_settings(config_of(*TEACHER, "distillation.mode=loss", "distillation.coef=0.5"), 10, "cuda")
    teacher = settings.teacher
    assert teacher is not None
    assert (teacher.model_path, teacher.trainable, teacher.lora) == ("teacher", False, None)
    assert teacher.param_dtype == teacher.compute_dtype == "bfloat16"
    assert settings.actor.param_dtype == "float32"
    assert settings.algorithm.distillation is not None
    assert (settings.algorithm.distillation.mode, settings.algorithm.distillation.coef) == ("loss", 0.5)
    assert "distillation.teacher.param_offload=True" in settings.memory_advice
    assert train_settings(config_of("actor_rollout_ref.rollout.n=8"), 10, "cuda").teacher is None
