"""What a batch, a step and a version are under each name of the settings of asynchronous runs."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import yaml

from verl.config.batch_sizes import count_validation_prompts, get_actor_batch_sizes, get_run_ahead
from verl.config.load import LoadedConfig, load, load_dict
from verl.config.render import render
from verl.config.schema import Config
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

MINI = "actor_rollout_ref.actor.ppo_mini_batch_size=32"
FACTORS = ("async_training.require_batches=4", "async_training.trigger_parameter_sync_step=2")
FULLY_ASYNC = ("--config-name", "fully_async_ppo_trainer", MINI)
ONE_STEP_OFF = ("--config-name", "one_step_off_ppo_trainer", MINI)
MODE = "trainer.v1.trainer_mode"
THRESHOLD = "async_training.staleness_threshold"


class Meaning(NamedTuple):
    """Prompts of a batch, steps of the run, staleness S, run-ahead P, and whether engines share devices."""

    batch: int
    steps: int | None
    staleness: int
    run_ahead: float
    is_shared: bool = True


def read(*settings: str) -> LoadedConfig[Config]:
    (loaded,) = load(settings, complete=False)
    return loaded


def find_problems(*settings: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(*settings)
    return error.value.problems


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # own names
        ([], Meaning(1024, None, 0, 0)),
        (["trainer.max_staleness=1"], Meaning(1024, None, 1, 1)),
        (["trainer.max_staleness=4"], Meaning(1024, None, 4, 1)),
        (["trainer.max_staleness=4", f"{THRESHOLD}=2.5"], Meaning(1024, None, 4, 2.5)),
        (["trainer.max_staleness=0", f"{THRESHOLD}=0.5"], Meaning(1024, None, 0, 0)),
        # staleness_threshold alone
        ([f"{THRESHOLD}=0"], Meaning(1024, None, 1, 0)),
        ([f"{THRESHOLD}=0.1"], Meaning(1024, None, 2, 0.1)),
        ([f"{THRESHOLD}=1.5"], Meaning(1024, None, 3, 1.5)),
        # the batch and the steps
        ([MINI, *FACTORS], Meaning(256, None, 0, 0)),
        ([MINI, FACTORS[0]], Meaning(128, None, 0, 0)),
        ([MINI, *FACTORS, "data.train_batch_size=0"], Meaning(256, None, 0, 0)),
        ([MINI, *FACTORS, "rollout.total_rollout_steps=51200"], Meaning(256, 200, 0, 0)),
        (["data.train_batch_size=100", "rollout.total_rollout_steps=250"], Meaning(100, 2, 0, 0)),
        (["data.train_batch_size=100", "rollout.total_rollout_steps=50"], Meaning(100, 1, 0, 0)),
        # defaults of the modules of launch scripts
        (FULLY_ASYNC, Meaning(128, None, 2, 0.1, is_shared=False)),
        ([*FULLY_ASYNC, *FACTORS, f"{THRESHOLD}=0.5"], Meaning(256, None, 2, 0.5, is_shared=False)),
        (ONE_STEP_OFF, Meaning(1024, None, 1, 1, is_shared=False)),
        # names of trainers
        ([f"{MODE}=sync", f"{THRESHOLD}=0.5"], Meaning(1024, None, 0, 0)),
        ([f"{MODE}=colocate_async"], Meaning(1024, None, 8, 1)),
        (
            [f"{MODE}=separate_async", "trainer.v1.sampler.max_off_policy_threshold=3", "rollout.n_gpus_per_node=8"],
            Meaning(1024, None, 3, 1, is_shared=False),
        ),
        ([f"{MODE}=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=2"], Meaning(1024, None, 8, 2)),
        ([f"{MODE}=colocate_async", "trainer.max_staleness=2"], Meaning(1024, None, 2, 1)),
    ],
)
def test_batch_steps_staleness_and_run_ahead_of_each_mode(settings: list[str], expected: Meaning) -> None:
    config = read(*settings).config
    actor_rollout_ref, trainer = config.actor_rollout_ref, config.trainer
    assert expected == Meaning(
        config.data.train_batch_size,
        trainer.total_training_steps,
        trainer.max_staleness,
        get_run_ahead(config),
        actor_rollout_ref.hybrid_engine,
    )


def test_a_version_has_as_many_optimizer_steps_as_batches_and_updates() -> None:
    config = read(MINI, *FACTORS).config
    assert get_actor_batch_sizes(config).count_optimizer_steps(config.data.train_batch_size) == 4 * 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], None),
        (["data.val_batch_size=7"], 7),
        (["trainer.max_staleness=2"], 64 * 4),  # half of two batches of 4 responses
        (["trainer.max_staleness=2", "actor_rollout_ref.rollout.val_kwargs.n=8"], 32),
        (["trainer.max_staleness=2", "trainer.validation_share=0.25"], 128),
        (["trainer.max_staleness=2", "trainer.validation_share=0.25", "data.val_batch_size=200"], 128),
        (["trainer.max_staleness=2", "data.val_batch_size=7"], 7),
        (["trainer.max_staleness=1", "actor_rollout_ref.rollout.val_kwargs.n=2000"], 1),
    ],
)
def test_validation_beside_training_has_a_share_of_the_engines(settings: list[str], expected: int | None) -> None:
    sizes = ["data.val_files=b.parquet", "data.train_batch_size=64", MINI, "actor_rollout_ref.rollout.n=4"]
    assert count_validation_prompts(read(*sizes, *settings).config) == expected


def test_what_was_resolved_resolves_to_itself() -> None:
    config = read(*FULLY_ASYNC, *FACTORS, "rollout.total_rollout_steps=5000").config
    again = load_dict(yaml.safe_load(render(config)), complete=False)
    assert again.config == config
    assert not [hint for hint in again.hints if " sets " in hint]


def test_each_setting_that_another_one_sets_has_a_hint() -> None:
    settings = [*FULLY_ASYNC, "data.train_batch_size=512", "rollout.total_rollout_steps=1000"]
    hints = [hint for hint in read(*settings).hints if " sets " in hint]
    assert hints == [
        "async_training.staleness_threshold=0.1 sets trainer.max_staleness=2",
        "async_training.require_batches=1 x async_training.trigger_parameter_sync_step=4 x "
        "actor_rollout_ref.actor.ppo_mini_batch_size=32 sets data.train_batch_size=128 (not 512, as given)",
        "actor_rollout_ref.rollout.total_rollout_steps=1000 / data.train_batch_size=128, which is not whole (7.812), "
        "sets trainer.total_training_steps=7",
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["async_training.partial_rollout=False"], "responses continue with new weights"),
        (["async_training.use_trainer_do_validate=True"], "the engines validate"),
        (["async_training.use_dynamic_resource_scheduling=True"], "do not help to generate"),
        (["data.gen_batch_size=1"], "generation in batches of another size"),
        (["actor_rollout_ref.actor.use_rollout_log_probs=True"], "rollout_correction.bypass_mode decides"),
        (["trainer.v1.sampler.max_off_policy_strategy=drop"], "would starve slow prompts"),
        (["trainer.v1.sampler.max_off_policy_threshold=3"], "only trainer.v1.trainer_mode=colocate_async or separate_"),
        (["trainer.v1.separate_async.parameter_sync_step=2"], "trains data.train_batch_size prompts in mini-batches"),
        (["trainer.max_staleness=0", f"{THRESHOLD}=0.5"], "no effect: trainer.max_staleness=0"),
        ([MINI, *FACTORS, "actor.optim.lr_warmup_steps=5"], "optim.lr_warmup_steps=3 for as many updates"),
        ([f"{MODE}=colocate_async", "trainer.v1.sampler.max_off_policy_threshold=3"], "it includes the version that"),
    ],
)
def test_what_has_another_meaning_or_none_has_a_hint(settings: list[str], said: str) -> None:
    assert [hint for hint in read(*settings).hints if said in hint]


def test_generation_must_not_run_further_ahead_than_staleness_allows() -> None:
    (problem,) = find_problems("trainer.max_staleness=2", f"{THRESHOLD}=2.5")
    assert problem.startswith(f"{THRESHOLD}: 2.5 batches must be at most trainer.max_staleness=2")
    (problem,) = find_problems("data.train_batch_size=0")
    assert "must be at least 1" in problem


def test_settings_of_the_user_go_before_the_defaults_of_a_module() -> None:
    loaded = read(*FULLY_ASYNC, "rollout.n_gpus_per_node=2", "algorithm.rollout_correction.bypass_mode=False")
    assert loaded.config.actor_rollout_ref.rollout.n_gpus_per_node == 2
    assert not loaded.config.algorithm.rollout_correction.bypass_mode
    assert loaded.origins["actor_rollout_ref.hybrid_engine"] == "fully_async_ppo_trainer.yaml"
    assert read("--config-path=config", "--config-name=fully_async_dapo_trainer.yaml", MINI).config == (
        read(*FULLY_ASYNC).config
    )
