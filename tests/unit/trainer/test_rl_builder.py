"""Building a run: a failure at any stage closes what has started, in reverse order, and nothing else."""

from __future__ import annotations

import gc
import shutil
import warnings
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from recording_console import RecordingConsole
from tiny import tiny_qwen2

from verl.cluster.local import LocalPool
from verl.config.load import load_dict
from verl.config.schema import Config
from verl.errors import ConfigError, DataError, RewardError
from verl.models.model_folder import require_config
from verl.models.model_shape import ModelShape
from verl.tracking.console import Console
from verl.trainer.build import rl_builder
from verl.trainer.build.preflight import (
    check_files,
    check_rl_run,
    estimate_checkpoint_bytes,
    find_folder_problems,
)
from verl.trainer.build.rl_builder import RLBuilder, build_trainer
from verl.trainer.build.runtime import RunBuilder
from verl.trainer.restarts import RestartTracker

pytestmark = pytest.mark.unit


def config_of(*overrides: str) -> Config:
    required = ("actor_rollout_ref.model.path=policy", "data.train_files=prompts.parquet", "trainer.local=True")
    return load_dict({}, [*required, *overrides]).config


class Part:
    """An engine or a group of workers; `closed` lists those that were closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self.closed = name, closed

    async def start(self) -> None: ...


class Engine(Part):
    async def close(self) -> None:
        self.closed.append(self.name)


class Workers(Part):
    def close(self) -> None:
        self.closed.append(self.name)


async def test_a_failing_start_closes_what_has_started_and_leaves_no_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def start_runtime(builder: RunBuilder[Config]) -> None:
        builder.pool, builder.device = LocalPool(), "cpu"
        builder._closing.callback(closed.append, "runtime")

    def fails(config: Config) -> NoReturn:
        raise DataError("a row is wrong")

    monkeypatch.setattr(RunBuilder, "start_runtime", start_runtime)
    monkeypatch.setattr(rl_builder.EnginePlacer, "spawn_first", lambda _: [Engine("engine", closed)])
    monkeypatch.setattr(rl_builder, "place_reward_models", lambda *_: [Engine("reward model", closed)])
    monkeypatch.setattr(rl_builder.PolicyGroup, "spawn", lambda *_, **__: Workers("train workers", closed))
    monkeypatch.setattr(rl_builder, "read_data", fails)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(DataError, match="a row is wrong"):
            async with build_trainer(config_of(), Console()):
                pytest.fail("it must not be built")
        gc.collect()
    assert [str(warning.message) for warning in caught if "never awaited" in str(warning.message)] == []
    assert closed == ["engine", "reward model", "train workers", "runtime"]


@pytest.mark.parametrize(
    ("given", "device", "is_dynamic"),
    [
        ((), "cuda", True),
        ((), "cpu", False),
        (("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",), "cuda", False),
    ],
)
async def test_what_limits_micro_batches_is_resolved_with_the_device_and_hints_follow(
    given: tuple[str, ...], device: str, is_dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_runtime(builder: RunBuilder[Config]) -> None:
        builder.device = device

    def stop(config: Config, device: str) -> NoReturn:
        raise DataError("stopped")

    monkeypatch.setattr(RunBuilder, "start_runtime", start_runtime)
    monkeypatch.setattr(rl_builder, "check_determinism", stop)
    console = RecordingConsole()
    config = config_of("data.max_response_length=20000", *given)
    builder = RLBuilder(config, console, RestartTracker(console), AsyncExitStack())
    with pytest.raises(DataError, match="stopped"):
        await builder.build()
    assert builder.config.actor_rollout_ref.actor.use_dynamic_bsz is is_dynamic
    assert builder.given.actor_rollout_ref.actor.use_dynamic_bsz is config.actor_rollout_ref.actor.use_dynamic_bsz
    data: Any = SimpleNamespace(order=SimpleNamespace(length=1000))
    builder.build_schedule(data)
    assert any("16384 is less than the longest sequence" in text for text in console.messages) == is_dynamic


async def test_problems_of_models_files_and_the_reward_function_are_reported_in_one_error(tmp_path: Any) -> None:
    config = config_of(
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        f"trainer.default_local_dir={tmp_path}/file/run",
    )
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as raised:
        await check_rl_run(config)
    model, train, val, folder, reward = raised.value.problems
    assert f"actor_rollout_ref.model.path={tmp_path}/model: there is no such directory" in model
    assert f"{tmp_path}/train.parquet does not exist" in train
    assert f"{tmp_path}/val.parquet does not exist" in val
    assert f"trainer.default_local_dir={tmp_path}/file/run: cannot be written" in folder
    assert f"{tmp_path}/reward.py" in reward


def test_a_folder_without_room_for_a_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "model")
    settings = [f"actor_rollout_ref.model.path={tmp_path}/model", f"trainer.default_local_dir={tmp_path}/run"]
    config = config_of(*settings)
    parameters = ModelShape.from_config(require_config(str(tmp_path / "model"))).parameters
    assert estimate_checkpoint_bytes(config) == 12 * parameters  # weights and two moments in float32
    exporting = config_of(*settings, "trainer.save_hf=true")
    assert estimate_checkpoint_bytes(exporting) == 14 * parameters  # and a model in bfloat16
    assert list(find_folder_problems(config)) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=12 * parameters - 1))
    [problem] = find_folder_problems(config)
    assert "a checkpoint needs about" in problem
    assert list(find_folder_problems(config_of(*settings, "trainer.save_freq=-1"))) == []
    assert not (tmp_path / "run").exists()


def test_a_model_path_in_a_missing_folder_does_not_list_the_root() -> None:
    with pytest.raises(ConfigError) as raised:
        check_files(config_of("actor_rollout_ref.model.path=/no-such-folder/deep/model", "data.train_files=[]"))
    problem = next(problem for problem in raised.value.problems if "model.path" in problem)
    assert (
        "there is no such directory; /no-such-folder/deep does not exist; set actor_rollout_ref.model.path" in problem
    )
    assert "contains" not in problem


def test_a_misspelled_model_in_a_local_folder_is_not_taken_for_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        check_files(config_of("actor_rollout_ref.model.path=demo/modle", "data.train_files=[]"))
    problem = next(problem for problem in raised.value.problems if "model.path" in problem)
    assert "there is no such directory; demo contains: model/; set actor_rollout_ref.model.path=demo/model" in problem


async def test_problems_of_one_kind_keep_their_type(tmp_path: Any) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "data_source": "openai/gsm8k"}\n')
    files = f"data.train_files={tmp_path}/rows.jsonl"
    with pytest.raises(RewardError, match=r"reward\.py"):
        await check_rl_run(config_of(files, f"reward.custom_reward_function.path={tmp_path}/reward.py"))
    with pytest.raises(DataError, match="does not exist"):
        await check_rl_run(config_of(f"data.train_files={tmp_path}/missing.jsonl"))
