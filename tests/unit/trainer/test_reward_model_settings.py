"""Settings of a reward model reach its replicas and their clients; problems are reported at the start."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config.load import load_dict
from verl.config.schema.root import Config
from verl.data.dataset import DatasetSettings
from verl.errors import ConfigError
from verl.rewards.settings import RewardModelSettings
from verl.rollout.engine import EngineView
from verl.rollout.vllm.reward_model import VllmRewardModel
from verl.trainer.build.preflight import check_files
from verl.trainer.build.worker_settings import episode_settings, reward_model_settings
from verl.workers import episodes
from verl.workers.rewards import _make_model

pytestmark = pytest.mark.unit

MODEL = ("reward.reward_model.enable=True", "reward.reward_model.model_path=my-org/rm")
DATA: dict[str, DatasetSettings] = {}


def config_of(*overrides: str) -> Config:
    required = ("actor_rollout_ref.model.path=policy", "data.train_files=prompts.parquet")
    return load_dict({}, [*required, *overrides]).config


async def build_scorer(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """Build the scorer of an episode worker; return it, and the calls that built its parts."""
    calls: dict[str, Any] = {}

    def record(name: str, result: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = (*args, kwargs)
            return result

        monkeypatch.setattr(episodes, name, call)

    record("load_tokenizer", "tokenizer")
    record("build_encoder", "encode")
    record("RewardModelPool", SimpleNamespace(score=None))
    record("open_rewards", SimpleNamespace(start=lambda: asyncio.sleep(0)))
    for name in ("score_by_function", "score_by_model", "weighted_sum"):
        record(name, name)
    worker = episodes.EpisodeWorker(episode_settings(config, DATA, 1), EngineView.of([]))
    worker._datasets = {"train": ["example"]}  # type: ignore[dict-item]
    return await worker._build_scorer(cast("Any", "policy")), calls


async def test_a_model_alone_is_the_reward_and_no_function_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, calls = await build_scorer(config_of(*MODEL), monkeypatch)
    assert scorer == "score_by_model"
    assert "open_rewards" not in calls
    assert calls["load_tokenizer"] == ("my-org/rm", {"trust_remote_code": False})
    assert calls["build_encoder"][-1] == {"model_path": "my-org/rm", "retokenize": False}


@pytest.mark.parametrize("function", ["reward.custom_reward_function.path=r.py", "reward.functions=[{path: r.py}]"])
async def test_beside_a_function_the_model_has_its_weight(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = (function, "reward.reward_model.weight=0.5", "data.return_raw_input_ids=True")
    scorer, calls = await build_scorer(config_of(*MODEL, *overrides), monkeypatch)
    assert scorer == "weighted_sum"
    assert calls["weighted_sum"][:-1] == ("score_by_function", "score_by_model", 0.5)
    assert calls["build_encoder"][-1]["retokenize"] is True


async def test_without_a_model_a_function_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, calls = await build_scorer(config_of(), monkeypatch)
    assert scorer == "score_by_function"
    assert "build_encoder" not in calls


def test_reward_model_clients_know_its_batch_size_and_timeout() -> None:
    config = config_of(*MODEL, "reward.reward_model.micro_batch_size_per_gpu=4", "reward.deadline_s=7")
    settings = reward_model_settings(config, "cuda", 0)
    assert settings == RewardModelSettings(
        "verl.rewards.models.hf:HfRewardModel", "my-org/rm", 4, 7, "bfloat16", "cuda", trust_remote_code=False
    )


def test_vllm_is_told_its_share_of_the_device_and_its_core() -> None:
    overrides = ("reward.reward_model.rollout.name=vllm", "reward.reward_model.rollout.gpu_memory_utilization=0.3")
    settings = reward_model_settings(config_of(*MODEL, *overrides), "cpu", 0)
    model = _make_model(settings)
    assert isinstance(model, VllmRewardModel)
    made = model._settings
    assert (made.model_path, made.device, made.trust_remote_code) == ("my-org/rm", "cpu", False)
    assert (made.load_format, made.max_num_seqs, made.gpu_memory_utilization) == ("auto", 16, 0.3)
    assert made.cpu_cores == str((os.cpu_count() or 1) - 1)


def test_a_missing_reward_model_is_reported_at_once(tmp_path: Path) -> None:
    policy, prompts = tmp_path / "policy", tmp_path / "prompts.parquet"
    policy.mkdir()
    pq.write_table(pa.table({"prompt": ["1+1="]}), prompts)
    files = (f"actor_rollout_ref.model.path={policy}", f"data.train_files={prompts}")
    path = f"reward.reward_model.model_path={tmp_path / 'rm'}"
    check_files(config_of(*files, path))  # it is not enabled
    with pytest.raises(ConfigError, match=r"reward\.reward_model\.model_path=.*there is no such directory"):
        check_files(config_of(*files, path, "reward.reward_model.enable=True"))


def test_all_missing_models_and_files_are_reported_at_once_with_what_exists(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    wrong = {
        "actor_rollout_ref.model.path": f"{tmp_path}/polcy",
        "critic.model.path": f"{tmp_path}/critic",
        "reward.prime.model_path": f"{tmp_path}/nowhere/at/all",
    }
    paths = [f"{key}={path}" for key, path in wrong.items()]
    config = config_of(*paths, "algorithm.adv_estimator=gae", "data.train_files=missing.parquet")
    with pytest.raises(ConfigError) as found:
        check_files(config)
    actor, critic, files = str(found.value).splitlines()[1:]  # the process reward model is not enabled
    assert f"set actor_rollout_ref.model.path={tmp_path}/policy" in actor
    assert (
        f"critic.model.path={tmp_path}/critic: there is no such directory; {tmp_path} contains: policy/; set" in critic
    )
    assert "missing.parquet does not exist" in files
