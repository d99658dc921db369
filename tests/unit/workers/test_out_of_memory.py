"""A train worker that runs out of memory names the settings that help."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from verl.cluster.local import LocalPool
from verl.config.load import load_dict
from verl.errors import EngineError, ProcessLostError
from verl.memory_plan.out_of_memory import rl_memory_advice
from verl.sft.builder import rank_settings as sft_settings
from verl.sft.worker import SFTWorker
from verl.trainer.build.worker_settings import train_settings
from verl.workers.train import PolicyGroup, TrainWorker

pytestmark = pytest.mark.unit

REQUIRED = ("actor_rollout_ref.model.path=policy", "data.train_files=prompts.parquet", "actor_rollout_ref.rollout.n=8")


class FullEngine:
    """An engine, or whatever uses one, on a device without free memory."""

    def __getattr__(self, name: str) -> Any:
        def fails(*_: Any) -> NoReturn:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore about the allocator")

        return fails


def full_worker(*overrides: str) -> TrainWorker:
    worker = TrainWorker(3, 4)
    worker._settings = train_settings(load_dict({}, [*REQUIRED, *overrides]).config, 10, "cuda")
    worker._policy = FullEngine()  # type: ignore[assignment]
    worker._plan = None  # type: ignore[assignment]
    return worker


def test_the_message_names_settings_their_values_and_the_worker() -> None:
    sizes = ("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384")
    with pytest.raises(EngineError) as raised:
        full_worker(*sizes).update()
    message = str(raised.value)
    assert message.startswith(
        "train worker 3: update: out of device memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    assert "Decrease actor_rollout_ref.actor.ppo_max_token_len_per_gpu (now 16384)" in message
    assert "actor_rollout_ref.model.logprob_chunk_size (now 4096)" in message
    assert "actor_rollout_ref.rollout.gpu_memory_utilization (now 0" in message
    assert "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True" in message
    assert "critic" not in message
    assert not isinstance(raised.value, ProcessLostError), "a restart would run out of memory again"


def test_only_settings_that_can_still_help_are_named() -> None:
    section = "actor_rollout_ref.actor.fsdp_config"
    overrides = [*REQUIRED, f"{section}.param_offload=True", "actor_rollout_ref.actor.use_dynamic_bsz=False"]
    advice = rl_memory_advice(load_dict({}, [*overrides, "algorithm.adv_estimator=gae"]).config)
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu" in advice
    assert "ppo_max_token_len_per_gpu" not in advice
    assert f"{section}.param_offload" not in advice
    assert "critic.ppo_micro_batch_size_per_gpu" in advice


async def test_the_error_reaches_the_controller_unchanged() -> None:
    actor = LocalPool().spawn(lambda: full_worker())  # type: ignore[arg-type]
    group = PolicyGroup([actor])
    with pytest.raises(EngineError, match="Decrease actor_rollout_ref"):
        await group.compute_logprobs([[1, 2]])


def test_supervised_fine_tuning_names_its_own_settings() -> None:
    from verl.config.load import load_sft

    config = load_sft(["data.train_files=a.parquet", "model.path=some/model"])[0].config
    worker = SFTWorker(0, 1)
    worker._settings = sft_settings(config, 10, "cuda")
    worker._model = FullEngine()  # type: ignore[assignment]
    with pytest.raises(EngineError, match=r"Decrease data\.(max_token_len|micro_batch_size)_per_gpu \(now \d+\)"):
        worker.loss(None)  # type: ignore[arg-type]
