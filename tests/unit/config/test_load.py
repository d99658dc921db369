"""From a command line, a YAML file or a dict to a `Config`: Hydra's grammar, and every problem at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.load import LoadedConfig, load, load_dict
from verl.config.paths import delete_path, get_path, iter_leaves, set_path, suggest_key
from verl.config.render import render
from verl.config.schema import Config, collect_settings
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

REQUIRED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=tiny"]


def one(*overrides: str) -> LoadedConfig:
    [loaded] = load([*REQUIRED, *overrides])
    return loaded


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load([*REQUIRED, *overrides])
    return raised.value.problems


# --- the grammar


def test_key_value_sets_a_setting_of_its_type() -> None:
    config = one(
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "data.shuffle=False",
        "data.val_files=[a,b]",
    ).config
    assert config.data.train_batch_size == 64
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.data.shuffle is False
    assert config.data.val_files == ["a", "b"]


def test_plus_adds_to_open_dictionaries_without_a_hint() -> None:
    loaded = one(
        "actor_rollout_ref.rollout.n=8",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True",
        "++ray_kwargs.ray_init.num_gpus=2",
        "reward.custom_reward_function.path=r.py",
        "+reward.custom_reward_function.reward_kwargs={a: 1, b: {c: 2}}",
    )
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"disable_cascade_attn": True}
    assert loaded.config.ray_kwargs.ray_init.arguments() == {"num_gpus": 2}
    assert loaded.config.reward.custom_reward_function.reward_kwargs == {"a": 1, "b": {"c": 2}}
    assert loaded.hints == ()


def test_plus_on_a_declared_setting_works_and_says_that_it_is_not_needed() -> None:
    loaded = one("+trainer.seed=3")
    assert loaded.config.trainer.seed == 3
    assert any("the + is not needed" in hint for hint in loaded.hints)


def test_tilde_resets_a_setting_to_its_default_and_removes_an_entry_of_a_dictionary() -> None:
    given_ = {"data": {"train_batch_size": 8}, "ray_kwargs": {"ray_init": {"num_gpus": 1, "local_mode": True}}}
    config = load_dict(given_, ["~data.train_batch_size", "~ray_kwargs.ray_init.num_gpus"], complete=False).config
    assert config.data.train_batch_size == 1024
    assert config.ray_kwargs.ray_init.arguments() == {"local_mode": True}


def test_tilde_refuses_what_is_unknown_absent_or_different() -> None:
    assert "did you mean data.train_batch_size?" in problems("~data.train_batch_sizes")[0]
    assert "does not exist, so it cannot be removed" in problems("~ray_kwargs.ray_init.nothing")[0]
    assert "the value is 8" in problems("data.train_batch_size=8", "~data.train_batch_size=9")[0]


def test_a_dictionary_is_merged_into_its_section() -> None:
    config = one("actor_rollout_ref.actor.optim={lr: 1e-5}", "actor_rollout_ref.actor.optim={weight_decay: 0.1}").config
    assert (config.actor_rollout_ref.actor.optim.lr, config.actor_rollout_ref.actor.optim.weight_decay) == (1e-5, 0.1)


def test_paths_with_a_tilde_are_text() -> None:
    assert one("data.val_files=~/data/test.parquet").config.data.val_files == "~/data/test.parquet"


def test_an_override_that_cannot_be_read_is_named_with_its_remedy() -> None:
    [problem] = problems("data.prompt_key=[a")
    assert problem.startswith("data.prompt_key=[a: is not a valid override")


def test_unknown_options_name_the_known_one() -> None:
    assert "use --config-name" in problems("--config-nam=x")[0]


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_multirun_is_the_product_of_all_sweeps(flag: str) -> None:
    runs = load([*REQUIRED, flag, "actor_rollout_ref.rollout.n=4,8", "trainer.seed=range(1,4)"])
    got = [(run.config.actor_rollout_ref.rollout.n, run.config.trainer.seed) for run in runs]
    assert got == [(n, seed) for n in (4, 8) for seed in (1, 2, 3)]
    assert runs[0].sweep == ("actor_rollout_ref.rollout.n=4", "trainer.seed=1")
    assert len({run.sweep for run in runs}) == len(runs)


def test_a_sweep_without_multirun_suggests_a_list_text_or_multirun() -> None:
    [problem] = problems("data.val_files=a.parquet,b.parquet")
    assert "data.val_files=[a.parquet,b.parquet]" in problem
    assert "-m" in problem


# --- interpolations


def test_interpolations_see_other_settings_defaults_aliases_and_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("VERL_TEST_ROOT", "/somewhere")
    monkeypatch.setenv("VERL_TEST_COUNT", "7")
    config = one(
        "data.val_files=${data.train_files}",
        "data.val_batch_size=${data.train_batch_size}",
        "actor_rollout_ref.rollout.val_kwargs.n=${rollout.n}",
        "trainer.default_local_dir=${oc.env:VERL_TEST_ROOT}/run",
        "trainer.seed=${oc.env:VERL_TEST_COUNT}",
    ).config
    assert config.data.val_files == "train.parquet"
    assert config.data.val_batch_size == 1024
    assert config.actor_rollout_ref.rollout.val_kwargs.n == 1
    assert config.trainer.default_local_dir == "/somewhere/run"
    assert config.trainer.seed == 7


def test_interpolations_that_cannot_be_resolved_are_reported_with_their_key() -> None:
    found = problems("data.seed=${data.nothing}", "trainer.project_name=${oc.env:VERL_TEST_NOT_SET}")
    assert [problem.split(":")[0] for problem in found] == ["data.seed", "trainer.project_name"]


# --- YAML


def test_yaml_with_a_defaults_list_groups_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "plain.yaml").write_text("# @package _global_\nactor_rollout_ref: {rollout: {n: 4}}\n")
    (tmp_path / "algo" / "wide.yaml").write_text("# @package _global_\nactor_rollout_ref: {rollout: {n: 16}}\n")
    (tmp_path / "base.yaml").write_text("data: {train_files: a.parquet, train_batch_size: 32}\n")
    (tmp_path / "run.yaml").write_text(
        "defaults: [base, algo: plain, _self_]\n"
        "data: {max_prompt_length: 64, val_batch_size: '${data.train_batch_size}'}\n"
        "actor_rollout_ref: {model: {path: tiny}, actor: {optim: {lr: 1e-5}}}\ncritic:\n"
    )
    config = load(["--config-name", str(tmp_path / "run.yaml")])[0].config
    assert (config.data.train_batch_size, config.data.max_prompt_length, config.data.val_batch_size) == (32, 64, 32)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.actor_rollout_ref.rollout.n == 4

    arguments = ["--config-path", str(tmp_path), "--config-name", "run", "algo=wide", "data.train_batch_size=16"]
    [loaded] = load(arguments)
    assert loaded.config.actor_rollout_ref.rollout.n == 16
    assert loaded.config.data.val_batch_size == 16
    assert [run.config.actor_rollout_ref.rollout.n for run in load([*arguments[:4], "-m", "algo=plain,wide"])] == [
        4,
        16,
    ]


def test_a_yaml_file_that_is_missing_or_broken_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("data: {train_files: [\n")
    with pytest.raises(ConfigError, match="available: grpo"):
        load(["--config-path", str(tmp_path), "--config-name", "gpro"])
    with pytest.raises(ConfigError, match="cannot be read"):
        load(["--config-name", str(tmp_path / "grpo.yaml")])
    with pytest.raises(ConfigError, match="add --config-name"):
        load(["--config-path", str(tmp_path)])


def test_the_command_line_wins_over_yaml_also_across_spellings(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("rollout: {n: 4}\n")
    argv = ["--config-name", str(tmp_path / "run.yaml"), "actor_rollout_ref.rollout.n=8"]
    config = load(argv, complete=False)[0].config
    assert config.actor_rollout_ref.rollout.n == 8


def test_what_is_printed_can_be_loaded_again() -> None:
    config = one(
        "actor_rollout_ref.rollout.n=8",
        "data.val_files=[a,b]",
        "trainer.project_name='yes: # 1'",
        "trainer.experiment_name='007'",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides={a: [1, {b: null}]}",
        "+ray_kwargs.ray_init.num_gpus=2",
    ).config
    text = render(config)
    assert load_dict(yaml.safe_load(text)).config == config
    assert load_dict(yaml.safe_load(render(Config())), complete=False).config == Config()


# --- problems


def test_all_problems_come_at_once_each_with_key_value_rule_and_fix() -> None:
    found = problems(
        "data.train_batch_size=0",
        "data.truncation=lift",
        "data.trian_max_samples=4",
        "actor_rollout_ref.actor.optim.lr=fast",
        "actor_rollout_ref.rollout.n=true",
        "critic=3",
        "trainer.save_freq=0",
        "trainer.logger=[console,wnadb]",
        "trainer.max_staleness=-1",
        "trainer.test_freq=5",
        "actor_rollout_ref.actor.fsdp_config.dtype=int8",
    )
    expected = {
        "data.train_batch_size": "0 must be at least 1; set data.train_batch_size=1024",
        "data.truncation": "lift must be one of error, left, right, middle; set data.truncation=left",
        "data.trian_max_samples": "is not a setting; did you mean data.train_max_samples? Set data.train_max",
        "actor_rollout_ref.actor.optim.lr": "fast must be a number; set actor_rollout_ref.actor.optim.lr=1e-06",
        "actor_rollout_ref.rollout.n": "true must be a whole number; set actor_rollout_ref.rollout.n=1",
        "critic": "3 must be a section",
        "trainer.save_freq": "0 must be -1 (never) or at least 1; set trainer.save_freq=null",
        "trainer.logger": "wnadb must be one of console, jsonl",
        "trainer.max_staleness": "-1 must be at least 0; set trainer.max_staleness=0",
        "trainer.test_freq": "5 requires validation data; set data.val_files=test.parquet",
        "actor_rollout_ref.actor.fsdp_config.dtype": "int8 must be one of auto, float32, bfloat16, float16",
    }
    for problem in found:
        key, _, rest = problem.partition(": ")
        assert rest.startswith(expected.pop(key))
    assert not expected


def test_every_suggested_override_fixes_its_problem() -> None:
    found = problems(
        "data.train_batch_size=-1", "data.truncation=lift", "actor_rollout_ref.actor.clip_ratio=7", "trainer.seed=x"
    )
    fixes = [problem.rpartition("set ")[2] for problem in found]
    assert len(fixes) == 4
    one(*fixes)


@pytest.mark.parametrize(
    ("wrong", "others"),
    [
        ("data.max_prompt_length=-5", ["actor_rollout_ref.rollout.max_model_len=600"]),
        ("data.max_response_length=x", ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=2000"]),
        (
            "trainer.critic_warmup=x",
            ["algorithm.adv_estimator=gae", "trainer.total_training_steps=10", "critic.optim.lr_warmup_steps=10"],
        ),
        (
            "actor_rollout_ref.actor.policy_loss.clip_cov_ub=x",
            [
                "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
                "actor_rollout_ref.actor.policy_loss.clip_cov_lb=7",
            ],
        ),
    ],
)
def test_a_wrong_value_does_not_cause_further_problems(wrong: str, others: list[str]) -> None:
    [problem] = problems(wrong, *others)
    assert problem.startswith(wrong.partition("=")[0])


def test_required_settings_are_needed_for_a_run_but_not_to_print_settings() -> None:
    with pytest.raises(ConfigError) as raised:
        load(["data.train_files=???"])
    assert [problem.split(":")[0] for problem in raised.value.problems] == [
        "data.train_files",
        "actor_rollout_ref.model.path",
    ]
    [loaded] = load([], complete=False)
    assert loaded.config == Config()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("data.train_batchsize", "data.train_batch_size"),
        ("lr", "actor_rollout_ref.actor.optim.lr"),
        ("kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("critic.optim.lrr", "critic.optim.lr"),
        ("trainer.gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("actor_rollout_ref.ppo_epochs", "actor_rollout_ref.actor.ppo_epochs"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("trainer.total_step", "trainer.total_training_steps"),
        ("quixotic.zebra", None),
        ("actor_rollout_ref.actor.ppo_micro_batch_size", None),
        ("rollout.agent.num_workers", None),
    ],
)
def test_unknown_keys_get_a_suggestion(typed: str, meant: str | None) -> None:
    assert suggest_key(typed) == meant


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([s.key for s in collect_settings(Config).values() if s.section is None]), st.data())
def test_a_key_with_one_letter_dropped_gets_a_suggestion_in_its_section(key: str, data: st.DataObject) -> None:
    last = key.rpartition(".")[2]
    if len(last) < 4 or last in ("trust_remote_code", "require"):  # security settings are never suggested
        return
    at = data.draw(st.integers(len(key) - len(last), len(key) - 1))
    typed = key[:at] + key[at + 1 :]
    if typed not in collect_settings(Config):
        found = suggest_key(typed)  # `top_` may be top_p or top_k: the section is certain
        assert found is not None
        assert found.rpartition(".")[0] == key.rpartition(".")[0]


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("actor_rollout_ref.model.use_paper_planes=True", None),
        ("actor_rollout_ref.rollout.purple_engine=True", None),
        ("actor_rollout_ref.model.trust_remote_cod=True", None),
        ("data.train_bach_size=0", "data.train_batch_size=..."),
        ("data.train_bach_size=64", "data.train_batch_size=64"),
        ("trainer.logger_name=true", None),
    ],
)
def test_only_a_similar_name_is_suggested_and_only_with_a_value_that_it_accepts(
    override: str, suggestion: str | None
) -> None:
    [problem] = problems(override)
    assert problem.startswith(f"{override.partition('=')[0]}: is not a setting; ")
    assert ("Set " in problem) == (suggestion is not None), problem
    assert suggestion is None or problem.endswith(f"Set {suggestion}")


# --- trees

trees = st.recursive(
    st.integers(), lambda below: st.dictionaries(st.sampled_from("abc"), below, min_size=1, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


@settings(deadline=None)
@given(trees)
def test_a_tree_is_its_leaves(tree: dict[str, Any]) -> None:
    rebuilt: dict[str, Any] = {}
    for path, value in iter_leaves(tree):
        set_path(rebuilt, path, value)
        assert get_path(rebuilt, path) == value
    assert rebuilt == tree


@settings(deadline=None)
@given(trees)
def test_pruning_all_leaves_leaves_nothing(tree: dict[str, Any]) -> None:
    for path, _ in list(iter_leaves(tree)):
        assert delete_path(tree, path)
        assert not delete_path(tree, path)
    assert tree == {}


# --- modules of the user


def test_external_modules_are_imported_when_settings_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_engine_of_a_test.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = one("actor_rollout_ref.model.external_lib=own_engine_of_a_test")
    assert loaded.config.actor_rollout_ref.model.external_modules == ("own_engine_of_a_test",)
    assert "own_engine_of_a_test" in sys.modules


def test_an_external_module_that_is_missing_is_a_problem_among_others() -> None:
    import_problem, other = problems("actor_rollout_ref.model.external_lib=[math,no_such]", "data.train_batch_size=0")
    assert "actor_rollout_ref.model.external_lib: no_such cannot be imported" in f"{import_problem} {other}"


@pytest.mark.parametrize(
    ("setting", "suggestion"),
    [
        ("trainer.device=gpu", "set trainer.device=cuda"),
        ("algorithm.adv_estimator=ppo", "set algorithm.adv_estimator=gae"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dapo", "policy_loss.loss_mode=vanilla"),
        ("data.batch_size=8", "Set data.train_batch_size=8"),
        ("actor_rollout_ref.actor.learning_rate=1e-5", "Set actor_rollout_ref.actor.optim.lr=1e-05"),
        ("trainer.max_steps=5", "Set trainer.total_training_steps=5"),
    ],
)
def test_names_of_other_programs_are_understood_by_their_meaning(setting: str, suggestion: str) -> None:
    [problem] = problems(setting)
    assert problem.endswith(suggestion)


def test_values_after_unknown_options_are_not_taken_for_settings() -> None:
    assert problems("--lr", "1e-5") == ["--lr: is not an option; set optim.lr=1e-6"]
    assert problems("trainer.seed=3", "--num-epochs", "3") == [
        "--num-epochs: is not an option; set trainer.total_epochs=1"
    ]
