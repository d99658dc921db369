"""Training with episodes of several turns, whose engine and whose worker are killed between two turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chat_bpe import bpe_tokenizer

from verl.demo.assets import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.rotating(0)]

AGENT = '''
import asyncio, os, signal
from pathlib import Path

import psutil

FOLDER = Path(__file__).parent


async def talk(task, model):
    """Three turns. Between them, one episode kills an engine, and another the worker that it runs in."""
    messages = list(task.messages)
    for turn in range(3):
        reply = await model.chat(messages, max_tokens=8)
        messages += [reply.message, {"role": "user", "content": "Go on."}]
        if turn == 1:
            harm(task.row["ground_truth"])
        await asyncio.sleep(0.2)
    return 1.0


def harm(what):
    if what not in ("engine", "worker"):
        return
    try:
        os.close(os.open(FOLDER / f"{what}.done", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if what == "worker":
        os.kill(os.getpid(), signal.SIGKILL)
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if process.info["cwd"] == str(FOLDER) and "VLLM::EngineCore" in " ".join(process.info["cmdline"] or ()):
            return process.kill()
'''


def test_a_killed_engine_or_episode_worker_loses_no_episode_of_several_turns(tmp_path: Path) -> None:
    """Validation, which is not disturbed, and two steps: the first starts again in a new worker."""
    tokenizer = bpe_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "talk.py").write_text(AGENT)
    for name, truths in (("train", ["worker", "a", "engine", "b"]), ("test", ["c", "d"])):
        prompt = [{"role": "user", "content": "Hello"}]
        rows = [{"data_source": "talk", "prompt": prompt, "reward_model": {"ground_truth": truth}} for truth in truths]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        f"data.val_files={tmp_path / 'test.jsonl'}",
        "data.train_batch_size=2",
        "data.shuffle=False",
        "data.max_prompt_length=32",
        "data.max_response_length=160",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path / 'talk.py'}:talk",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    command = [sys.executable, "-m", "verl", "train", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.glob("*.done")} == {"engine.done", "worker.done"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["reward/mean"] == 1.0 for line in steps), "no episode is scored 0 for the loss of a process"
    assert all(line["episode/turns"] == 3.0 for line in steps)
    assert steps[0]["faults/run_restarts"] == 1
    assert steps[-1]["faults/engine_restarts"] == 1
    assert [line["val/talk/mean@1"] for line in lines if "val/talk/mean@1" in line][:1] == [1.0]
