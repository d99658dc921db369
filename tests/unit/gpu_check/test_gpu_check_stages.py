"""Stages of `verl gpu-check` without processes: healthy kernels pass, broken ones and steps that did nothing do not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from public_models import MODELS
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM

from verl.gpu_check import __main__, kernels, machine, runs
from verl.gpu_check.stage import CheckFailedError, Checks, Context, Result, StageSkipped, State
from verl.gpu_check.stages import STAGES, Stage
from verl.memory_plan.accelerators import DEVICES
from verl.training.kernels import compilation, logprobs

pytestmark = pytest.mark.unit


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("cpu", 0, tmp_path)


def test_every_stage_has_its_function() -> None:
    for stage in STAGES.values():
        assert callable(stage.load())


def test_a_check_fails_at_its_limit_and_for_nan() -> None:
    checks = Checks()
    checks.at_most("gap", 0.1, 0.1)
    for value in (0.2, float("nan"), float("inf")):
        with pytest.raises(CheckFailedError, match=r"gap: .*at most 0\.1 is allowed"):
            checks.at_most("gap", value, 0.1)
    with pytest.raises(CheckFailedError, match="freed: nan; at least 1 is expected"):
        checks.at_least("GiB", float("nan"), 1.0, "freed")
    assert checks.count == 5


def run_stage(function: Callable[..., Any], context: Context, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a stage as the process of it would."""
    monkeypatch.setattr(Stage, "load", lambda self: function)
    monkeypatch.setattr(__main__, "end_with_parent", lambda parent: None)
    given, found = context.folder / "given.json", context.folder / "found.json"
    given.write_text(json.dumps({"device": "cpu", "gpus": 0, "folder": str(context.folder)}))
    monkeypatch.setattr(sys, "argv", ["verl.gpu_check", "attention", str(given), str(found), "1"])
    __main__.main()
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def test_a_stage_that_checks_nothing_is_not_ok(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_stage(lambda context, checks: None, context, monkeypatch)
    assert (result["state"], result["text"]) == ("failed", "nothing was checked")


def test_a_stage_is_ok_skipped_or_failed(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(context: Context, checks: Checks) -> None:
        context.require_gpus(2)

    def fail(context: Context, checks: Checks) -> None:
        checks.require(True, "")
        raise KeyError("planted")

    good = run_stage(lambda context, checks: checks.at_most("gap", 0.5, 1.0), context, monkeypatch)
    assert good == {"state": "ok", "text": "1 check; gap 0.5", "checks": 1, "figures": {"gap": 0.5}}
    skipped = run_stage(skip, context, monkeypatch)
    assert (skipped["state"], skipped["text"]) == ("skipped", "needs 2 GPUs, this is a check of the CPU")
    failed = run_stage(fail, context, monkeypatch)
    assert (failed["state"], failed["text"]) == ("failed", "KeyError: 'planted'")


def test_packages_and_devices_are_checked(context: Context) -> None:
    checks = Checks()
    machine.check_versions(context, checks)
    assert checks.figures["matmul float32"] < 1e-5
    assert checks.count >= 3


def test_a_wrong_product_of_matrices_is_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, right: multiply(left, right) * 1.02)
    with pytest.raises(CheckFailedError, match=r"a product of matrices in float32 is wrong: 0\.0"):
        machine.check_versions(context, Checks())


def test_healthy_attention_passes(context: Context) -> None:
    checks = Checks()
    kernels.check_attention(context, checks)
    assert set(checks.figures) == {"forward", "dq", "dk", "dv", "shared prompts"}
    assert max(checks.figures.values()) < 5e-6


def ignore_window(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *qkv, window=None, **packing: attend(*qkv, **packing)


def cross_sequences(attend: Callable[..., Any]) -> Callable[..., Any]:
    def attend_as_one(*qkv: torch.Tensor, **packing: Any) -> torch.Tensor:
        runs = packing["runs"] if "prefixes" in packing else ((1, len(qkv[0])),)
        return attend(*qkv, **packing | {"runs": runs})

    return attend_as_one


def stop_key_gradient(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, **packing: attend(q, k + (k.detach() - k) * 0.01, v, **packing)


@pytest.mark.parametrize(
    ("breaking", "named"), [(ignore_window, "forward"), (cross_sequences, "forward"), (stop_key_gradient, "dk")]
)
def test_broken_attention_is_found(
    breaking: Callable[..., Any], named: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "attend_packed", breaking(kernels.attend_packed))
    with pytest.raises(CheckFailedError, match=f"{named}, differs from plain attention"):
        kernels.check_attention(context, Checks())


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes half a minute."""
    monkeypatch.setattr(kernels, "compiled_kernels", lambda device, dtype: (logprobs.PLAIN, None))


@pytest.mark.usefixtures("plain_kernels")
def test_healthy_logprobs_pass(context: Context) -> None:
    checks = Checks()
    kernels.check_logprobs(context, checks)
    assert max(checks.figures.values()) < 5e-6


def test_logprobs_that_cannot_be_compiled_or_are_wrong_are_found(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "compiled_kernels", lambda device, dtype: (logprobs.PLAIN, "no compiler"))
    with pytest.raises(CheckFailedError, match=r"cannot be compiled.*no compiler"):
        kernels.check_logprobs(context, Checks())
    half = logprobs.Kernels(logprobs.PLAIN.forward, lambda *args: logprobs.PLAIN.backward(*args) * 0.99)
    monkeypatch.setattr(kernels, "compiled_kernels", lambda device, dtype: (half, None))
    with pytest.raises(CheckFailedError, match="d hidden of the compiled kernel"):
        kernels.check_logprobs(context, Checks())


@pytest.fixture
def one_layer(tmp_path: Path) -> Iterator[Context]:
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(num_hidden_layers=1)).save_pretrained(tmp_path / "model")
    yield Context("cpu", 0, tmp_path, str(tmp_path / "model"))
    torch._dynamo.reset()


def test_layers_that_cannot_be_compiled_are_found(one_layer: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compilation, "BACKEND", fail)
    with pytest.raises(CheckFailedError, match=r"the layers run uncompiled.*no compiler"):
        kernels.check_layers(one_layer, Checks())


@pytest.mark.rotating(3)
def test_compiled_layers_pass_unless_they_are_wrong(one_layer: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    checks = Checks()
    kernels.check_layers(one_layer, checks)
    assert max(checks.figures[name] for name in ("log-probs", "loss", "gradient")) < 1e-6
    torch._dynamo.reset()

    def change(graph: Any, inputs: Any) -> Any:
        return lambda *args: [each * 1.02 if isinstance(each, torch.Tensor) else each for each in graph(*args)]

    monkeypatch.setattr(compilation, "BACKEND", change)
    with pytest.raises(CheckFailedError, match="log-probs of compiled layers differ from plain ones"):
        kernels.check_layers(one_layer, Checks())


def line(step: int, **changes: float) -> dict[str, Any]:
    names = ("timing_s/step", "actor/grad_norm", "weights/probe_gap", "weights/probe_tolerance", "reward/mean")
    return {"step": step, **dict.fromkeys(names, 1.0), "weights/version": step, **changes}


def test_complete_steps_pass() -> None:
    checks = Checks()
    learned = line(2, **{"actor/grad_norm": 0.0, "reward/groups_without_signal": 1.0})
    runs.check_steps([{"step": 0}, line(1), {"step": 1, "timing_s/save": 1.0}, learned], 2, checks)
    assert checks.count == 15


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"actor/grad_norm": 0.0}, "step 2: no gradient: actor/grad_norm is 0.0"),
        ({"actor/grad_norm": float("nan")}, "step 2: no gradient"),
        ({"weights/version": 1}, "step 2: the engines hold version 1 of the weights"),
        ({"weights/probe_gap": 2.0}, "step 2: the probe found 2, more than 1"),
        ({"weights/probe_gap": None}, "step 2: no weights/probe_gap"),
    ],
)
def test_a_broken_step_is_found(change: dict[str, float | None], problem: str) -> None:
    broken = {name: value for name, value in (line(2) | change).items() if value is not None}
    with pytest.raises(CheckFailedError, match=problem):
        runs.check_steps([line(1), broken, line(3)], 3, Checks())


def test_missing_steps_are_found() -> None:
    with pytest.raises(CheckFailedError, match=r"steps \[1, 2\] instead of 1 to 3"):
        runs.check_steps([line(1), line(2)], 3, Checks())


def learn(rewards: list[float], context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a run with these rewards, the last of which come after the resume."""
    monkeypatch.setattr(
        runs, "_train", lambda context, folder, steps, *rest: [
            line(step, **{"reward/mean": rewards[step - 1]}) for step in range(1, steps + 1)
        ]
    )  # fmt: skip
    runs.check_host(context, Checks())


def test_a_reward_that_does_not_rise_and_another_model_after_the_resume_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context("cpu", 0, tmp_path, steps=4)
    learn([0.1, 0.2, 0.3, 0.4, 0.4, 0.4], context, monkeypatch)
    with pytest.raises(CheckFailedError, match=r"the reward does not rise: 0\.100 at first, 0\.120 at last"):
        learn([0.1, 0.2, 0.1, 0.12, 0.4, 0.4], context, monkeypatch)
    with pytest.raises(CheckFailedError, match=r"the run resumed another model: reward 0\.100 after 0\.400"):
        learn([0.1, 0.2, 0.3, 0.4, 0.1, 0.1], context, monkeypatch)


@pytest.mark.parametrize("check", [runs.check_ipc, runs.check_nccl, runs.check_offload, runs.check_fp8])
def test_stages_of_gpus_are_skipped_on_the_cpu(check: Callable[..., None], context: Context) -> None:
    with pytest.raises(StageSkipped, match="GPU"):
        check(context, Checks())


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("check", [runs.check_host, runs.check_ipc, runs.check_nccl, runs.check_offload])
def test_settings_on_gpus_are_valid(
    check: Callable[..., None], gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of runs on GPUs, which no machine of CI has, up to where processes would start."""

    def load_only(trainer: Any) -> Any:
        (tmp_path / "run").mkdir()
        loaded = trainer._load(trainer.prompts, tmp_path / "run")
        rollout = loaded.config.actor_rollout_ref.rollout
        used = loaded.config.trainer.n_gpus_per_node
        assert used + (0 if loaded.config.actor_rollout_ref.hybrid_engine else rollout.n_gpus_per_node) == gpus
        raise StageSkipped("loaded")

    monkeypatch.setattr(runs.GRPOTrainer, "train", load_only)
    context = Context("cuda", gpus, tmp_path, str(tmp_path / "model"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODELS["Qwen2.5-0.5B"]))
    with pytest.raises(StageSkipped, match="loaded" if check is not runs.check_nccl or gpus > 1 else "needs 2 GPUs"):
        check(context, Checks())


@pytest.mark.parametrize(("gpus", "tried"), [(2, "ipc host"), (3, "ipc nccl host"), (8, "ipc nccl host")])
def test_engines_of_two_gpus_get_weights_in_all_ways_that_their_number_permits(
    gpus: int, tried: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports: list[str] = []

    def load_only(trainer: Any) -> Any:
        rollout = trainer._load(trainer.prompts, tmp_path).config.actor_rollout_ref.rollout
        assert rollout.tensor_model_parallel_size == 2
        transports.append(rollout.weight_transport)
        return SimpleNamespace(metrics=[])

    monkeypatch.setattr(runs.GRPOTrainer, "train", load_only)
    monkeypatch.setattr(runs, "check_steps", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen2.5-0.5B"]))
    runs.check_tensor_parallel(Context("cuda", gpus, tmp_path, str(tmp_path)), Checks())
    assert transports == tried.split()


def test_estimates_are_those_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen2.5-0.5B"]))
    one, eight = (runs.estimate(DEVICES["H100"], str(tmp_path), devices, {}) for devices in (1, 8))
    assert 4 < one["estimated GiB"] < 40
    assert eight["estimated GiB"] < one["estimated GiB"], "its weights and moments are sharded"
    assert eight["estimated tokens/s"] > one["estimated tokens/s"] > 0


def test_a_result_is_one_line() -> None:
    assert str(Result("engine", State.FAILED, "broken\nmore", 1.25)) == "failed  engine            1.2 s  broken"


def test_the_engine_stage_has_valid_settings_on_a_gpu(tmp_path: Path) -> None:
    from verl.gpu_check import engine

    config = engine._load_config(Context("cuda", 1, tmp_path, str(tmp_path)))
    assert config.actor_rollout_ref.rollout.free_cache_engine
