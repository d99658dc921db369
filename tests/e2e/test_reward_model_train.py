"""`verl train` with a reward model: alone and beside a function, in the policy's tokens and in its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from tests.fake_reward_model import FACTORY
from verl.cluster.device_pool import DevicePool
from verl.cluster.hangs.pending_calls import Timeout
from verl.cluster.session import connect, disconnect
from verl.demo.assets import make_tokenizer
from verl.demo.folder import Assets
from verl.errors import ProcessLostError
from verl.rewards.settings import RewardModelSettings
from verl.workers.rewards import RemoteRewardModel, RewardModelPool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over the policy's bytes, and a chat template of its own."""
    folder, tokenizer = tmp_path_factory.mktemp("reward-model"), make_tokenizer()
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
        initializer_range=0.1,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def train(assets: Assets, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    settings = [
        f"actor_rollout_ref.model.path={assets.model}",
        f"data.train_files={assets.train}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder}",
        "reward.reward_model.enable=True",
    ]
    command = [sys.executable, "-m", "verl", "train", *settings, *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def steps_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


@pytest.mark.rotating(4)
def test_a_model_alone_scores_what_it_reads_in_its_own_template(
    assets: Assets, reward_model: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "messages.parquet"
    messages = [[{"role": "user", "content": f"{number}+1="}] for number in range(10, 74)]
    pq.write_table(pa.table({"prompt": messages, "data_source": ["nobody/knows-it"] * len(messages)}), prompts)
    done = train(
        assets,
        tmp_path,
        f"data.train_files={prompts}",
        f"reward.reward_model.model_path={reward_model}",
        "reward.reward_model.replicas=2",
        "data.return_raw_input_ids=True",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = steps_of(tmp_path)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["reward/error_rate"] == step["reward/timeout_rate"] == 0 for step in steps)
    assert all(step["reward/std"] > 0 for step in steps), "responses get different scores"


@pytest.mark.rotating(5)
def test_a_model_beside_a_function_reads_the_policys_own_tokens(
    assets: Assets, reward_model: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own-template"
    own.mkdir()
    for file in reward_model.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    make_tokenizer().save_pretrained(own)  # the policy's, template and all
    reward = tmp_path / "my_reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 10\n")
    done = train(
        assets,
        tmp_path / "run",
        f"reward.reward_model.model_path={own}",
        "reward.reward_model.weight=0.5",
        f"reward.custom_reward_function.path={reward}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for step in steps_of(tmp_path / "run"):
        assert step["reward/extra/function_score"] == 10
        assert step["reward/mean"] == pytest.approx(10 + 0.5 * step["reward/extra/model_score"], abs=1e-4)


@pytest.mark.rotating(1)
async def test_what_a_process_that_dies_or_freezes_had_is_scored_again_and_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where the processes find the fake model
    connect({"num_cpus": 1})
    try:
        devices = DevicePool.reserve(1, "cpu", fix="")
        settings = RewardModelSettings(FACTORY, "", batch=4, deadline_s=60)
        models = [RemoteRewardModel.spawn(devices, number, settings, device=0, share=0.5) for number in (0, 1)]
        await asyncio.gather(*(model.start() for model in models))
        pool = RewardModelPool(models)
        assert await asyncio.gather(*(pool.score([number]) for number in range(8))) == [*range(8)]
        first = await process_of(models[0])
        os.kill(first, signal.SIGKILL)
        assert await asyncio.gather(*(pool.score([number]) for number in range(8))) == [*range(8)]
        while not await is_ready(models[0]):
            await asyncio.sleep(0.2)
        second = await process_of(models[0])
        assert second != first

        os.kill(second, signal.SIGSTOP)
        hasty = RewardModelPool(models[:1], heartbeat_s=1)
        models[0].timeouts = replace(models[0].timeouts, reply=Timeout(1))
        assert await asyncio.gather(*(hasty.score([number]) for number in range(8))) == [*range(8)]
        assert await process_of(models[0]) != second
    finally:
        disconnect()


async def process_of(model: RemoteRewardModel) -> int:
    return int(await model.actor.__ray_call__.remote(lambda _: os.getpid()))


async def is_ready(model: RemoteRewardModel) -> bool:
    try:
        return await model.is_ready()
    except ProcessLostError:
        return False


@pytest.mark.rotating(2)
def test_what_cannot_be_a_reward_model_here_ends_the_start_with_a_fix(
    assets: Assets, reward_model: Path, tmp_path: Path
) -> None:
    done = train(assets, tmp_path, f"reward.reward_model.model_path={reward_model}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "its chat template is not the policy's; set data.return_raw_input_ids=True" in done.stderr

    policy = tmp_path / "a-policy"
    Qwen2ForCausalLM.from_pretrained(assets.model).save_pretrained(policy)
    make_tokenizer().save_pretrained(policy)
    done = train(assets, tmp_path, f"reward.reward_model.model_path={policy}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "was saved as Qwen2ForCausalLM" in done.stderr
    assert "ray::" not in done.stderr
