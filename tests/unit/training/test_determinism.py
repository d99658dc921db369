"""Train workers on accelerators use torch's deterministic mode, from before their first operation to their end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from verl.config.load import load_dict
from verl.errors import ConfigError
from verl.rollout.vllm.reward_model import VllmRewardModel
from verl.rollout.vllm.settings import VllmSettings
from verl.trainer.build import preflight
from verl.trainer.build.preflight import check_determinism
from verl.trainer.build.worker_settings import reward_model_settings, train_settings
from verl.training import process_group
from verl.training.fsdp.settings import FsdpSettings
from verl.workers.train import BaseTrainWorker
from verl.workers.train_settings import RankSettings

pytestmark = pytest.mark.unit

REQUIRED = ("actor_rollout_ref.model.path=policy", "data.train_files=prompts.parquet", "trainer.deterministic=true")


@pytest.fixture
def _no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(process_group, "init_process_group", lambda *arguments: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_no_group")
@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_worker_is_deterministic_until_it_leaves(is_wanted: bool) -> None:
    worker = BaseTrainWorker(0, 1)
    worker.leave()  # before it has joined
    worker.join(("127.0.0.1", 0), RankSettings(actor=FsdpSettings("model"), deterministic=is_wanted))
    assert torch.are_deterministic_algorithms_enabled() is is_wanted
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if is_wanted else None)
    worker.leave()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("_no_group")
def test_a_workspace_of_the_user_is_kept_and_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    settings = RankSettings(actor=FsdpSettings("model"), deterministic=True)
    BaseTrainWorker(0, 1).join(("127.0.0.1", 0), settings)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    with pytest.raises(ConfigError, match=r"has 7\.0"):
        BaseTrainWorker(0, 1).join(("127.0.0.1", 0), settings)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_makes_workers_deterministic_depends_on_the_device(device: str) -> None:
    config = load_dict({}, [*REQUIRED, "reward.reward_model.enable=true", "reward.reward_model.model_path=rm"]).config
    is_gpu = device == "cuda"
    assert train_settings(config, 10, device).deterministic is is_gpu
    assert VllmSettings.from_config(config, device, 0).batch_invariant is is_gpu
    reward_model = VllmRewardModel(reward_model_settings(config, device, 0))
    assert reward_model._settings.batch_invariant is is_gpu
    assert reward_model._arguments.get("enable_prefix_caching") is (None if is_gpu else False)


def test_the_gpus_of_this_machine_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_dict({}, [*REQUIRED]).config
    monkeypatch.setattr(preflight, "query_gpus", lambda field: {"compute_cap": ["8.0", "7.5"]}[field])
    check_determinism(config, "cpu")
    with pytest.raises(ConfigError, match=r"has 7\.5"):
        check_determinism(config, "cuda")
    for readable in (["9.0"], [], ["[N/A]"]):  # nvidia-smi may be missing, or too old to know
        monkeypatch.setattr(preflight, "query_gpus", lambda field, lines=readable: lines)
        check_determinism(config, "cuda")
