"""Which steps, ranks and tools of a profile are accepted, and how launch scripts spell them."""

from __future__ import annotations

import pytest

from verl.config.load import load, load_sft
from verl.config.schema.trainer import TrainerConfig
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

P = "trainer.profile"
ON_CPU = f"set {P}.tools=[torch], whose traces hold the allocations too"


def trainer_of(*settings: str) -> TrainerConfig:
    return load([*settings], complete=False)[0].config.trainer


def test_nothing_is_profiled_by_default() -> None:
    assert not trainer_of().profile_steps


@pytest.mark.parametrize("steps", ["3", "[3]", "[3,3]"])
def test_one_step_needs_no_list(steps: str) -> None:
    assert trainer_of(f"{P}.steps={steps}").profile_steps == {3}


def test_a_profile_that_is_disabled_has_no_steps() -> None:
    assert not trainer_of(f"{P}.steps=[1,2]", f"{P}.enable=false").profile_steps


def test_keys_of_launch_scripts_are_aliases() -> None:
    profile = trainer_of(
        "global_profiler.tool=torch_memory",
        "global_profiler.steps=[1,2]",
        "global_profiler.save_path=traces",
        "actor_rollout_ref.actor.profiler.enable=True",
        "actor_rollout_ref.actor.profiler.ranks=[0,1]",
        "actor_rollout_ref.actor.profiler.all_ranks=False",
    ).profile
    assert (profile.tools, profile.steps, profile.directory, profile.ranks) == (["memory"], [1, 2], "traces", [0, 1])


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (["tools=memory"], ON_CPU),
        (["tools=[torch,nsys]"], ON_CPU),
        (["steps=[1,11]"], f"set {P}.steps=[10]"),
        (["ranks=[0,4]"], f"set {P}.ranks=[3]"),
    ],
)
@pytest.mark.parametrize("sft", [False, True])
def test_what_does_not_exist_is_refused_with_a_fix(settings: list[str], fix: str, sft: bool) -> None:
    run = ["trainer.device=cpu", "trainer.n_gpus_per_node=4", "trainer.total_training_steps=10", f"{P}.steps=[1]"]
    with pytest.raises(ConfigError) as raised:
        (load_sft if sft else load)([*run, *(f"{P}.{setting}" for setting in settings)], complete=False)
    [problem] = raised.value.problems
    assert problem.endswith(fix)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["tools=[torch,nsys]"], "both use CUPTI"),
        (["tools=[nsys]", "local"], "trainer.local=true has none"),
        (["tools=npu"], "Ascend NPUs"),
    ],
)
def test_tools_that_cannot_record_are_refused(settings: list[str], reason: str) -> None:
    given = [f"{P}.{each}" if "=" in each else f"trainer.{each}=true" for each in settings]
    with pytest.raises(ConfigError, match=reason):
        load(["trainer.device=cuda", f"{P}.steps=[1]", *given], complete=False)


@pytest.mark.parametrize("setting", ["ranks=[1]", "tools=[memory]", "directory=traces", "all_ranks=true"])
def test_settings_of_a_profile_without_steps_have_no_effect(setting: str) -> None:
    [loaded] = load([f"{P}.{setting}"], complete=False)
    assert any("has no effect: trainer.profile.steps is not given" in hint for hint in loaded.hints)
