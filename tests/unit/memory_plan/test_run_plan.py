"""The memory of a run from its settings, what `verl plan` prints, and the note before a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from public_models import MODELS

from verl.cli import main
from verl.config.load import load
from verl.config.paths import change_settings
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.memory_plan.accelerators import GIB
from verl.memory_plan.run_plan import plan_memory
from verl.memory_plan.suggestions import memory_note, suggest_settings
from verl.trainer.build import preflight
from verl.trainer.build.worker_settings import train_settings

pytestmark = pytest.mark.unit
Load = Callable[..., Config]
_TOO_SMALL = "actor_rollout_ref.rollout.gpu_memory_utilization=0.3"  # for the weights of 14B


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., list[str]]:
    def make(model: str, *settings: str) -> list[str]:
        file = tmp_path / f"{model}.json"
        file.write_text(json.dumps(MODELS[model]))
        return [f"actor_rollout_ref.model.path={file}", *settings]

    return make


@pytest.fixture
def config(arguments: Callable[..., list[str]]) -> Load:
    return lambda model, *settings: load(arguments(model, *settings), complete=False)[0].config


def test_models_and_sizes_follow_from_the_settings(config: Load) -> None:
    run = plan_memory(
        config("Qwen2.5-7B", "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True"), train_settings
    )
    assert list(run.models) == ["actor", "critic", "reference"]
    actor = run.models["actor"]
    assert actor.update is not None
    assert (actor.ranks, actor.update.tokens, actor.update.trained, actor.micro_batches) == (8, 8192, 4096, 4)
    assert actor.settings.compute_dtype == "bfloat16"
    assert run.models["critic"].shape.has_value_head


def test_a_limit_of_tokens_is_at_least_a_sequence(config: Load) -> None:
    dynamic = ("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256")
    update = plan_memory(config("Qwen2.5-7B", *dynamic), train_settings).models["actor"].update
    assert update is not None
    assert update.tokens == 1024


def test_7b_fits_at_the_defaults_and_larger_models_with_the_proposed_settings(config: Load) -> None:
    memory = 80 * GIB
    assert plan_memory(config("Qwen2.5-7B"), train_settings).problems(memory) == {}
    for model, nodes in (("Qwen2.5-14B", 1), ("Qwen2.5-32B", 4), ("Qwen2.5-72B", 8)):
        settings = config(model, f"trainer.nnodes={nodes}")
        changes = suggest_settings(settings, memory, train_settings)
        values = {key: value for change in changes for key, value in change.values.items()}
        assert plan_memory(change_settings(settings, values), train_settings).problems(memory) == {}


def test_a_memory_note_names_the_phase_and_the_fix(config: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config("Qwen2.5-14B", _TOO_SMALL)
    assert memory_note(config("Qwen2.5-7B"), 80 * GIB, train_settings) is None
    note = memory_note(settings, 80 * GIB, train_settings)
    assert note is not None
    assert "by estimate, this run does not fit into the 80 GiB of a device: " in note
    assert "generation: the engine has no memory left for its cache after 27.5 GiB of weights" in note
    assert "it fits with actor_rollout_ref." in note
    monkeypatch.setattr(preflight, "read_device_memory", lambda: 80 * GIB)
    assert preflight.memory_notes(settings, "cuda") == [note]
    assert preflight.memory_notes(settings, "cpu") == []
    monkeypatch.setattr(preflight, "read_device_memory", lambda: None)
    assert preflight.memory_notes(settings, "cuda") == []


def test_a_model_that_is_not_here_gives_no_note_but_an_error_of_the_command(config: Load) -> None:
    settings = load(["actor_rollout_ref.model.path=org/model"], complete=False)[0].config
    assert memory_note(settings, 80 * GIB, train_settings) is None
    with pytest.raises(ConfigError, match=r"org/model: its config.json is not on this machine; download it"):
        plan_memory(settings, train_settings)


def test_the_plan_is_printed(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "8", *arguments("Qwen2.5-7B")]) == 0
    text = capsys.readouterr().out
    assert "7.62 billion parameters, on 8 H100 with 80 GiB" in text
    assert "Every phase fits." in text
    assert "estimated from operations and bytes" in text
    assert main(["plan", "--gpus", "8", *arguments("Qwen2.5-14B", _TOO_SMALL)]) == 0
    text = capsys.readouterr().out
    assert "It does not fit:" in text
    assert "It fits with:\n  actor_rollout_ref." in text
    assert main(["plan", "--gpus", "2", "--memory", "16", *arguments("Qwen2.5-72B")]) == 1
    assert "No settings make it fit" in capsys.readouterr().out


def test_the_plan_as_json(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--nodes", "2", "--device", "MI300X", *arguments("Qwen3-30B-A3B")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == report["changes"] == {}
    assert set(report["memory"]["update"]) >= {"weights", "gradients", "moments", "activations", "kv cache"}
    assert set(report["seconds"]) == {"generation", "log-probs", "update", "weight sync", "save"}
