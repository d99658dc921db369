"""The memory of a run from its settings, what `verl plan` prints, and the note before a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from public_models import MODELS

from verl.cli import main
from verl.config.batch_sizes import get_actor_batch_sizes
from verl.config.load import load
from verl.config.paths import change_settings
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.memory_plan import suggestions
from verl.memory_plan.accelerators import GIB, assume_device
from verl.memory_plan.run_plan import plan_memory
from verl.memory_plan.suggestions import Suggestion, memory_note, rank_suggestions, suggest_settings
from verl.trainer.build import preflight
from verl.trainer.build.worker_settings import train_settings
from verl.workers.train_settings import TrainSettings

pytestmark = pytest.mark.unit
Load = Callable[..., Config]
_WIDTH = "actor_rollout_ref.rollout.tensor_model_parallel_size"
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
    assert (actor.ranks, actor.update.tokens, actor.update.trained, actor.micro_batches) == (8, 16384, 8192, 2)
    assert actor.settings.compute_dtype == "bfloat16"
    assert run.models["critic"].shape.has_value_head


def test_a_given_number_of_samples_limits_a_pass_and_what_is_proposed(config: Load) -> None:
    settings = config("Qwen2.5-32B", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "trainer.nnodes=4")
    update = plan_memory(settings, train_settings).models["actor"].update
    assert update is not None
    assert update.tokens == 8192
    is_tried: list[str] = []

    def build(config: Config, steps: int, device: str) -> TrainSettings:
        sizes = get_actor_batch_sizes(config)
        is_tried.append("samples" if sizes.micro_batch_tokens is None else "tokens")
        if (sizes.micro_batch_samples or 8) < 8 or (sizes.micro_batch_tokens or 16384) < 16384:
            is_tried.append("less")
        return train_settings(config, steps, device)

    for each, kind in ((settings, "samples"), (config("Qwen2.5-32B", "trainer.nnodes=4"), "tokens")):
        rank_suggestions(each, assume_device(20 * GIB), build)
        assert set(is_tried) == {kind, "less"}
        is_tried.clear()


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
        changes = suggest_settings(settings, assume_device(memory), train_settings)
        values = {key: value for change in changes for key, value in change.values.items()}
        assert plan_memory(change_settings(settings, values), train_settings).problems(memory) == {}


def rank(config: Config, gib: int = 80) -> list[Suggestion]:
    return rank_suggestions(config, assume_device(gib * GIB), train_settings)


def test_the_fastest_width_of_engines_is_proposed(config: Load) -> None:
    best, *others = rank(config("Qwen2.5-32B", "trainer.nnodes=4", "data.max_response_length=8192"))
    seconds = {each.values[_WIDTH]: each.seconds for each in (best, *others)}
    assert best.seconds == min(seconds.values())
    assert seconds[2] > 1.5 * best.seconds  # it fits, too


def test_the_narrowest_of_about_equally_fast_engines_is_proposed(config: Load) -> None:
    best, *others = rank(config("Qwen2.5-32B", "trainer.nnodes=4"))
    assert best.values == {_WIDTH: 4}
    wide = next(each for each in others if each.values == {_WIDTH: 8})
    assert wide.seconds < best.seconds < 1.05 * wide.seconds


def test_other_settings_change_only_as_far_as_needed(config: Load) -> None:
    assert rank(config("Qwen2.5-7B", "actor_rollout_ref.rollout.gpu_memory_utilization=0.8"))[0].values == {
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.7
    }
    critic = config(
        "Qwen2.5-32B",
        "trainer.nnodes=4",
        "algorithm.adv_estimator=gae",
        "critic.model.enable_gradient_checkpointing=False",
    )
    assert rank(critic)[0].values == {_WIDTH: 4, "critic.model.enable_gradient_checkpointing": True}


def test_an_optimizer_on_the_cpu_is_the_last_resort(config: Load) -> None:
    policy = "actor_rollout_ref.actor.fsdp_config.offload_policy"
    run = config("Qwen2.5-32B")
    assert all(policy not in each.values for each in rank(run))
    assert rank(run, gib=40)[0].values[policy] is True


def test_engines_have_as_many_devices_as_the_heads_permit(config: Load) -> None:
    widths = [each.values.get(_WIDTH, 1) for each in rank(config("Qwen2.5-7B"))]
    assert sorted(widths) == [1, 2, 4]  # 28 heads
    own = config("Qwen2.5-7B", "actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1", "rollout.n_gpus_per_node=8")
    assert [each.values for each in rank(own)] == [{}]


def test_few_plans_are_made_to_find_the_best(config: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(suggestions, "plan_memory", lambda *given: made.append(given) or plan_memory(*given))  # type: ignore[func-returns-value]
    rank(config("Qwen2.5-72B", "trainer.nnodes=4", "data.max_response_length=16384"))
    assert len(made) < 500


def test_smaller_chunks_of_logits_are_the_first_proposal(config: Load) -> None:
    assert rank(config("Qwen2.5-0.5B"), gib=10)[0].values == {"actor_rollout_ref.model.logprob_chunk_size": 1024}


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
    assert "  s/step   GiB  settings\n" in text
    assert main(["plan", "--gpus", "2", "--memory", "16", *arguments("Qwen2.5-72B")]) == 1
    assert "No settings make it fit" in capsys.readouterr().out


def test_a_much_faster_width_is_named_although_the_run_fits(
    arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    faster = "times faster with:"
    assert main(["plan", *arguments("Qwen2.5-7B")]) == 0
    assert faster not in capsys.readouterr().out
    one = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    assert main(["plan", *arguments("Qwen2.5-7B", "data.max_response_length=30000", one)]) == 0
    text = capsys.readouterr().out
    assert "Every phase fits." in text
    assert f"{faster}\n  {_WIDTH}=4  (now 1; one engine per 4 devices)" in text
    assert "  as set\n" in text


def test_the_plan_as_json(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--nodes", "2", "--device", "MI300X", *arguments("Qwen3-30B-A3B")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == report["changes"] == {}
    assert set(report["memory"]["update"]) >= {"weights", "gradients", "moments", "activations", "kv cache"}
    assert {} in [each["changes"] for each in report["ranking"]]
    assert set(report["ranking"][0]) == {"changes", "seconds", "memory"}
    assert set(report["seconds"]) == {"generation", "log-probs", "update", "weight sync", "save"}
