"""What is declared: complete, documented, frozen, and consistent with its own defaults."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError
from settings_pages import render_reference

from verl.config import train_engines
from verl.config.load import RUN_TYPES, SFT, TRAIN, load
from verl.config.paths import find_setting, get_path
from verl.config.schema import Config, SftConfig, collect_settings
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

ROOTS = (Config, SftConfig)
SETTINGS = [setting for root in ROOTS for setting in collect_settings(root).values() if setting.section is None]
MANY = "actor_rollout_ref.rollout.n=8"


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("data.train_batch_size", 1024),
        ("data.max_prompt_length", 512),
        ("data.max_response_length", 512),
        ("data.prompt_key", "prompt"),
        ("actor_rollout_ref.actor.optim.lr", 1e-6),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 256),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 8),
        ("actor_rollout_ref.actor.grad_clip", 1.0),
        ("actor_rollout_ref.actor.clip_ratio", 0.2),
        ("actor_rollout_ref.actor.ppo_epochs", 1),
        ("actor_rollout_ref.actor.entropy_coeff", 0.0),
        ("actor_rollout_ref.actor.use_kl_loss", False),
        ("actor_rollout_ref.actor.kl_loss_coef", 0.001),
        ("actor_rollout_ref.actor.use_torch_compile", True),
        ("actor_rollout_ref.rollout.name", "vllm"),
        ("actor_rollout_ref.rollout.temperature", 1.0),
        ("actor_rollout_ref.rollout.top_p", 1.0),
        ("actor_rollout_ref.rollout.n", 1),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 1),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 0.5),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", 0.0),
        ("algorithm.kl_ctrl.kl_coef", 0.001),
        ("algorithm.norm_adv_by_std_in_grpo", True),
        ("reward.custom_reward_function.name", "compute_score"),
        ("reward.reward_manager.name", "naive"),
        ("trainer.n_gpus_per_node", 8),
        ("trainer.nnodes", 1),
        ("trainer.total_epochs", 1),
        ("trainer.save_freq", None),
        ("trainer.test_freq", -1),
        ("trainer.logger", ["console"]),
        ("trainer.project_name", "verl"),
        ("trainer.experiment_name", "default"),
    ],
)
def test_the_documented_defaults_hold(key: str, default: object) -> None:
    assert collect_settings(Config)[key].default == default


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_every_setting_has_one_line_of_documentation_and_a_type_in_words(setting) -> None:
    assert setting.doc.endswith(".")
    assert "\n" not in setting.doc
    assert len(setting.doc) <= 110
    assert setting.type_name


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_planned_values_are_choices_and_never_the_default(setting) -> None:
    assert set(setting.planned) <= set(setting.choices)
    default = setting.default if isinstance(setting.default, list) else [setting.default]
    assert not any(planned in default for planned in setting.planned)


@pytest.mark.parametrize("kind", RUN_TYPES, ids=lambda kind: kind.command)
def test_every_alias_leads_to_a_declared_key_and_hides_none(kind) -> None:
    for second, key in kind.legacy.aliases.items():
        assert find_setting(kind.legacy.resolve_alias(tuple(key.split("."))), kind.root) is not None, key
        assert second not in collect_settings(kind.root), second
    for key, values in kind.legacy.value_aliases.items():
        if choices := collect_settings(kind.root)[key].choices:
            assert set(values.values()) <= set(choices)
            assert not set(values) & set(choices)


def test_settings_are_frozen() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.data.train_batch_size = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.ray_kwargs.ray_init.num_cpus = 3


def test_a_config_can_be_pickled() -> None:
    config = Config.model_validate({"actor_rollout_ref": {"rollout": {"n": 8}}, "ray_kwargs": {"ray_init": {"a": 1}}})
    assert pickle.loads(pickle.dumps(config)) == config


def test_clip_range_and_checkpoint_directory_follow_from_the_settings() -> None:
    config = Config.model_validate({"actor_rollout_ref": {"actor": {"clip_ratio": 0.1, "clip_ratio_high": 0.28}}})
    assert config.actor_rollout_ref.actor.clip_range == (0.1, 0.28)
    assert config.trainer.checkpoint_dir.as_posix() == "checkpoints/verl/default"


def test_the_settings_pages_are_up_to_date(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(train_engines._ENGINES, "toy", raising=False)  # of another test
    for name, run_type in {"settings.md": TRAIN, "settings_sft.md": SFT}.items():
        page = pytestconfig.rootpath / "docs" / name
        assert page.read_text() == render_reference(run_type), "run: make docs"


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"])
def test_an_algorithm_is_one_of_the_names_or_a_custom_function(key: str) -> None:
    for name in collect_settings(Config)[key].choices:
        more = [MANY, "algorithm.reward_components=[correct,format]"] if name == "gdpo" else [MANY]
        assert get_path(load([f"{key}={name}", *more], complete=False)[0].config, tuple(key.split("."))) == name
    [loaded] = load([f"{key}=my_package.module_2:my_function", MANY], complete=False)
    assert get_path(loaded.config, tuple(key.split("."))) == "my_package.module_2:my_function"


@pytest.mark.parametrize("value", ["rlo", "module:", ":function", "a.b:c:d", "a..b:c", "2a:b", "a/b.py:c", "7"])
def test_the_error_for_an_invalid_algorithm_names_both_forms(value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load([f"algorithm.adv_estimator={value}"], complete=False)
    [text] = raised.value.problems
    assert text.startswith(f"algorithm.adv_estimator: {value} must be one of grpo, ")
    assert "grpo_passk, or your own as package.module:function; set algorithm.adv_estimator=" in text
    assert text.endswith("=rloo" if value == "rlo" else "=grpo")
