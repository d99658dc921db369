"""Settings of the sandbox and the code scorer: each reaches the scorer, or is reported as ignored."""

from __future__ import annotations

from typing import Any

import pytest

from verl.config.checks.ignored import find_unmet_condition
from verl.config.load import load
from verl.config.schema import Config, collect_settings
from verl.errors import ConfigError, RewardError
from verl.rewards.reward_function import RewardFunction
from verl.rewards.sandbox import sandbox, sandbox_fusion
from verl.rewards.sandbox.sandbox import Limits, ProgramResult
from verl.rewards.scorers import code
from verl.rewards.settings import RewardFunctionSettings
from verl.trainer.build.reward_settings import reward_function_settings

pytestmark = pytest.mark.unit

TWO_TESTS = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
DEFAULT = {"limits": Limits(), "sandbox_url": None, "require": "namespaces", "partial": False}
ARGUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "reward.sandbox.url": ("http://sandbox:8080", {"sandbox_url": "http://sandbox:8080"}),
    "reward.sandbox.seconds": (3, {"limits": Limits(seconds=3)}),
    "reward.sandbox.memory_mb": (256, {"limits": Limits(memory_bytes=256 << 20)}),
    "reward.sandbox.processes": (4, {"limits": Limits(processes=4)}),
    "reward.sandbox.output_mb": (1, {"limits": Limits(output_bytes=1 << 20)}),
    "reward.sandbox.require": ("bubblewrap", {"require": "bubblewrap"}),
    "reward.code.partial": ("true", {"partial": True}),
}
"""Setting -> a value, and the arguments of the scorer that it changes."""


def config(*overrides: str) -> Config:
    return load(["actor_rollout_ref.rollout.n=8", *overrides], complete=False)[0].config


def load_function(path: str | None, builtin_kwargs: dict[str, dict[str, Any]]) -> RewardFunction:
    return RewardFunction.load(RewardFunctionSettings(path, builtin_kwargs=builtin_kwargs))


def test_every_setting_of_these_sections_is_in_the_table() -> None:
    of_the_python_tool = {"reward.sandbox.max_programs"}
    assert set(ARGUMENTS) | of_the_python_tool == {
        key for key in collect_settings(Config) if key.startswith(("reward.sandbox.", "reward.code."))
    }


@pytest.mark.parametrize("key", ARGUMENTS)
def test_a_setting_reaches_the_scorer(key: str) -> None:
    value, arguments = ARGUMENTS[key]
    assert reward_function_settings(config()).builtin_kwargs == {}
    assert reward_function_settings(config(f"{key}={value}")).builtin_kwargs == {
        "verl.rewards.scorers.code": DEFAULT | arguments
    }


@pytest.mark.parametrize("path", [None, "verl.rewards.scorers.code"])
@pytest.mark.parametrize("way", ["alone", "among several"])
async def test_sandbox_settings_reach_the_scorer_however_it_was_chosen(
    path: str | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Limits | None] = []

    def run(source: str, *, stdin: str, limits: Limits) -> ProgramResult:
        seen.append(limits)
        return ProgramResult("ok", 0, "1", "", 0.0)

    monkeypatch.setattr(sandbox, "run", run)
    monkeypatch.setattr(sandbox, "best_isolation", lambda: "namespaces")
    shipped = {"verl.rewards.scorers.code": {"limits": Limits(seconds=3), "partial": True}}
    functions = [{"path": path}] if way == "among several" else []
    reward = RewardFunction.load(
        RewardFunctionSettings(None if functions else path, functions=functions, builtin_kwargs=shipped)
    )
    score, _ = await reward.score("code", "print(1)", TWO_TESTS)
    assert (score, seen) == (0.5, [Limits(seconds=3)] * 2)


async def test_reward_kwargs_override_the_sandbox_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run", lambda *args, **kwargs: ProgramResult("ok", 0, "1", "", 0.0))
    monkeypatch.setattr(sandbox, "best_isolation", lambda: "namespaces")
    shipped = {"verl.rewards.scorers.code": {"partial": False}}
    reward = RewardFunction.load(
        RewardFunctionSettings("verl.rewards.scorers.code", kwargs={"partial": True}, builtin_kwargs=shipped)
    )
    assert (await reward.score("mine", "print(1)", TWO_TESTS))[0] == 0.5


async def test_programs_run_at_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []

    def run(source: str, *, url: str, stdin: str, limits: Limits) -> ProgramResult:
        urls.append(url)
        return ProgramResult("ok", 0, stdin, "", 0.0)

    monkeypatch.setattr(sandbox_fusion, "run", run)
    reward = RewardFunction.load(reward_function_settings(config("reward.sandbox.url=http://sandbox")))
    assert (await reward.score("code", "print(input())", TWO_TESTS))[0] == 1.0
    assert urls == ["http://sandbox"] * 2


@pytest.mark.parametrize(
    ("here", "require", "refused"),
    [
        ("bubblewrap", "bubblewrap", False),
        ("bubblewrap", "limits", False),
        ("namespaces", "bubblewrap", True),
        ("namespaces", "namespaces", False),
        ("limits", "namespaces", True),
        ("limits", "limits", False),
    ],
)
def test_a_machine_with_weaker_isolation_than_required_is_rejected_at_the_start(
    here: str, require: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "best_isolation", lambda: here)
    shipped = {"verl.rewards.scorers.code": {"require": require}}
    if not refused:
        load_function(None, shipped)
        return
    with pytest.raises(RewardError) as caught:
        load_function(None, shipped)
    assert f"reward.sandbox.require={require}" in str(caught.value)
    assert "install the package `bubblewrap`" in str(caught.value)
    assert f"set reward.sandbox.require={here}" in str(caught.value)
    with pytest.raises(RewardError):  # and so does the scorer itself, wherever it is called from
        code.compute_score("code", "print(1)", TWO_TESTS, require=require)


def test_code_is_not_scored_with_less_than_namespaces_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "best_isolation", lambda: "limits")
    load_function(None, {})  # whether rows are code is known when the data is read
    with pytest.raises(RewardError, match=r"require=namespaces: .*user_namespaces.*reward\.sandbox\.url"):
        load_function("verl.rewards.scorers.code", {})
    with pytest.raises(RewardError, match="require=namespaces"):
        code.compute_score("code", "print(1)", TWO_TESTS)
    code.check_requirements(require="limits")


def test_isolation_of_this_machine_does_not_matter_where_programs_run_elsewhere_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "best_isolation", lambda: "limits")
    load_function(None, {"verl.rewards.scorers.code": {"require": "bubblewrap", "sandbox_url": "http://sandbox"}})
    load_function("verl.rewards.scorers.exact_match", {"verl.rewards.scorers.code": {"require": "bubblewrap"}})


@pytest.mark.parametrize("key", ARGUMENTS)
def test_a_setting_is_ignored_with_a_custom_function(key: str) -> None:
    own = "reward.custom_reward_function.path"
    assert find_unmet_condition(config(), key) is None
    assert find_unmet_condition(config(f"{own}=verl.rewards.scorers.code"), key) is None
    assert find_unmet_condition(config("reward.functions=[{path: a.py}, {weight: 2}]"), key) is None
    assert find_unmet_condition(config("reward.functions=[{path: a.py}]"), key) is not None
    assert find_unmet_condition(config(f"{own}=my_reward.py"), key) is not None


def test_settings_that_a_remote_sandbox_ignores_are_named() -> None:
    url = "reward.sandbox.url=http://sandbox"
    ignored = {key for key in ARGUMENTS if find_unmet_condition(config(url), key) is not None}
    assert ignored == {"reward.sandbox.processes", "reward.sandbox.require"}
    [loaded] = load(["actor_rollout_ref.rollout.n=8", url, "reward.sandbox.processes=4"], complete=False)
    assert any("reward.sandbox.processes=4 has no effect: reward.sandbox.url is given" in hint for hint in loaded.hints)


def test_the_limit_of_a_program_must_be_below_the_timeout_of_its_scoring() -> None:
    with pytest.raises(ConfigError, match=r"sandbox.seconds: 90 must be below .*=60.*set reward.deadline_s=360"):
        config("reward.sandbox.seconds=90")
    config("reward.sandbox.seconds=90", "reward.deadline_s=360")
    config("reward.sandbox.seconds=90", "reward.custom_reward_function.path=my_reward.py")
    config("reward.deadline_s=5")
