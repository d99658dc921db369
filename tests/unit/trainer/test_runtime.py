"""The start of a run: notes before its first step, and the checkpoint that it resumes from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from verl import GRPOTrainer
from verl.checkpoint.files import write
from verl.checkpoint.manifest import CheckpointDir
from verl.config.load import load, load_dict, load_sft
from verl.config.paths import set_path
from verl.config.schema import Config, SftConfig
from verl.errors import CheckpointError
from verl.sft.builder import build_schedule as sft_schedule
from verl.tracking.console import Console
from verl.trainer.build import run_sources
from verl.trainer.build.code_files import find_code
from verl.trainer.build.preflight import advise_on_cores
from verl.trainer.build.run_sources import digest_sources, find_changes
from verl.trainer.build.runtime import build_checkpointer, resume

pytestmark = pytest.mark.unit


def run_of(folder: Path, *settings: str, model: object = "some/model") -> Config:
    needed = ["data.train_files=a.parquet", f"actor_rollout_ref.model.path={model}"]
    return load([*needed, f"trainer.default_local_dir={folder}", *settings])[0].config


def sft_of(folder: Path, *settings: str, model: object = "some/model") -> SftConfig:
    needed = ["data.train_files=a.parquet", f"model.path={model}"]
    return load_sft([*needed, f"trainer.default_local_dir={folder}", *settings])[0].config


def test_supervised_training_saves_its_last_step_unless_told_otherwise(tmp_path: Path) -> None:
    class Data:
        train = range(40)

    def saves(*settings: str) -> list[int]:
        table = sft_schedule(sft_of(tmp_path, "data.train_batch_size=10", *settings), Data())  # type: ignore[arg-type]
        return [step for step in range(1, table.total_steps + 1) if table.saves_at(step)]

    assert saves() == [4]
    assert saves("trainer.save_freq=3") == [3, 4]
    assert saves("trainer.save_freq=-1") == []


class Ranks:
    """Writes one file, and loads nothing: who is asked to load is what is tested."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def save(self, directory: str, trainer: Mapping[str, Any], *, is_last: bool = False) -> None:
        folder = Path(directory)
        files = {"shard": write(folder / "shard", b"weights")}
        CheckpointDir(folder.parent).commit(int(folder.name.rpartition("_")[2]), files, trainer)

    async def poll_save(self, *, wait: bool) -> bool:
        return True

    async def verify(self, directory: str) -> list[str]:
        return []

    async def load(self, directory: str) -> None:
        self.loaded.append(directory)


class Stream:
    def load(self, state: Mapping[str, Any]) -> None:
        assert state == {"position": 3}


async def save_as(config: Config | SftConfig) -> None:
    ranks: Any = Ranks()
    await build_checkpointer(config, ranks, Console(), sources=digest_sources(config)).save(
        3, {"data": {"position": 3}}
    )


async def resumed(config: Config | SftConfig) -> int:
    ranks: Any = Ranks()
    stream: Any = Stream()
    step = await resume(config, ranks, stream, Console(), digest_sources(config))
    assert len(ranks.loaded) == (step > 0)
    return step


async def test_a_run_resumes_from_its_own_checkpoint_and_from_older_ones_without_a_model_name(tmp_path: Path) -> None:
    await save_as(run_of(tmp_path))
    assert await resumed(run_of(tmp_path)) == 3
    directory = CheckpointDir(tmp_path).begin(4)
    await Ranks().save(str(directory), {"data": {"position": 3}})
    assert await resumed(sft_of(tmp_path)) == 4


async def test_checkpoints_of_the_other_command_are_refused(tmp_path: Path) -> None:
    await save_as(sft_of(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"was written by verl sft, and verl train cannot.*experiment_name.*verl merge"
    ):
        await resumed(run_of(tmp_path))
    assert await resumed(run_of(tmp_path, "trainer.resume_mode=disable")) == 0


async def test_another_model_is_not_silently_replaced_by_the_one_in_the_checkpoint(tmp_path: Path) -> None:
    run, first, second = tmp_path / "run", tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    await save_as(sft_of(run, model=first))
    with pytest.raises(CheckpointError, match=rf"from the model {first}, but the settings name {second}, which would"):
        await resumed(sft_of(run, model=second))
    named = ("trainer.resume_mode=path", f"trainer.resume_from_path={run}/global_step_3")
    assert await resumed(sft_of(run, *named, model=second)) == 3
    (tmp_path / "link").symlink_to(first)
    assert await resumed(sft_of(run, model=tmp_path / "link")) == 3
    first.rename(tmp_path / "moved")
    assert await resumed(sft_of(run, model=tmp_path / "moved")) == 3


async def test_names_on_the_hub_are_compared_too(tmp_path: Path) -> None:
    await save_as(run_of(tmp_path, model="org/small"))
    with pytest.raises(CheckpointError, match="from the model org/small, but the settings name org/large"):
        await resumed(run_of(tmp_path, model="org/large"))


def test_more_train_ranks_than_cores_get_advice() -> None:
    assert "8 train ranks share its 2 CPU cores" in (advise_on_cores(8, "cpu", 2) or "")
    assert advise_on_cores(2, "cpu", 2) is None
    assert advise_on_cores(8, "cuda", 2) is None


def with_data(folder: Path, text: str, *settings: str, command: Any = run_of) -> Any:
    (folder / "data.jsonl").write_text(text)
    return command(folder / "run", f"data.train_files={folder}/data.jsonl", *settings)


@pytest.mark.parametrize("command", [run_of, sft_of])
async def test_data_of_other_content_is_refused_although_it_has_the_same_length(tmp_path: Path, command: Any) -> None:
    await save_as(with_data(tmp_path, '{"prompt": "1+1"}\n', command=command))
    assert await resumed(with_data(tmp_path, '{"prompt": "1+1"}\n', command=command)) == 3
    with pytest.raises(
        CheckpointError, match=r"data of other content than data\.train_files has now.*resume_mode=path"
    ):
        await resumed(with_data(tmp_path, '{"prompt": "1+2"}\n', command=command))
    named = ("trainer.resume_mode=path", f"trainer.resume_from_path={tmp_path}/run/global_step_3")
    assert await resumed(with_data(tmp_path, '{"prompt": "1+2"}\n', *named, command=command)) == 3


async def test_moved_data_of_the_same_content_is_resumed(tmp_path: Path) -> None:
    await save_as(with_data(tmp_path, '{"prompt": "1+1"}\n'))
    (tmp_path / "data.jsonl").rename(tmp_path / "moved.jsonl")
    assert await resumed(run_of(tmp_path / "run", f"data.train_files={tmp_path}/moved.jsonl")) == 3


@pytest.mark.parametrize(
    "setting",
    [
        "reward.custom_reward_function.path={}",
        "actor_rollout_ref.rollout.multi_turn.function_tool_path={}",
        "actor_rollout_ref.rollout.multi_turn.environment={}:Game",
        "actor_rollout_ref.rollout.agent.default_agent_loop={}:agent",
    ],
)
async def test_code_that_has_changed_is_named(tmp_path: Path, setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = tmp_path / "code.py"
    code.write_text("version = 1\n")
    turns = ["actor_rollout_ref.rollout.multi_turn.enable=true"] if "rollout" in setting else []
    config = run_of(tmp_path / "run", setting.format(code), *turns)
    await save_as(config)
    assert await resumed(config) == 3
    assert "has changed" not in capsys.readouterr().out
    code.write_text("version = 2\n")
    assert await resumed(config) == 3
    name = setting.partition("=")[0].removesuffix(".default_agent_loop")
    assert f"{name}: what it names has changed since global_step_3" in capsys.readouterr().out


def test_large_files_are_sampled_over_their_whole_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_sources, "STREAMED_BYTES", 1 << 20)
    monkeypatch.setattr(run_sources, "_BLOCK", 1 << 10)
    file = tmp_path / "large"
    file.write_bytes(bytes(4 << 20))
    before = run_sources._digest_files([file])
    with file.open("r+b") as handle:
        handle.seek(2 << 20)
        handle.write(b"x")
    assert run_sources._digest_files([file]) != before


def test_many_files_are_sampled_as_one_large_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_sources, "STREAMED_BYTES", 1 << 20)
    monkeypatch.setattr(run_sources, "_BLOCK", 1 << 10)
    files = [tmp_path / f"part-{number}" for number in range(4)]
    for file in files:
        file.write_bytes(bytes(1 << 20))
    steps = []
    monkeypatch.setattr(run_sources, "_digest_file", lambda path, step: steps.append(step) or "digest")
    run_sources._digest_files(files)
    assert steps == [(4 << 20) // 256] * 4


def test_a_digest_imports_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_that_fails"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "rewards.py").write_text("def score(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_code("package_that_fails.rewards:score") == package / "rewards.py"
    assert find_code("package_that_fails:score") == package / "__init__.py"
    assert find_code("package_that_fails.missing:score") is None


REWARD = """
import helpers.parse, random
from helpers import numbers
def score(): import late
"""


def write_code(folder: Path) -> None:
    (folder / "helpers").mkdir(parents=True)
    files = {"reward.py": REWARD, "late.py": "", "random.py": "", "unused.py": "", "helpers/__init__.py": ""}
    more = {"helpers/parse.py": "from . import text", "helpers/text.py": "import reward", "helpers/numbers.py": ""}
    for name, text in {**files, **more}.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("is_package", [False, True])
def test_modules_that_a_reward_imports_are_part_of_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_package: bool
) -> None:
    folder = tmp_path / ("my_rewards" if is_package else "")
    write_code(folder)
    path = str(folder / "reward.py")
    if is_package:
        (folder / "__init__.py").write_text("")
        text = REWARD.replace("import helpers.parse", "import my_rewards.helpers.parse")
        (folder / "reward.py").write_text(text.replace("from helpers", "from .helpers"))
        (tmp_path / "other.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        path = "my_rewards.reward"
    config = run_of(tmp_path / "run", f"reward.custom_reward_function.path={path}")
    digests = [digest_sources(config)]
    for name in ("late", "helpers/parse", "helpers/text", "helpers/numbers"):
        (folder / f"{name}.py").write_text("changed = True" if name != "helpers/parse" else "from . import text # new")
        digests.append(digest_sources(config))
    assert len({each["reward.custom_reward_function.path"] for each in digests}) == 5
    for name in ("unused", "random"):
        (folder / f"{name}.py").write_text("changed = True")
    assert digest_sources(config) == digests[-1]


def test_classes_in_a_file_of_tools_are_part_of_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "calculator_of_a_test.py").write_text("class Calculator: ...")
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: calculator_of_a_test.Calculator\n")
    rollout = "actor_rollout_ref.rollout.multi_turn"
    config = run_of(tmp_path / "run", f"{rollout}.enable=true", f"{rollout}.tool_config_path={tmp_path}/tools.yaml")
    before = digest_sources(config)
    (tmp_path / "calculator_of_a_test.py").write_text("class Calculator: changed = True")
    assert digest_sources(config) != before


def test_functions_of_the_python_api_have_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "functions_of_a_test.py"
    file.write_text("import verl\n@verl.tool\ndef add(a: int) -> int: return a\ndef score(response): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module("functions_of_a_test")
    monkeypatch.setitem(sys.modules, "functions_of_a_test", module)
    trainer = GRPOTrainer("model", prompts=["Hello"], folder=tmp_path, reward=module.score, tools=[module.add])
    tree: dict[str, Any] = {}
    for key, value in trainer._settings(["Hello"], tmp_path).items():
        set_path(tree, tuple(key.split(".")), value)
    config = load_dict(tree).config
    before = digest_sources(config)
    file.write_text(file.read_text().replace("1.0", "2.0"))
    changed = find_changes(before, digest_sources(config))
    settings = ["reward.custom_reward_function.path", "actor_rollout_ref.rollout.multi_turn.function_tool_path"]
    assert changed == settings
