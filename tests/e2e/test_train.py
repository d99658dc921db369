"""`verl train` as a user meets it: real Ray and FSDP2 in every test, real vLLM in the first."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import working_in
from tiny import save_family
from transformers import AutoTokenizer

from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.demo.folder import Assets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def command(assets: Assets, folder: Path, *overrides: str) -> list[str]:
    settings = [
        f"actor_rollout_ref.model.path={assets.model}",
        f"data.train_files={assets.train}",
        f"data.val_files={assets.test}",
        "data.val_max_samples=16",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder}",
    ]
    return [sys.executable, "-m", "verl", "train", *settings, *overrides]


def run(assets: Assets, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(assets, folder, *overrides), capture_output=True, text=True, timeout=900)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def start(assets: Assets, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(assets, folder, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a process in the background ignores it
    )


def wait_for_step(process: subprocess.Popen[str], step: int) -> str:
    """Read until the line of a step is printed; what was read."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step") and int(line.split("/")[0].split()[-1]) >= step:
            return output
    raise AssertionError(output)


@pytest.fixture(scope="module")
def mixture(assets: Assets) -> str:
    """A tiny mixture of experts with the tokenizer of the other model."""
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    folder = save_family("Qwen3-MoE", assets.folder / "mixture", num_experts=8, norm_topk_prob=True, **tokens)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_run_with_vllm_saves_on_sigterm_and_resumes(assets: Assets, mixture: str, tmp_path: Path) -> None:
    """On 2 ranks, with vLLM's own experts (R3); resumed with transformers, which does not return any."""
    settings = (
        f"actor_rollout_ref.model.path={mixture}",
        "actor_rollout_ref.actor.router_replay.mode=R3",
        "actor_rollout_ref.actor.router_aux_loss_coef=0.01",
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "trainer.max_ckpts_to_keep=1",
    )
    process = start(assets, tmp_path, *settings, "trainer.total_training_steps=1000")
    output = wait_for_step(process, 2)
    os.kill(process.pid, signal.SIGTERM)
    rest, errors = process.communicate(timeout=900)
    assert process.returncode == 143, errors
    saved = CheckpointDir(tmp_path)
    [step] = saved.steps()
    assert find_corruption(saved.step_dir(step)) == []
    assert f"asked to stop (SIGTERM): saved and stopped after step {step}" in output + rest
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(step)
    assert (tmp_path / f"global_step_{step}" / "actor").is_dir()

    last = step + 1
    other = ("rollout.name=hf", "actor_rollout_ref.actor.router_replay.mode=R2")
    again = run(assets, tmp_path, *settings, f"trainer.total_training_steps={last}", *other)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"continuing with step {last}" in again.stdout
    assert [path.name for path in tmp_path.glob("global_step_*")] == [f"global_step_{last}"]
    steps = [line for line in metrics_of(tmp_path) if "reward/mean" in line]
    assert [line["step"] for line in steps] == list(range(1, last + 1))
    assert [line["weights/version"] for line in steps] == list(range(1, last + 1))
    assert all(line["training/rollout_logprobs_diff_max"] < 1e-4 for line in steps)
    assert all(line["actor/router_aux_loss"] > 0 for line in steps)
    assert sum("val/addition/mean@1" in line for line in metrics_of(tmp_path)) >= step + 1


@pytest.mark.rotating(3)
def test_a_reward_that_raises_ends_the_run_with_the_users_own_traceback(assets: Assets, tmp_path: Path) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1 / 0\n"
    )
    done = run(
        assets,
        tmp_path / "run",
        f"reward.custom_reward_function.path={reward}",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.val_before_train=False",
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "my_reward.py" in done.stderr
    assert "ray::" not in done.stderr, "our own errors come without Ray's wrapping"


@pytest.mark.rotating(1)
def test_streamed_files_with_weights_train_full_batches_and_resume(assets: Assets, tmp_path: Path) -> None:
    rows = pq.read_table(assets.train).slice(0, 40)
    long = rows.set_column(rows.column_names.index("prompt"), "prompt", pa.array(["1+" * 20] * 40))
    pq.write_table(rows, tmp_path / "short.parquet", row_group_size=8)
    pq.write_table(
        pa.concat_tables([rows.slice(0, 20), long], promote_options="permissive"), tmp_path / "mixed.parquet"
    )
    settings = (
        f"data.train_files=[{tmp_path}/short.parquet,{tmp_path}/mixed.parquet]",
        "data.train_weights=[1,3]",
        "data.streaming=True",
        "data.filter_overlong_prompts=True",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.val_before_train=False",
        "trainer.save_freq=1",
    )
    first = run(assets, tmp_path / "run", *settings, "trainer.profile.steps=[2]")
    assert first.returncode == 0, first.stdout + first.stderr
    [trace] = (tmp_path / "run" / "profiles").rglob("*.*")
    assert trace.relative_to(tmp_path).as_posix() == "run/profiles/global_step_2/trace_rank_0.json.gz"
    assert b'"actor update"' in gzip.decompress(trace.read_bytes())
    assert "2 files: 100 rows, streamed" in first.stdout
    assert "are longer than data.max_prompt_length and were dropped" in first.stdout
    again = run(assets, tmp_path / "run", *settings, "trainer.total_training_steps=3", "trainer.local=True")
    assert again.returncode == 0, again.stdout + again.stderr
    steps = [line for line in metrics_of(tmp_path / "run") if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["plan/groups"] for line in steps] == [8, 8, 8], "others took the places of those left out"
    places = [
        json.loads((tmp_path / "run" / f"global_step_{step}" / "trainer.json").read_text())["data"]["position"]
        for step in (1, 2, 3)
    ]
    dropped = [line.get("data/prompts_dropped", 0) for line in steps]
    assert sum(dropped) > 0
    assert [place - 8 * (step + 1) for step, place in enumerate(places)] == [sum(dropped[: n + 1]) for n in range(3)]


@pytest.mark.rotating(0)
def test_an_interrupted_run_ends_with_all_its_processes_and_saves_nothing(assets: Assets, tmp_path: Path) -> None:
    process = start(assets, tmp_path, "actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=1000")
    wait_for_step(process, 1)
    assert any("ray::" in " ".join(one.info["cmdline"]) for one in working_in(tmp_path)), "else leftovers are not seen"
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 130, errors
    assert errors.strip().splitlines()[-1] == "interrupted"
    assert CheckpointDir(tmp_path).steps() == []


@pytest.mark.rotating(2)
def test_more_ranks_than_the_machine_has_are_refused_with_a_fix(assets: Assets, tmp_path: Path) -> None:
    done = run(assets, tmp_path, "trainer.n_gpus_per_node=512", "trainer.deadlines.devices=100000")  # no wait
    assert done.returncode == 2, done.stdout + done.stderr
    assert "trainer.n_gpus_per_node" in done.stderr
