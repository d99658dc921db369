"""Which settings of an algorithm do something with which estimator and loss; those that do not are named at start.

The table below says it for every setting of these sections. A new setting has to be put there, or a test fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest

from verl.config.checks.algorithm import find_conflicts
from verl.config.checks.ignored import find_unmet_condition
from verl.config.features import uses_critic, uses_preferences, uses_reference
from verl.config.load import load
from verl.config.paths import set_path
from verl.config.schema import Config, collect_settings

pytestmark = pytest.mark.unit

A, LOSS, REF = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss", "actor_rollout_ref.ref"
SECTIONS = ("algorithm", LOSS, "critic", "reward.prime", "reward.overlong_buffer")
ESTIMATORS = collect_settings(Config)["algorithm.adv_estimator"].choices
LOSSES = collect_settings(Config)[f"{LOSS}.loss_mode"].choices
OWN = "my_package.module:function"


@dataclass(frozen=True)
class Effect:
    """A setting is in effect with these estimators and these losses, and only while all of `switches` are set."""

    estimators: Iterable[str] = ESTIMATORS
    losses: Iterable[str] = LOSSES
    switches: tuple[tuple[str, Any], ...] = ()


ADVANTAGES = [name for name in LOSSES if name not in ("dpo", "sppo")]
CLIPPED = ("vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl", "geo_mean", "clip_cov")
PER_TOKEN = [name for name in LOSSES if name not in ("gspo", "sapo", "geo_mean", "dpo", "sppo")]
ALWAYS = Effect()
CRITIC = Effect(estimators=["gae"], losses=ADVANTAGES)


def when(*switches: tuple[str, Any]) -> Effect:
    return Effect(switches=switches)


def critic_when(key: str, value: Any) -> Effect:
    return Effect(["gae"], ADVANTAGES, ((key, value),))


def only(*losses: str) -> Effect:
    return Effect(losses=losses)


KL_REWARD = ("algorithm.use_kl_in_reward", True)
ADAPTIVE = ("algorithm.kl_ctrl.type", "adaptive")
FILTERED = ("algorithm.filter_groups.enable", True)
CORRECTED = ("algorithm.rollout_correction.rollout_is", "token")
REJECTED = ("algorithm.rollout_correction.rollout_rs", "geometric")
BYPASSED = ("algorithm.rollout_correction.bypass_mode", True)
OVERLONG = ("reward.overlong_buffer.enable", True)
PRIME = ("reward.prime.enable", True)
MEGATRON = critic_when("critic.strategy", "megatron")

EFFECTS: dict[str, Effect] = {
    "algorithm.adv_estimator": Effect(losses=ADVANTAGES),
    "algorithm.gamma": Effect(("gae", "reinforce_plus_plus", "gigpo"), ADVANTAGES),
    "algorithm.lam": Effect(("gae",), ADVANTAGES),
    "algorithm.norm_adv_by_std_in_grpo": Effect(("grpo", "grpo_vectorized", "grpo_passk", "gigpo"), ADVANTAGES),
    "algorithm.gigpo.step_advantage_w": Effect(("gigpo",), ADVANTAGES),
    "algorithm.reward_components": Effect(("gdpo",), ADVANTAGES),
    "algorithm.component_weights": Effect(("gdpo",), ADVANTAGES),
    "algorithm.use_kl_in_reward": ALWAYS,
    "algorithm.kl_penalty": when(KL_REWARD),
    "algorithm.kl_ctrl.type": when(KL_REWARD),
    "algorithm.kl_ctrl.kl_coef": when(KL_REWARD),
    "algorithm.kl_ctrl.horizon": when(KL_REWARD, ADAPTIVE),
    "algorithm.kl_ctrl.target_kl": when(KL_REWARD, ADAPTIVE),
    "algorithm.filter_groups.enable": ALWAYS,
    "algorithm.filter_groups.metric": when(FILTERED),
    "algorithm.filter_groups.max_num_gen_batches": when(FILTERED),
    "algorithm.mask_truncated": ALWAYS,
    "algorithm.rollout_correction.preset": ALWAYS,
    "algorithm.rollout_correction.bypass_mode": ALWAYS,
    "algorithm.rollout_correction.rollout_is": ALWAYS,
    "algorithm.rollout_correction.rollout_is_threshold_lower": when((CORRECTED[0], "icepop")),
    "algorithm.rollout_correction.rollout_is_threshold": when(CORRECTED),
    "algorithm.rollout_correction.rollout_is_batch_normalize": when(CORRECTED),
    "algorithm.rollout_correction.rollout_rs": ALWAYS,
    "algorithm.rollout_correction.rollout_rs_threshold": when(REJECTED),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": when(REJECTED),
    "algorithm.rollout_correction.loss_type": when(BYPASSED),
    f"{LOSS}.loss_mode": ALWAYS,
    f"{LOSS}.tau_pos": only("sapo"),
    f"{LOSS}.tau_neg": only("sapo"),
    f"{LOSS}.clip_cov_ratio": only("clip_cov"),
    f"{LOSS}.clip_cov_lb": only("clip_cov"),
    f"{LOSS}.clip_cov_ub": only("clip_cov"),
    f"{LOSS}.kl_cov_ratio": only("kl_cov"),
    f"{LOSS}.ppo_kl_coef": only("kl_cov"),
    f"{LOSS}.dpo_beta": only("dpo"),
    f"{LOSS}.sppo_eta": only("sppo"),
    f"{LOSS}.off_policy_mask_threshold": Effect(losses=ADVANTAGES),
    "critic.enable": Effect(losses=ADVANTAGES),
    "critic.strategy": CRITIC,
    "critic.model.path": CRITIC,
    "critic.model.enable_gradient_checkpointing": CRITIC,
    "critic.optim.name": CRITIC,
    "critic.optim.muon_momentum": critic_when("critic.optim.name", "muon"),
    "critic.optim.muon_adjust_lr": critic_when("critic.optim.name", "muon"),
    "critic.optim.lr": CRITIC,
    "critic.optim.weight_decay": CRITIC,
    "critic.optim.betas": CRITIC,
    "critic.optim.eps": CRITIC,
    "critic.optim.lr_warmup_steps": CRITIC,
    "critic.optim.lr_warmup_steps_ratio": CRITIC,
    "critic.optim.init_lr_ratio": critic_when("critic.optim.lr_warmup_steps_ratio", 0.1),
    "critic.optim.lr_scheduler_type": CRITIC,
    "critic.optim.min_lr_ratio": critic_when("critic.optim.lr_scheduler_type", "cosine"),
    "critic.ppo_mini_batch_size": CRITIC,
    "critic.ppo_micro_batch_size_per_gpu": CRITIC,
    "critic.use_dynamic_bsz": CRITIC,
    "critic.ppo_max_token_len_per_gpu": CRITIC,  # on accelerators
    "critic.ppo_epochs": CRITIC,
    "critic.loss_agg_mode": CRITIC,
    "critic.cliprange_value": CRITIC,
    "critic.grad_clip": CRITIC,
    "critic.fsdp_config.stochastic_rounding": critic_when("critic.fsdp_config.model_dtype", "bfloat16"),
    "critic.checkpoint.load_contents": CRITIC,
    "critic.checkpoint.save_contents": CRITIC,
    "critic.fsdp_config.model_dtype": CRITIC,
    "critic.fsdp_config.dtype": CRITIC,
    "critic.fsdp_config.expert_parallel_size": CRITIC,
    "critic.fsdp_config.fsdp_size": CRITIC,
    "critic.fsdp_config.reshard_after_forward": CRITIC,
    "critic.fsdp_config.param_offload": CRITIC,
    "critic.fsdp_config.optimizer_offload": CRITIC,
    "critic.fsdp_config.offload_policy": CRITIC,
    "critic.fsdp_config.use_torch_compile": CRITIC,
    "critic.megatron.dtype": MEGATRON,
    "critic.megatron.tensor_model_parallel_size": MEGATRON,
    "critic.megatron.pipeline_model_parallel_size": MEGATRON,
    "critic.megatron.expert_model_parallel_size": MEGATRON,
    "critic.megatron.context_parallel_size": MEGATRON,
    "critic.megatron.param_offload": MEGATRON,
    "critic.megatron.grad_offload": MEGATRON,
    "critic.megatron.optimizer_offload": MEGATRON,
    "critic.megatron.override_transformer_config.num_layers_in_first_pipeline_stage": MEGATRON,
    "critic.megatron.override_transformer_config.num_layers_in_last_pipeline_stage": MEGATRON,
    "critic.peft.peft_type": CRITIC,
    "critic.peft.lora_rank": CRITIC,
    "critic.peft.lora_alpha": critic_when("critic.peft.lora_rank", 8),
    "critic.peft.target_modules": critic_when("critic.peft.lora_rank", 8),
    "reward.prime.enable": ALWAYS,
    "reward.prime.model_path": when(PRIME),
    "reward.prime.lr": when(PRIME),
    "reward.prime.beta": when(PRIME),
    "reward.prime.coef": when(PRIME),
    "reward.prime.outcome_coef": when(PRIME),
    "reward.prime.grad_clip": when(PRIME),
    "reward.overlong_buffer.enable": ALWAYS,
    "reward.overlong_buffer.len": when(OVERLONG),
    "reward.overlong_buffer.penalty_factor": when(OVERLONG),
    # settings of other sections that depend on the algorithm
    "trainer.critic_warmup": CRITIC,
    f"{A}.clip_ratio": only(*CLIPPED),
    f"{A}.clip_ratio_low": only(*CLIPPED),
    f"{A}.clip_ratio_high": only(*CLIPPED),
    f"{A}.clip_ratio_c": only("vanilla", "dppo_tv", "dppo_kl"),
    f"{A}.loss_agg_mode": only(*PER_TOKEN),
    f"{A}.loss_scale_factor": Effect(losses=PER_TOKEN, switches=((f"{A}.loss_agg_mode", "seq-mean-token-sum-norm"),)),
    f"{A}.kl_loss_coef": when((f"{A}.use_kl_loss", True)),
    f"{A}.kl_loss_type": when((f"{A}.use_kl_loss", True)),
}


def config(*values: tuple[str, Any]) -> Config:
    tree: dict[str, Any] = {}
    for key, value in values:
        set_path(tree, tuple(key.split(".")), value)
    return Config.model_validate(tree)


@cache
def algorithm(estimator: str, loss: str, *more: tuple[str, Any]) -> Config:
    return config(("algorithm.adv_estimator", estimator), (f"{LOSS}.loss_mode", loss), *more)


def test_every_setting_of_an_algorithm_is_in_the_table_and_the_table_has_no_other() -> None:
    known = {key for key, found in collect_settings(Config).items() if found.section is None}
    of_algorithms = {key for key in known if key.startswith(tuple(f"{section}." for section in SECTIONS))}
    assert of_algorithms - set(EFFECTS) == set(), "say in EFFECTS when it has an effect, and in only_if of the setting"
    assert set(EFFECTS) - known == set()


@pytest.mark.parametrize("key", EFFECTS)
def test_a_setting_has_an_effect_with_each_algorithm_as_the_table_says(key: str) -> None:
    effect = EFFECTS[key]
    for estimator, loss in product(ESTIMATORS, LOSSES):
        ignored = find_unmet_condition(algorithm(estimator, loss, *effect.switches), key)
        used = estimator in effect.estimators and loss in effect.losses
        assert (ignored is None) == used, (estimator, loss, ignored)


@pytest.mark.parametrize("key", [key for key, effect in EFFECTS.items() if effect.switches])
def test_a_setting_is_ignored_while_one_of_its_switches_is_off(key: str) -> None:
    effect = EFFECTS[key]
    estimator, loss = next(iter(effect.estimators)), next(iter(effect.losses))
    assert find_unmet_condition(algorithm(estimator, loss, *effect.switches), key) is None
    for off in effect.switches:
        switches = [switch for switch in effect.switches if switch != off]
        assert find_unmet_condition(algorithm(estimator, loss, *switches), key) is not None, off


@pytest.mark.parametrize("key", EFFECTS)
def test_a_custom_function_may_use_every_setting_except_those_of_absent_models(key: str) -> None:
    of_own_estimator = find_unmet_condition(algorithm(OWN, "vanilla", *EFFECTS[key].switches), key)
    of_own_loss = find_unmet_condition(algorithm("gae", OWN, *EFFECTS[key].switches), key)
    critics = EFFECTS[key].estimators == ["gae"]  # a critic is trained only where critic.enable says so
    assert (of_own_estimator is None) == ("vanilla" in EFFECTS[key].losses and not critics)
    assert (of_own_loss is None) == ("gae" in EFFECTS[key].estimators)


@pytest.mark.parametrize("term", [(f"{A}.use_kl_loss", True), (f"{A}.entropy_coeff", 0.01)])
def test_a_loss_over_sequences_leaves_the_aggregation_to_the_other_terms(term: tuple[str, Any]) -> None:
    assert find_unmet_condition(algorithm("grpo", "gspo"), f"{A}.loss_agg_mode") is not None
    assert find_unmet_condition(algorithm("grpo", "gspo", term), f"{A}.loss_agg_mode") is None


@pytest.mark.parametrize(
    "need",
    [(f"{A}.use_kl_loss", True), KL_REWARD, (f"{LOSS}.loss_mode", "dpo"), PRIME],
)
def test_the_reference_is_used_only_if_a_loss_or_a_reward_needs_it(need: tuple[str, Any]) -> None:
    keys = ("trainer.ref_update_freq", f"{REF}.fsdp_config.param_offload")
    assert not uses_reference(config())
    assert all(find_unmet_condition(config(), key) for key in keys)
    assert uses_reference(config(need))
    assert not any(find_unmet_condition(config(need), key) for key in keys)


def test_a_critic_is_trained_with_gae_alone_and_preferences_need_none() -> None:
    for estimator, loss in product((*ESTIMATORS, OWN), (*LOSSES, OWN)):
        assert uses_preferences(algorithm(estimator, loss)) == (loss in ("dpo", "sppo"))
        assert uses_critic(algorithm(estimator, loss)) == (estimator == "gae" and loss not in ("dpo", "sppo"))
    for wanted in (True, False):
        own = algorithm(OWN, "vanilla", ("critic.enable", wanted))
        assert uses_critic(own) == wanted
        assert not [*find_conflicts(own)]
        assert (find_unmet_condition(own, "critic.optim.lr") is None) == wanted


@pytest.mark.parametrize(("estimator", "wanted"), [("grpo", True), ("rloo", True), ("gae", False)])
def test_a_critic_that_the_estimator_cannot_use_or_do_without_is_refused(estimator: str, wanted: bool) -> None:
    (conflict,) = find_conflicts(algorithm(estimator, "vanilla", ("critic.enable", wanted)))
    assert conflict.key == "critic.enable"
    assert f"algorithm.adv_estimator={estimator}" in conflict.reason
    assert not [*find_conflicts(algorithm(estimator, "vanilla", ("critic.enable", not wanted)))]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["algorithm.gamma=0.9"],
            "algorithm.gamma=0.9 has no effect: only algorithm.adv_estimator=gae, reinforce_plus_plus or gigpo, and "
            "PRIME, use it",
        ),
        (
            ["algorithm.kl_ctrl.kl_coef=0.01"],
            "algorithm.kl_ctrl.kl_coef=0.01 has no effect: algorithm.use_kl_in_reward=false; set it to "
            f"true, or set {A}.use_kl_loss=true and {A}.kl_loss_coef",
        ),
        (
            ["critic.optim.lr=1e-4"],
            "critic.optim.lr=0.0001 has no effect: only algorithm.adv_estimator=gae trains a critic, or your "
            "own estimator with critic.enable=true",
        ),
        (
            ["algorithm.adv_estimator=rloo", f"{LOSS}.loss_mode=dpo"],
            f"algorithm.adv_estimator=rloo has no effect: {LOSS}.loss_mode=dpo and sppo compare scores, "
            "without advantages",
        ),
        (
            [f"{LOSS}.tau_pos=2", f"{LOSS}.loss_mode=gpg"],
            f"{LOSS}.tau_pos=2.0 has no effect: only {LOSS}.loss_mode=sapo uses it",
        ),
        (
            ["reward.prime.coef=1"],
            "reward.prime.coef=1.0 has no effect: reward.prime.enable=false",
        ),
    ],
)
def test_an_ignored_setting_is_named_once_with_its_value_and_the_reason(overrides: list[str], says: str) -> None:
    [loaded] = load(["actor_rollout_ref.rollout.n=8", *overrides], complete=False)
    assert list(loaded.hints) == [says]


def test_a_setting_that_is_ignored_for_two_reasons_is_named_once() -> None:
    overrides = [f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_low=0.1", f"{A}.clip_ratio_high=0.2", f"{LOSS}.loss_mode=gpg"]
    [loaded] = load(["actor_rollout_ref.rollout.n=8", *overrides], complete=False)
    assert [hint.partition("=")[0] for hint in loaded.hints] == [
        f"{A}.clip_ratio",
        f"{A}.clip_ratio_low",
        f"{A}.clip_ratio_high",
    ]
