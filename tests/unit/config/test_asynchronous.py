"""What asynchronous runs refuse, warn about, and correct by default."""

from contextlib import nullcontext

import pytest

from verl.config.checks.asynchronous import find_hints
from verl.config.features import get_importance_weights
from verl.config.load import load
from verl.config.schema import Config
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

ROLLOUT, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
STALE = "trainer.max_staleness=2"


def config_of(*overrides: str) -> Config:
    [loaded] = load([*overrides], complete=False)
    assert isinstance(loaded.config, Config)
    return loaded.config


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        ([], None),
        ([STALE], "token"),
        ([STALE, f"{CORRECTION}.rollout_is=null"], None),
        ([STALE, f"{CORRECTION}.rollout_is=sequence"], "sequence"),
        ([STALE, f"{CORRECTION}.bypass_mode=True"], None),
        ([STALE, f"{CORRECTION}.preset=mis"], None),
        ([STALE, f"{CORRECTION}.preset=icepop"], "icepop"),
        ([STALE, f"{ROLLOUT}.top_p=0.9"], None),
        ([STALE, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.name=sglang"], "token"),  # its log-probs are not truncated
    ],
)
def test_old_responses_have_importance_weights_unless_something_else_is_chosen(
    overrides: list[str], weights: str | None
) -> None:
    assert get_importance_weights(config_of(*overrides)) == weights


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([STALE], None),
        ([STALE, "trainer.deterministic=True"], "trainer.max_staleness"),
        ([STALE, "trainer.device=cuda", f"{ROLLOUT}.name=hf"], f"{ROLLOUT}.free_cache_engine"),
        ([STALE, f"{ROLLOUT}.free_cache_engine=True", f"{ROLLOUT}.name=hf"], f"{ROLLOUT}.free_cache_engine"),
        ([STALE, "data.sampler=difficulty"], "trainer.max_staleness"),
        ([STALE, "trainer.device=cuda"], None),
        (["trainer.deterministic=True", f"{ROLLOUT}.name=hf"], None),
    ],
)
def test_what_needs_a_synchronous_run_is_refused(overrides: list[str], key: str | None) -> None:
    with pytest.raises(ConfigError, match=f"{key}: ") if key else nullcontext():
        config_of(*overrides)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([STALE], None),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gpg"], None),
        ([STALE, "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"], "actor_rollout_ref.actor.policy_loss.loss_mode"),
        ([STALE, f"{CORRECTION}.rollout_is=null"], f"{CORRECTION}.rollout_is"),
        ([STALE, f"{ROLLOUT}.top_k=20"], f"{CORRECTION}.rollout_is"),
        ([STALE, f"{ROLLOUT}.top_k=20", f"{CORRECTION}.bypass_mode=True"], None),
    ],
)
def test_settings_that_leave_old_responses_uncorrected_are_warned_about(overrides: list[str], key: str | None) -> None:
    assert [hint.key for hint in find_hints(config_of(*overrides))] == ([key] if key else [])
