"""Settings become the records of workers and planner: what an algorithm needs is built, and nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from verl.algorithms.settings import AlgorithmSettings, Correction, EstimatorOptions, KlController, Rejection
from verl.config.batch_sizes import BatchSizes
from verl.config.checks import TRAIN_HINTS
from verl.config.load import load, load_dict
from verl.config.schema.root import Config
from verl.data.dataset import DatasetSettings
from verl.errors import ConfigError
from verl.rewards.settings import OverlongPenalty
from verl.rollout.engine import EngineView
from verl.rollout.vllm.settings import AdapterSettings, VllmSettings
from verl.trainer.build.algorithm_settings import algorithm_settings
from verl.trainer.build.rl_builder import RLBuilder
from verl.trainer.build.runtime import device_hints, with_absolute_paths
from verl.trainer.build.worker_settings import (
    build_planner,
    coarsest_dtype,
    episode_settings,
    reward_model_settings,
    timeouts,
    train_settings,
)
from verl.training.settings import LoraSettings
from verl.types import SampleHandle
from verl.weights.probe import TOLERANCES
from verl.workers.episodes import EpisodeWorker

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[3] / "examples"
REQUIRED = ("actor_rollout_ref.model.path=policy", "data.train_files=prompts.parquet")
PPO, GRPO = ("algorithm.adv_estimator=gae",), ("algorithm.adv_estimator=grpo",)


def config_of(*overrides: str) -> Config:
    return load_dict({}, [*REQUIRED, *overrides]).config


def example(name: str, *overrides: str) -> Config:
    return load(["--config-name", str(EXAMPLES / name), *REQUIRED, *overrides])[0].config


EXPECTED: dict[str, dict[str, Any]] = {
    "ppo": {"estimator": "gae", "loss_options.clip_low": 0.2, "value_clip": 0.5},
    "grpo": {"estimator": "grpo", "loss_kl_coef": 0.001},
    "dr_grpo": {"estimator": "grpo", "estimator_options.by_std": False, "agg_mode": "seq-mean-token-sum-norm"},
    "dapo": {
        "estimator": "grpo",
        "loss_options.clip_low": 0.2,
        "loss_options.clip_high": 0.28,
        "agg_mode": "token-mean",
    },
    "rloo": {"estimator": "rloo"},
    "reinforce_plus_plus": {"estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"estimator": "reinforce_plus_plus_baseline"},
    "remax": {"estimator": "remax"},
    "opo": {"estimator": "opo"},
    "optimal_token_baseline": {"estimator": "optimal_token_baseline"},
    "gpg": {"estimator": "gpg", "loss_mode": "gpg"},
    "gdpo": {"estimator": "gdpo", "estimator_options.component_weights": {"correct": 1.0, "format": 0.5}},
    "grpo_passk": {"estimator": "grpo_passk"},
    "gigpo": {"estimator": "gigpo", "estimator_options.gamma": 0.95, "estimator_options.step_weight": 1.0},
    "gspo": {"loss_mode": "gspo"},
    "cispo": {"loss_mode": "cispo"},
    "dppo": {"loss_mode": "dppo_tv", "loss_options.clip_c": 20.0},
    "off_policy_mask": {"loss_options.off_policy_mask_threshold": 0.1},
    "sapo": {"loss_mode": "sapo"},
    "gmpo": {"loss_mode": "geo_mean"},
    "clip_cov": {"loss_mode": "clip_cov"},
    "kl_cov": {"loss_mode": "kl_cov"},
    "online_dpo": {"loss_mode": "dpo", "loss_options.dpo_beta": 0.1},
    "spin": {"loss_mode": "dpo", "ref_update_freq": 1},
    "sppo": {"loss_mode": "sppo", "estimator": "win_rate", "loss_options.sppo_eta": 1.0},
    "prime": {"estimator": "prime", "prime_beta": 0.05, "estimator_options.process_coef": 5.0},
    "distillation": {"estimator": "no_rewards", "distillation.mode": "reward", "distillation.coef": 1.0},
}
BESIDE_THE_POLICY = {
    "ppo": {"critic"},
    "grpo": {"reference"},
    "online_dpo": {"reference"},
    "spin": {"reference"},
    "prime": {"reference", "prime"},
    "distillation": {"teacher"},
}


def test_every_example_of_an_algorithm_is_looked_at() -> None:
    assert {path.stem for path in (EXAMPLES / "algorithms").glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_becomes_its_method_and_the_models_that_it_needs(name: str) -> None:
    settings = train_settings(example(f"algorithms/{name}.yaml"), 100, "cpu")
    for path, value in EXPECTED[name].items():
        found: Any = settings.algorithm
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value, path
    models = {"reference", "critic", "prime", "prime_reference", "teacher"}
    built = {model for model in models if getattr(settings, model) is not None}
    assert built == BESIDE_THE_POLICY.get(name, set()), built
    assert pickle.loads(pickle.dumps(settings)) == settings  # it is sent to the workers


def test_the_defaults_are_those_of_the_records() -> None:
    found = algorithm_settings(config_of("data.max_response_length=77"))
    assert found == AlgorithmSettings(scale=77)


def test_the_kl_in_the_reward_has_its_controller_and_a_reference() -> None:
    kl = ("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=mse", "algorithm.kl_ctrl.kl_coef=0.2")
    fixed = algorithm_settings(config_of(*kl))
    assert (fixed.reward_kl, fixed.reward_kl_type) == (KlController(0.2), "mse")
    adaptive = ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.3", "algorithm.kl_ctrl.horizon=5000")
    assert algorithm_settings(config_of(*kl, *adaptive)).reward_kl == KlController(0.2, True, 0.3, 5000)
    assert train_settings(config_of(*kl), 10, "cpu").reference is not None
    assert algorithm_settings(config_of("algorithm.kl_ctrl.kl_coef=0.2")).reward_kl is None


FUNCTIONS = "reward.functions=[{label: correct, weight: 2}, {path: my_format.py, clip: [0, 1]}]"
NAMED = "algorithm.reward_components=[correct, other]"
REWARD_MODEL = ("reward.reward_model.enable=true", "reward.reward_model.model_path=rm", "reward.reward_model.weight=3")
OVERLONG = ("reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=5")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([FUNCTIONS], {"correct": 2.0, "my_format": 1.0}),
        ([FUNCTIONS, *REWARD_MODEL], {"correct": 2.0, "my_format": 1.0, "model_score": 3.0}),
        ([FUNCTIONS, NAMED], {"correct": 2.0, "other": 1.0}),
        ([NAMED], {"correct": 1.0, "other": 1.0}),
        ([NAMED, "algorithm.component_weights=[0.5, 4]"], {"correct": 0.5, "other": 4.0}),
        (OVERLONG, {"raw_score": 1.0, "overlong_penalty": 1.0}),
        (
            ["reward.custom_reward_function.path=r.py", *REWARD_MODEL, *OVERLONG],
            {"function_score": 1.0, "model_score": 3.0, "overlong_penalty": 1.0},
        ),
    ],
)
def test_reward_components_are_those_named_or_the_parts_of_the_score(overrides: list[str], expected: dict) -> None:
    config = config_of("algorithm.adv_estimator=gdpo", *overrides)
    assert algorithm_settings(config).estimator_options.component_weights == expected
    assert episode_settings(config, {}, 1).components == list(expected)
    handle = SampleHandle(0, 0, 4, 2, 1.0, 0, metrics=dict.fromkeys(expected, 0.5))
    assert list(build_planner(config, 1).plan([handle]).ranks[0].components) == list(expected)


def test_estimators_that_do_not_use_components_need_none() -> None:
    assert episode_settings(config_of("algorithm.adv_estimator=grpo", FUNCTIONS), {}, 1).components == []
    custom = config_of("algorithm.adv_estimator=my_module:estimator", FUNCTIONS)
    assert episode_settings(custom, {}, 1).components == ["correct", "my_format"]


def test_rewards_that_an_environment_makes_ineffective_are_not_components() -> None:
    turns = "actor_rollout_ref.rollout.multi_turn"
    environment = (f"{turns}.enable=true", f"{turns}.environment=game.py:Game")
    custom = ("algorithm.adv_estimator=my_module:estimator", *environment, FUNCTIONS, *REWARD_MODEL)
    assert episode_settings(config_of(*custom), {}, 1).components == []
    assert episode_settings(config_of(*custom, NAMED), {}, 1).components == ["correct", "other"]
    assert episode_settings(config_of(*custom, *OVERLONG), {}, 1).components == ["raw_score", "overlong_penalty"]


@pytest.mark.parametrize(
    ("deterministic", "device", "batch"), [("false", "cpu", 16), ("true", "cpu", 1), ("true", "cuda", 16)]
)
def test_deterministic_scores_do_not_depend_on_the_batch(deterministic: str, device: str, batch: int) -> None:
    settings = reward_model_settings(config_of(*REWARD_MODEL, f"trainer.deterministic={deterministic}"), device, 0)
    assert (settings.batch, settings.deterministic) == (batch, deterministic == "true")


LORA = ("actor.lora_rank=12", "actor.lora_alpha=24", "trainer.seed=5")
KL = "actor_rollout_ref.actor.use_kl_loss=true"


def test_the_reference_of_an_adapter_is_the_model_without_it_unless_it_moves() -> None:
    settings = train_settings(config_of(*LORA, KL), 10, "cpu")
    assert settings.actor.lora == LoraSettings(12, 24, "all-linear", 5)
    assert (settings.reference, settings.reference_is_actor) == (None, True)
    moving = train_settings(config_of(*LORA, KL, "trainer.ref_update_freq=2"), 10, "cpu")
    assert moving.reference is not None
    assert moving.reference.lora == moving.actor.lora
    assert not moving.reference_is_actor
    assert not train_settings(config_of(*LORA), 10, "cpu").reference_is_actor


def test_engines_load_the_model_themselves_if_only_the_adapter_is_synced() -> None:
    config = config_of(*LORA)
    engine = VllmSettings.from_config(config, "cpu", 0)
    assert train_settings(config, 10, "cpu").sync_adapter_only
    assert engine.load_format == "auto"
    assert engine.adapter == AdapterSettings(rank=12, alpha=24, targets="all-linear", max_rank=16)
    for other in ("actor_rollout_ref.rollout.lora_transport=merged", "actor_rollout_ref.rollout.weight_transport=ipc"):
        config = config_of(*LORA, other, "trainer.device=cuda")
        assert not train_settings(config, 10, "cuda").sync_adapter_only
        assert VllmSettings.from_config(config, "cuda", 0).load_format == "dummy"
        assert VllmSettings.from_config(config, "cuda", 0).adapter is None
    assert not train_settings(config_of(*LORA, "actor_rollout_ref.rollout.name=hf"), 10, "cpu").sync_adapter_only


def test_engines_on_the_cpu_receive_merged_weights_of_an_moe_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 4}')
    config = config_of(*LORA, f"actor_rollout_ref.model.path={tmp_path}")
    for device, is_adapter in (("cpu", False), ("cuda", True)):
        assert train_settings(config, 10, device).sync_adapter_only == is_adapter
        assert (VllmSettings.from_config(config, device, 0).adapter is not None) == is_adapter
    adapter = "actor_rollout_ref.rollout.lora_transport"
    with pytest.raises(ConfigError, match=rf"{adapter}: adapter needs accelerators.*set {adapter}=merged"):
        config_of(*LORA, f"actor_rollout_ref.model.path={tmp_path}", f"{adapter}=adapter", "trainer.device=cpu")


@pytest.mark.parametrize("quantized", ["dtype=fp8", "quantization=fp8"])
def test_quantized_engines_are_sent_bfloat16_and_have_a_tolerance_of_their_own(quantized: str) -> None:
    config = config_of(f"actor_rollout_ref.rollout.{quantized}", "actor_rollout_ref.actor.fsdp_config.dtype=float32")
    engine = VllmSettings.from_config(config, "cuda", 0)
    assert (engine.dtype, engine.quantization) == ("bfloat16", "fp8_per_block")
    assert train_settings(config, 10, "cuda").sync_dtype == "bfloat16"
    assert coarsest_dtype(config, "cuda") == "fp8"
    assert TOLERANCES["fp8"] > TOLERANCES["bfloat16"]


@pytest.mark.parametrize(
    ("settings", "device", "coarsest"),
    [
        ((), "cpu", "float32"),
        ((), "cuda", "bfloat16"),
        (("actor_rollout_ref.rollout.dtype=float16",), "cpu", "float16"),
    ],
)
def test_the_coarser_type_of_trainer_and_engine_counts(settings: tuple[str, ...], device: str, coarsest: str) -> None:
    assert coarsest_dtype(config_of(*settings), device) == coarsest
    assert VllmSettings.from_config(config_of(*settings), device, 0).quantization is None


def test_the_kl_in_the_loss_has_its_weight_only_where_it_is_used() -> None:
    assert algorithm_settings(config_of("actor_rollout_ref.actor.kl_loss_coef=0.5")).loss_kl_coef is None
    used = config_of("actor_rollout_ref.actor.kl_loss_coef=0.5", "actor_rollout_ref.actor.use_kl_loss=True")
    assert algorithm_settings(used).loss_kl_coef == 0.5


def test_the_lower_bound_of_rejection_is_one_over_the_upper_unless_given() -> None:
    correction = ("algorithm.rollout_correction.rollout_rs=geometric",)
    upper = "algorithm.rollout_correction.rollout_rs_threshold=4"
    assert algorithm_settings(config_of(*correction, upper)).correction == Correction(
        reject=(Rejection("geometric", lower=0.25, upper=4),)
    )
    lower = "algorithm.rollout_correction.rollout_rs_threshold_lower=0.9"
    assert algorithm_settings(config_of(*correction, upper, lower)).correction.reject[0].lower == 0.9
    weigh = config_of(
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_threshold=3",
        "algorithm.rollout_correction.rollout_is_batch_normalize=True",
    )
    assert algorithm_settings(weigh).correction == Correction("sequence", 3.0, normalize=True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["preset=tis"], Correction("token")),
        (["preset=tis", "rollout_is_threshold=4"], Correction("token", 4.0)),
        (["preset=mis_geometric"], Correction(reject=(Rejection("geometric", 1 / 1.001, 1.001),))),
        (["preset=icepop"], Correction("token", 5.0, 0.5)),
        (["preset=icepop", "rollout_is=null"], Correction()),
        (["preset=bypass"], Correction(bypass=True)),
        (["rollout_is=token", "rollout_is_threshold=0.5_4.0"], Correction("token", 4.0, 0.5)),
        (
            ["rollout_rs='token_k1,seq_max_k2'", "rollout_rs_threshold='0.6_1.6,2.5'"],
            Correction(reject=(Rejection("token", 0.6, 1.6), Rejection("seq_max_k2", 0.0, 2.5))),
        ),
        (
            ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.999_1.001", "bypass_mode=true", "rollout_is=token"],
            Correction(reject=(Rejection("geometric", 0.999, 1.001),), bypass=True),  # the ratio is the weight
        ),
        (
            ["bypass_mode=true", "loss_type=reinforce", "rollout_is=sequence", "rollout_is_batch_normalize=true"],
            Correction("sequence", 2.0, normalize=True, bypass=True),
        ),
    ],
)
def test_a_preset_of_the_correction_stands_for_settings_that_others_override(
    overrides: list[str], expected: Correction
) -> None:
    config = config_of(*(f"algorithm.rollout_correction.{override}" for override in overrides))
    assert algorithm_settings(config).correction == expected


def test_custom_estimators_and_losses_are_passed_on_unchanged() -> None:
    own = ("algorithm.adv_estimator=my.module:best", "actor_rollout_ref.actor.policy_loss.loss_mode=my.module:loss")
    found = algorithm_settings(config_of(*own))
    assert (found.estimator, found.loss_mode) == ("my.module:best", "my.module:loss")


def test_process_rewards_take_the_place_of_rloo_but_not_of_the_users_own_estimator() -> None:
    prime = ("reward.prime.enable=True", "actor_rollout_ref.rollout.n=4")
    assert algorithm_settings(config_of(*prime, "algorithm.adv_estimator=rloo")).estimator == "prime"
    assert algorithm_settings(config_of(*prime, "algorithm.adv_estimator=my.module:best")).estimator == "my.module:best"


def test_gamma_lambda_and_the_division_by_std_reach_the_estimator() -> None:
    settings = ("algorithm.gamma=0.9", "algorithm.lam=0.8", "algorithm.norm_adv_by_std_in_grpo=False")
    assert algorithm_settings(config_of(*PPO, *settings)).estimator_options == EstimatorOptions(0.9, 0.8, False)


def test_a_critic_starts_from_the_policys_model_unless_it_has_its_own() -> None:
    critic = train_settings(config_of(*PPO, "critic.optim.lr=3e-5", "critic.grad_clip=0.3"), 10, "cpu").critic
    assert critic is not None
    assert (critic.model_path, critic.head, critic.role) == ("policy", "value", "critic")
    assert (critic.schedule.lr, critic.grad_clip, critic.compute_dtype) == (3e-5, 0.3, "float32")
    own = train_settings(config_of(*PPO, "critic.model.path=judge"), 10, "cuda").critic
    assert own is not None
    assert (own.model_path, own.compute_dtype) == ("judge", "bfloat16")


def test_a_process_model_is_compared_with_the_reference_or_with_its_own_start() -> None:
    prime = ("reward.prime.enable=True", "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=4")
    same = train_settings(config_of(*prime, "reward.prime.lr=1e-5"), 10, "cpu")
    assert same.prime is not None
    assert (same.prime.model_path, same.prime.role, same.prime.schedule.lr) == ("policy", "process", 1e-5)
    assert same.prime_reference is None
    other = train_settings(config_of(*prime, "reward.prime.model_path=judge"), 10, "cpu")
    assert other.prime is not None
    assert other.prime_reference is not None
    assert other.prime.model_path == other.prime_reference.model_path == "judge"
    assert not other.prime_reference.trainable
    moving = train_settings(config_of(*prime, "trainer.ref_update_freq=5"), 10, "cpu")
    assert moving.prime_reference is not None  # the reference leaves the model that the process model started from


def test_the_steps_of_the_critics_warm_up_are_not_steps_of_the_policys_schedule() -> None:
    sizes = (
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "critic.ppo_mini_batch_size=16",
        "critic.ppo_epochs=3",
        "trainer.critic_warmup=4",
    )
    settings = train_settings(config_of(*PPO, *sizes), 10, "cpu")
    assert settings.critic is not None
    assert settings.actor.schedule.total_steps == 10 - 4
    assert settings.critic.schedule.total_steps == 10
    assert settings.algorithm.critic_warmup == 4
    without = train_settings(config_of(*GRPO, *sizes), 10, "cpu")
    assert (without.actor.schedule.total_steps, without.algorithm.critic_warmup) == (10, 0)


@pytest.mark.parametrize("section", ["critic", "actor_rollout_ref.actor"])
def test_a_warm_up_longer_than_the_run_is_refused_under_the_name_of_its_model(section: str) -> None:
    config = config_of(*PPO, f"{section}.optim.lr_warmup_steps=5000", f"{section}.optim.lr_scheduler_type=cosine")
    with pytest.raises(ConfigError, match=rf"{section}\.optim: "):
        train_settings(config, 10, "cpu")


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ((), BatchSizes(32, 8, None, 2)),
        (("critic.ppo_mini_batch_size=16", "critic.ppo_epochs=3"), BatchSizes(16, 8, None, 3)),
        (("critic.use_dynamic_bsz=True", "critic.ppo_max_token_len_per_gpu=500"), BatchSizes(32, None, 500, 2)),
        (("actor_rollout_ref.actor.use_dynamic_bsz=True",), BatchSizes(32, None, 16384, 2)),
    ],
)
def test_the_critics_training_is_cut_as_the_actors_unless_told_otherwise(
    overrides: tuple[str, ...], sizes: BatchSizes
) -> None:
    common = (
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_epochs=2",
    )
    handles = [SampleHandle(k, group=k, tokens=100, generated=50, score=0.0, version=0) for k in range(64)]
    own = build_planner(config_of(*PPO, *common, *overrides), ranks=1).plan(handles).ranks[0]
    assert own.critic is not None
    updates = [[len(micro) for micro in update] for update in own.critic]
    assert len(updates) == 64 // sizes.mini_batch * sizes.epochs
    assert {sum(update) for update in updates} == {sizes.mini_batch}
    assert max(max(update) for update in updates) <= (sizes.micro_batch_samples or sizes.micro_batch_tokens // 100)
    assert build_planner(config_of(*GRPO, *common), ranks=1).plan(handles).ranks[0].critic is None


@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        ((), (4, 4)),
        (("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",), (4, 16)),
        (("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",), (2, 2)),
        (
            (
                "actor_rollout_ref.actor.use_dynamic_bsz=True",
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=400",
            ),
            (1, 8),
        ),
    ],
)
def test_the_reference_log_probs_use_their_own_micro_batch_size(
    overrides: tuple[str, ...], counts: tuple[int, int]
) -> None:
    common = ("data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    handles = [SampleHandle(k, group=k, tokens=100, generated=50, score=0.0, version=0) for k in range(32)]
    own = build_planner(config_of(*GRPO, *common, *overrides), ranks=1).plan(handles).ranks[0]
    assert (len(own.forward), len(own.reference)) == counts


def test_every_model_of_a_train_worker_shares_prompts_and_the_planner_knows() -> None:
    kl = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.rollout.n=4")
    config = config_of(*PPO, *kl, "actor_rollout_ref.actor.use_prefix_grouper=True")
    settings = train_settings(config, 10, "cpu")
    assert settings.reference is not None
    assert settings.critic is not None
    assert all(model.shared_prompts for model in (settings.actor, settings.reference, settings.critic))
    handles = [SampleHandle(k, k // 4, 100, 50, score=0.0, version=0, prompt_tokens=50) for k in range(8)]
    assert build_planner(config, ranks=1).plan(handles).metrics["plan/computed_tokens"] == 2 * 50 + 8 * 50
    plain = config_of(*PPO, *kl)
    assert not train_settings(plain, 10, "cpu").actor.shared_prompts
    assert "plan/computed_tokens" not in build_planner(plain, ranks=1).plan(handles).metrics


def test_the_chunk_of_logits_is_a_setting_of_policy_and_reference() -> None:
    chunk = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.model.logprob_chunk_size=2048")
    settings = train_settings(config_of(*GRPO, *chunk), 10, "cuda")
    assert settings.reference is not None
    assert settings.actor.logprob_chunk == settings.reference.logprob_chunk == 2048
    assert train_settings(config_of(*GRPO), 10, "cuda").actor.logprob_chunk is None


def test_overlong_shaping_applies_to_the_episodes() -> None:
    data: dict[str, DatasetSettings] = {}
    shaped = ("reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=20", "data.max_response_length=100")
    engines = EngineView.of([])
    settings = episode_settings(config_of(*shaped), data, 1)
    assert EpisodeWorker(settings, engines)._overlong == OverlongPenalty(20, 1.0, 100)
    assert EpisodeWorker(episode_settings(config_of(), data, 1), engines)._overlong is None


def test_episode_workers_share_the_scoring_processes() -> None:
    data: dict[str, DatasetSettings] = {}
    prime = config_of("reward.reward_manager.name=prime", "reward.num_workers=8")
    assert episode_settings(prime, data, 3).reward.workers == 3
    assert episode_settings(config_of("reward.num_workers=8"), data, 1).reward.workers == 1
    batch = config_of("reward.reward_manager.name=batch", "reward.batch_size=32")
    assert episode_settings(batch, data, 1).reward.batch_size == 32


def test_local_paths_of_all_models_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("policy", "judge"):
        Path(name).mkdir()
    found = with_absolute_paths(
        config_of(*PPO, "critic.model.path=judge", "reward.prime.model_path=judge", "data.train_files=[policy, far]"),
        RLBuilder.paths,
    )
    assert found.actor_rollout_ref.model.path == str(tmp_path / "policy")
    assert found.critic.model.path == found.reward.prime.model_path == str(tmp_path / "judge")
    assert found.data.train_files == [str(tmp_path / "policy"), "far"]
    assert found.actor_rollout_ref.model.tokenizer_path is None


def test_the_example_of_ppo_reads_as_it_is_written() -> None:
    config = load(["--config-name", str(EXAMPLES / "ppo" / "ppo_config.yaml"), "trainer.logger=[console]"])[0].config
    settings = train_settings(config, 100, "cuda")
    assert settings.algorithm.estimator == "gae"
    assert settings.critic is not None
    assert settings.critic.schedule.lr == 1e-5
    assert settings.reference is None  # use_kl_in_reward is not set


def test_save_hf_can_be_set_in_either_spelling() -> None:
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]"
    adapter = "actor_rollout_ref.actor.peft.lora_rank=8"
    given = ([], ["trainer.save_hf=true"], [contents], [adapter], [adapter, "trainer.save_hf=true"])
    asked = [train_settings(config_of(*each), 1, "cpu").save_hf for each in given]
    assert asked == [None, True, True, False, True]


OFFLOAD = (
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    "actor_rollout_ref.ref.fsdp_config.param_offload=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
    *PPO,
)


def test_each_model_is_offloaded_as_its_own_section_says() -> None:
    models = train_settings(config_of(*OFFLOAD), 10, "cuda")
    assert models.reference is not None
    assert models.critic is not None
    assert (models.actor.param_offload, models.actor.optimizer_offload) == (True, True)
    assert (models.reference.param_offload, models.reference.optimizer_offload) == (True, False)
    assert (models.critic.param_offload, models.critic.optimizer_offload) == (False, False)
    critic = train_settings(config_of(*PPO, "critic.fsdp_config.param_offload=true"), 10, "cuda").critic
    assert critic is not None
    assert critic.param_offload


def test_offload_policy_does_the_work_of_the_other_two() -> None:
    actor = train_settings(config_of(*OFFLOAD, "actor.fsdp_config.offload_policy=true"), 10, "cuda").actor
    assert (actor.offload_policy, actor.param_offload, actor.optimizer_offload) == (True, False, False)


def test_on_a_cpu_nothing_is_offloaded_or_compiled() -> None:
    policy, layers = "actor.fsdp_config.offload_policy=true", "actor.fsdp_config.use_torch_compile=true"
    models = train_settings(config_of(*OFFLOAD, policy, layers), 10, "cpu")
    for model in (models.actor, models.reference, models.critic):
        assert model is not None
        assert not any((model.param_offload, model.optimizer_offload, model.offload_policy, model.compile))
        assert not model.compile_layers


def test_kernels_are_compiled_on_accelerators_unless_it_is_turned_off() -> None:
    assert train_settings(config_of(), 10, "cuda").actor.compile
    assert not train_settings(config_of("actor.use_torch_compile=false"), 10, "cuda").actor.compile


def test_layers_are_compiled_on_request_those_of_the_reference_too() -> None:
    assert not train_settings(config_of(), 10, "cuda").actor.compile_layers
    layers = "actor.fsdp_config.use_torch_compile=true"
    models = train_settings(config_of(*PPO, "actor.use_kl_loss=true", layers), 10, "cuda")
    assert models.reference is not None
    assert models.critic is not None
    assert (models.actor.compile_layers, models.reference.compile_layers) == (True, True)
    assert not models.critic.compile_layers


def test_reshard_after_forward_follows_the_setting() -> None:
    key = "actor_rollout_ref.actor.fsdp_config.reshard_after_forward"
    assert train_settings(config_of(), 10, "cpu").actor.reshard_after_forward
    assert not train_settings(config_of(f"{key}=false"), 10, "cpu").actor.reshard_after_forward


def test_device_hints_are_printed_once_auto_is_resolved() -> None:
    key = "actor_rollout_ref.actor.fsdp_config.param_offload"
    assert device_hints(config_of(f"{key}=true"), "cuda", TRAIN_HINTS) == []
    [said] = device_hints(config_of(f"{key}=true"), "cpu", TRAIN_HINTS)
    assert said.startswith(f"{key}=true has no effect: on CPU")
    assert device_hints(config_of(f"{key}=true", "trainer.device=cpu"), "cpu", TRAIN_HINTS) == []  # it was said before


def test_the_loss_of_bypass_mode_can_be_reinforce() -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    assert algorithm_settings(config_of(bypass)).loss_mode == "vanilla"
    assert algorithm_settings(config_of(bypass, "algorithm.rollout_correction.loss_type=reinforce")).loss_mode == "gpg"


@pytest.mark.parametrize(("ratio", "dtype"), [(0.01, "float32"), (1.0, "bfloat16")])
def test_a_moving_average_of_the_policy_is_stored_in_float32(ratio: float, dtype: str) -> None:
    config = config_of(
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
        "trainer.ref_update_freq=1",
        f"trainer.ref_update_ratio={ratio}",
    )
    reference = train_settings(config, 10, "cpu").reference
    assert reference is not None
    assert reference.param_dtype == dtype


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ([], 1800),
        (["trainer.max_staleness=1"], 1800 + 2 * (3600 + 900)),
        (["trainer.max_staleness=1", "actor_rollout_ref.rollout.free_cache_engine=False"], 1800),
    ],
)
def test_the_time_in_which_engines_sleep_under_requests_is_not_a_hang(overrides: list[str], seconds: float) -> None:
    assert timeouts(config_of("trainer.device=cuda", *overrides)).generation.seconds == seconds
