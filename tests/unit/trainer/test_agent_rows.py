"""Rows of the data choose among the agents and tools of the settings, and load nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import sample_tools
from agent_config import agent_config
from chat_bpe import bpe_tokenizer
from tiny import tiny_qwen2

from verl.agents.agent_episode import AgentEpisode
from verl.config.load import load_dict
from verl.config.paths import change_settings
from verl.config.schema.root import Config
from verl.errors import ConfigError, DataError
from verl.trainer.build.data import read_data

pytestmark = pytest.mark.unit

CHAT = [{"role": "user", "content": "What is red?"}]
GOOD = {"prompt": CHAT, "data_source": "keys", "ground_truth": "7"}
FAR = 1200  # beyond the rows from which the columns of a JSONL file are read


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = bpe_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Any:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")

    def made(rows: list[dict[str, Any]], val: list[dict[str, Any]] = [GOOD], **agent: Any) -> Config:  # noqa: B006
        for name, each in (("train", rows), ("val", val)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
        return load_dict(
            {
                "data": {
                    "train_files": str(tmp_path / "train.jsonl"),
                    "val_files": str(tmp_path / "val.jsonl"),
                    "max_prompt_length": 4000,
                    "cache_dir": str(tmp_path / "cache"),
                },
                "actor_rollout_ref": {
                    "model": {"path": str(model)},
                    "rollout": {
                        "multi_turn": {"enable": True, "function_tool_path": sample_tools.__file__},
                        "agent": agent,
                    },
                },
                "reward": {"custom_reward_function": {"path": str(reward)}},
            }
        ).config

    return made


@pytest.fixture
def canary(tmp_path: Path) -> tuple[str, Path]:
    """A file that leaves a mark when it is imported, as the name of an agent; and the mark."""
    mark, file = tmp_path / "mark", tmp_path / "canary.py"
    file.write_text(f"open({str(mark)!r}, 'w')\nasync def agent(task, model):\n    return 1.0\n")
    return f"{file}:agent", mark


@pytest.mark.parametrize(("place", "before"), [("column", FAR), ("extra_info", 1), ("reward_model", 1)])
def test_a_row_never_loads_the_code_that_it_names(
    config: Any, canary: tuple[str, Path], place: str, before: int
) -> None:
    name, mark = canary
    named: dict[str, Any] = {"agent_name": name}
    row = {"extra_info": {"extra_info": named}, "reward_model": {"reward_model": {"extra_info": named}}}
    with pytest.raises(DataError, match=f"line {before + 1}: the column agent_name is .* which the settings do not"):
        read_data(config([*[GOOD] * before, {**GOOD, **row.get(place, named)}]))
    assert not mark.exists()


def test_a_pickle_that_a_row_names_is_not_opened(config: Any, tmp_path: Path) -> None:
    import cloudpickle

    file = tmp_path / "agents.pkl"
    file.write_bytes(cloudpickle.dumps({"agent": print}))
    with pytest.raises(DataError, match="which the settings do not declare"):
        read_data(config([{**GOOD, "agent_name": f"{file}:agent"}]))


def test_rows_choose_among_declared_agents(config: Any, canary: tuple[str, Path]) -> None:
    rows = [{**GOOD, "agent_name": name} for name in ("mine", "tool_agent", "single_turn")]
    assert read_data(config(rows, agents={"mine": canary[0]})).order.length == 3
    assert canary[1].exists()  # the settings are trusted


def test_all_problems_of_all_files_are_reported_together(config: Any) -> None:
    rows = [
        {**GOOD, "agent_name": "poet"},
        {**GOOD, "tools": ["add", "erase"]},
        {**GOOD, "tools": "add"},
        {**GOOD, "prompt": "What is red?"},
        {**GOOD, "prompt": "What is red?", "agent_name": "single_turn"},
        {**GOOD, "tools": ["add"]},
    ]
    with pytest.raises(DataError) as caught:
        read_data(config(rows, val=[{**GOOD, "extra_info": {"tool_selection": ["nothing"]}}]))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].rpartition("/")[2] for line in lines] == [
        *(f"train.jsonl, line {number}" for number in (1, 2, 3, 4)),
        "val.jsonl, line 1",
    ]
    for line, word in zip(lines, ("'poet'", "'erase'", "a list of names", "chat messages", "'nothing'"), strict=True):
        assert word in line


def test_an_agent_name_that_is_a_list_is_refused(config: Any) -> None:
    with pytest.raises(DataError, match=r"agent_name is \"\['tool_agent'\]\", which the settings do not declare"):
        read_data(config([{**GOOD, "agent_name": ["tool_agent"]}]))


def test_many_problems_are_counted(config: Any) -> None:
    with pytest.raises(DataError, match=r"\.\.\. and 15 more rows"):
        read_data(config([{**GOOD, "agent_name": "poet"}] * 20))


def test_a_declared_agent_that_cannot_be_loaded_or_is_built_in_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent\.agents\.mine"):
        AgentEpisode(with_agents(mine="/nowhere.py:agent"), bpe_tokenizer())
    with pytest.raises(ConfigError, match="single_turn is a built-in agent"):
        AgentEpisode(with_agents(single_turn="/nowhere.py:agent"), bpe_tokenizer())


def with_agents(**agents: str) -> Config:
    settings = agent_config().model_dump()
    settings["actor_rollout_ref"]["rollout"]["agent"]["agents"] = agents
    return Config.model_validate(settings)


def test_a_chat_template_that_ignores_tools_is_refused_unless_the_prompt_describes_them(
    config: Any, model: Path, tmp_path: Path
) -> None:
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}"
        "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    names = [each["function"]["name"] for each in AgentEpisode(config([GOOD]), bpe_tokenizer()).list_schemas()]
    section = "actor_rollout_ref"
    change = {f"{section}.model.path": str(tmp_path / "model"), f"{section}.rollout.multi_turn.format": "hermes"}
    with pytest.raises(ConfigError, match=f"does not show the model its tools: {names[0]}") as raised:
        read_data(change_settings(config([GOOD]), change))
    assert "system message" in str(raised.value)
    other = {**GOOD, "agent_name": "single_turn"}
    with pytest.raises(ConfigError, match="does not show the model its tools"):
        read_data(change_settings(config([other, {**GOOD, "agent_name": "tool_agent"}], val=[other]), change))
    described = {**GOOD, "prompt": [{"role": "system", "content": f"You may call {', '.join(names)}."}, *CHAT]}
    read_data(change_settings(config([described], val=[described]), change))
