"""What users' documents say about data and rewards: each problem is caused here, and its message has the fix.

`ENTRIES` lists them by their own words, with the test that stands for each.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import chat_tokenizer

from verl.agents.episode import score_by_function
from verl.agents.transcript import Transcript
from verl.config.load import LoadedConfig, load
from verl.data.dataset import PromptDataset, PromptOptions
from verl.diagnosis.diagnosis import Diagnosis
from verl.errors import ConfigError, DataError, RewardError
from verl.rewards.pool.pool import open_rewards
from verl.rewards.result import Failed, RewardInput
from verl.rewards.reward_function import RewardFunction, load_reward, resolve_scorer
from verl.rewards.settings import RewardFunctionSettings
from verl.trainer.build.data import read_data
from verl.trainer.build.preflight import check_files
from verl.trainer.build.reward_settings import reward_function_settings
from verl.trainer.evaluator import Evaluator
from verl.types import SampleHandle, Scored

pytestmark = pytest.mark.unit

ENTRIES = {
    # data
    "KeyError: 'prompt'": "test_a_missing_prompt_column_names_the_one_to_set",
    "use the actual column name": "test_a_missing_prompt_column_names_the_one_to_set",
    "verl expects Parquet files with at minimum a `prompt` column": "test_a_prompt_alone_is_enough_for_a_function",
    "for reward computation / passed to reward function": "test_the_rows_of_the_documents_are_read_and_scored",
    "The data_source, ground_truth, and extra_info fields are read from the reward_model column": (
        "test_all_that_a_reward_is_told_may_stand_in_reward_model"
    ),
    "Verify the chat template is correct for your model": "test_messages_that_a_template_refuses_are_named",
    "Access to the data files": "test_a_file_that_is_not_there_is_named_with_what_is",
    "(a Parquet file written with another schema)": "test_text_where_fields_belong_is_refused",
    "(a data source that nothing scores)": "test_an_unknown_data_source_is_said_at_the_start",
    # rewards
    "Reward function not being called": "test_a_function_that_would_not_be_called_is_named_at_the_start",
    "Ensure the reward function path and name are correct": "test_a_wrong_path_or_name_names_the_right_one",
    "reward_model.reward_fn.path=/path/to/my_reward.py": "test_the_second_spelling_reaches_the_function",
    "def compute_reward(prompt: str, response: str) -> float": "test_a_function_of_prompt_and_response_is_called_so",
    "Validation score always 0": "test_a_validation_of_zeros_shows_an_answer_its_truth_and_its_scorer",
    "Validation data has the same format as training data": "test_validation_rows_of_another_form_are_found",
    "Validation uses greedy decoding (default)": "test_validation_is_greedy_unless_asked_otherwise",
    "Reward function handles the validation data correctly": "test_a_function_that_fails_in_validation_is_said",
    "If all rewards are 0, the model has no signal to learn from": "test_rewards_that_are_all_the_same_are_said",
    "If all rewards are identical, the policy has no learning signal": "test_rewards_that_are_all_the_same_are_said",
    "verify on a small batch that your reward function returns non-zero rewards": (
        "test_a_function_can_be_tried_before_the_run"
    ),
    "Reward spikes (very high or very low outliers) destabilize training": "test_a_spike_is_said_and_can_be_clipped",
    "Clip rewards: Prevent extreme reward values": "test_a_spike_is_said_and_can_be_clipped",
    "a reward function returning inf will cause NaN loss": "test_an_infinite_reward_is_a_failure_and_never_trained_on",
    "Reward increases but eval quality drops": "test_a_reward_that_parts_from_validation_is_said",
    "Consider combining multiple signals": "test_several_rewards_are_added_up_and_each_is_seen",
    "reward.num_workers: number of parallel reward manager processes": "test_workers_need_the_manager_that_uses_them",
    "Check that data.max_response_length is long enough": "test_answers_that_are_cut_are_said",
}
"""Words of the documents -> test."""

SPEC_REWARD = """
import re

def compute_reward(data_source, solution_str, ground_truth, extra_info=None):
    match = re.search(r"####\\s*(-?\\d+)", solution_str)
    if match is None:
        return 0.0
    return 1.0 if match.group(1).strip() == str(ground_truth).strip() else 0.0
"""
FUNCTION = "reward.custom_reward_function"


def test_every_entry_has_its_test() -> None:
    assert [name for name in ENTRIES.values() if not callable(globals().get(name))] == []


def settings(*overrides: str) -> LoadedConfig:
    [loaded] = load(["actor_rollout_ref.rollout.n=8", *overrides], complete=False)
    return loaded


def write(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reward_file(folder: Path, body: str = SPEC_REWARD) -> Path:
    path = folder / "my_reward.py"
    path.write_text(body)
    return path


def chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer: all of a model that is looked at before its weights are."""
    folder = tmp_path_factory.mktemp("model")
    chat_tokenizer().save_pretrained(folder)
    return folder


# ---- data


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_missing_prompt_column_names_the_one_to_set(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"train{suffix}", {"question": "2+2?", "answer": "4"})
    with pytest.raises(DataError) as caught:
        check_files(settings(f"data.train_files={path}").config)
    assert "column 'prompt' not found" in str(caught.value)
    assert "it has: question, answer" in str(caught.value)
    assert "data.prompt_key=question" in str(caught.value)
    check_files(settings(f"data.train_files={path}", "data.prompt_key=question").config)


def test_a_prompt_alone_is_enough_for_a_function(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "train.parquet", {"prompt": "2+2?"})
    [prompt] = PromptDataset(path, chat_tokenizer(), PromptOptions(max_prompt_length=20))
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("", None, {})
    assert resolve_scorer(settings(f"{FUNCTION}.path=my_reward.py").config, "") == "my_reward.py:compute_score"
    with pytest.raises(
        RewardError, match=rf"rows without one have no built-in scorer. Add the column.*{FUNCTION}.path="
    ):
        read_data(settings(f"data.train_files={path}", f"actor_rollout_ref.model.path={model}").config)


async def test_the_rows_of_the_documents_are_read_and_scored(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    finished = tokenizer.apply_chat_template(chat("2+2?"), tokenize=False, add_generation_prompt=True)
    path = write(tmp_path / "train.parquet", {"prompt": finished, "answer": "4", "data_source": "gsm8k"})
    [prompt] = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=50))
    assert tokenizer.decode(prompt.token_ids) == finished
    reward = load_reward(str(reward_file(tmp_path)), "compute_reward")
    assert (await reward.score(prompt.data_source, "2+2=4\n#### 4", prompt.ground_truth))[0] == 1.0


def test_all_that_a_reward_is_told_may_stand_in_reward_model(tmp_path: Path) -> None:
    reward_model = {"data_source": "gsm8k", "ground_truth": "4", "extra_info": {"level": 2}}
    path = write(tmp_path / "train.parquet", {"prompt": chat("2+2?"), "reward_model": reward_model})
    dataset = PromptDataset(path, chat_tokenizer(), PromptOptions(max_prompt_length=50))
    assert (dataset[0].data_source, dataset[0].ground_truth, dataset[0].extra_info) == ("gsm8k", "4", {"level": 2})
    assert dataset.sources() == ["gsm8k"]


def test_messages_that_a_template_refuses_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {"prompt": chat("1")}, {"prompt": [{"role": "system", "content": "Hm"}]})
    strict = chat_tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x")
    with pytest.raises(
        DataError, match=r"line 2, column 'prompt': .*roles: system\): no system role; fix the messages"
    ):
        PromptDataset(path, strict, PromptOptions(max_prompt_length=50))


def test_a_file_that_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", {"prompt": "1"})
    with pytest.raises(DataError, match=r"does not exist.*Did you mean .*train\.parquet\?"):
        check_files(settings(f"data.train_files={tmp_path / 'trian.parquet'}").config)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": json.dumps(chat("1"))}, "the prompt is text that holds chat messages"),
        ({"prompt": str(chat("1"))}, "the prompt is text that holds chat messages"),
        ({"prompt": "1", "reward_model": '{"ground_truth": "4"}'}, "column 'reward_model' holds text"),
    ],
)
def test_text_where_fields_belong_is_refused(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "train.parquet", row)
    with pytest.raises(DataError, match=rf"row 0.*{says}.*without json.dumps or str around"):
        PromptDataset(path, chat_tokenizer(), PromptOptions(max_prompt_length=500))[0]


def test_an_unknown_data_source_is_said_at_the_start(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "train.parquet", {"prompt": chat("2+2?"), "data_source": "openai/gms8k", "answer": "4"})
    overrides = (f"data.train_files={path}", f"actor_rollout_ref.model.path={model}")
    with pytest.raises(RewardError) as caught:
        read_data(settings(*overrides).config)
    assert "train.parquet: data_source 'openai/gms8k': no built-in scorer knows it" in str(caught.value)
    assert "did you mean 'openai/gsm8k'?" in str(caught.value)
    assert f"{FUNCTION}.path=my_reward.py" in str(caught.value)


# ---- rewards


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            [f"{FUNCTION}.name=compute_reward"],
            f"{FUNCTION}.name=compute_reward has no effect: {FUNCTION}.path is not given",
        ),
        (
            [f"{FUNCTION}.path=my_reward.py", "reward.functions=[{path: other.py}]"],
            f"{FUNCTION}.path=my_reward.py has no effect: reward.functions is given",
        ),
    ],
)
def test_a_function_that_would_not_be_called_is_named_at_the_start(overrides: list[str], says: str) -> None:
    assert [hint for hint in settings(*overrides).hints if hint.startswith(says)]


@pytest.mark.parametrize(
    ("misspelt", "nearest"),
    [
        ("reward.custom_reward_fuction.path", f"{FUNCTION}.path"),
        ("custom_reward_function.file", f"settings of {FUNCTION}: path, name, reward_kwargs"),
        ("reward_model.reward_fn.nam", f"{FUNCTION}.name"),
        ("reward.function", "reward.functions"),
    ],
)
def test_a_misspelt_key_of_the_function_is_refused_with_the_nearest(misspelt: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(f"{misspelt}=my_reward.py")
    assert nearest in str(caught.value)


def test_a_wrong_path_or_name_names_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=rf"{FUNCTION}.path=verl/utils/my_reward.py: no such file in /"):
        load_reward("verl/utils/my_reward.py")
    with pytest.raises(
        RewardError, match=rf"no 'compute_score'.*it has: compute_reward.*{FUNCTION}.name=compute_reward"
    ):
        load_reward(str(reward_file(tmp_path)))


def test_the_second_spelling_reaches_the_function(tmp_path: Path) -> None:
    path = reward_file(tmp_path)
    loaded = settings(f"reward_model.reward_fn.path={path}", "reward_model.reward_fn.name=compute_reward")
    assert resolve_scorer(loaded.config, "anything") == f"{path}:compute_reward"
    assert any(f"alias of {FUNCTION}.path" in hint for hint in loaded.hints)


@pytest.mark.parametrize("signature", ["prompt: str, response: str", "prompt, response, ground_truth", "response"])
async def test_a_function_of_prompt_and_response_is_called_so(tmp_path: Path, signature: str) -> None:
    path = reward_file(
        tmp_path, f"def compute_reward({signature}):\n    return dict(score=1, arguments=len(locals()))\n"
    )
    reward = load_reward(str(path), "compute_reward")
    assert await reward.score("", "4", "4", {"raw_prompt": "2+2?"}) == (1.0, {"arguments": signature.count(",") + 1})


async def test_a_function_that_takes_prompts_gets_them_without_any_setting(tmp_path: Path) -> None:
    data = write(tmp_path / "train.parquet", {"prompt": chat("2+2?"), "answer": "4"})
    path = reward_file(tmp_path, "def compute_reward(prompt, response):\n    return prompt == '2+2?'\n")
    config = settings(f"{FUNCTION}.path={path}", f"{FUNCTION}.name=compute_reward").config
    [prompt] = PromptDataset(data, chat_tokenizer(), PromptOptions(max_prompt_length=50))
    with open_rewards(replace(reward_function_settings(config), workers=0)) as rewards:
        await rewards.start()
        assert await score_by_function(rewards.score)(prompt, Transcript(), "4") == Scored(1.0)


async def test_a_row_without_a_prompt_is_named_to_a_function_that_takes_it(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "def compute_reward(prompt, response):\n    return 1.0\n")
    with pytest.raises(RewardError, match=r"takes `prompt`, but the row has no prompt"):
        await load_reward(str(path), "compute_reward").score("", "4", "4")


@pytest.mark.parametrize("signature", ["question: str, response: str", "text, truth"])
def test_another_signature_is_told_the_right_one(tmp_path: Path, signature: str) -> None:
    path = reward_file(tmp_path, f"def compute_score({signature}):\n    return 1.0\n")
    with pytest.raises(RewardError) as caught:
        load_reward(str(path))
    assert "declare it as compute_score(data_source, solution_str, ground_truth, extra_info=None)" in str(caught.value)


def handle(score: float, failure: Failed | None = None) -> SampleHandle:
    return SampleHandle(None, 0, 4, 2, score, 0, failure=failure)


async def test_a_validation_of_zeros_shows_an_answer_its_truth_and_its_scorer() -> None:
    shown = "verl.rewards.scorers.gsm8k gave 0 to the answer 'It is 4.'; the ground truth is '4'"

    async def answer(row: int) -> list[SampleHandle]:
        return [handle(0.0)]

    async def preview(source: str) -> str:
        return shown

    validation = Evaluator(answer, ["gsm8k"] * 3, preview=preview)
    await validation.evaluate()
    [warning] = validation.warnings
    assert warning.startswith(f"validation: all 3 responses to data source 'gsm8k' got 0. {shown}")
    assert "that validation rows look like training rows" in warning
    assert "actor_rollout_ref.rollout.val_kwargs.temperature=0" in warning


def test_validation_rows_of_another_form_are_found(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", {"prompt": chat("1"), "data_source": "gsm8k", "answer": "1"})
    val = write(tmp_path / "val.parquet", {"question": "1", "data_source": "gsm8k", "solution": "1"})
    with pytest.raises(DataError, match=r"column 'prompt' not found in .*val\.parquet"):
        check_files(settings(f"data.train_files={train}", f"data.val_files={val}").config)


async def test_a_ground_truth_that_the_scorer_cannot_read_is_a_failure_and_no_0() -> None:
    reward = load_reward(None)
    with pytest.raises(RewardError, match="the ground truth 'None' has no number"):
        await reward.score("gsm8k", "#### 4", None)


def test_validation_is_greedy_unless_asked_otherwise() -> None:
    assert settings().config.actor_rollout_ref.rollout.val_kwargs.temperature == 0
    assert settings("rollout.val_kwargs.temperature=0").config.actor_rollout_ref.rollout.val_kwargs.temperature == 0


async def test_a_function_that_fails_in_validation_is_said() -> None:
    failed = Failed("error", "my_reward.py:compute_score: raised KeyError\n  ground truth: None")

    async def answer(row: int) -> list[SampleHandle]:
        return [handle(math.nan, failed)]

    async def preview(source: str) -> str:
        raise AssertionError("nothing got 0: nothing was scored")

    validation = Evaluator(answer, ["mine"] * 2, preview=preview)
    means = await validation.evaluate()
    assert math.isnan(means["val/mine/mean@1"])
    assert validation.warnings == [f"validation: 2 responses could not be scored; {failed.message}"]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_rewards_that_are_all_the_same_are_said(reward: float) -> None:
    metrics = {"reward/min": reward, "reward/max": reward, "reward/mean": reward}
    [(line, _)] = Diagnosis().advise(metrics, 1, "my_reward.py:compute_score gave this to the answer 'x'")
    assert f"all responses of the step got the same reward, {reward:g}: nothing can be learned" in line
    assert "actor_rollout_ref.rollout.n=8" in line
    assert line.endswith("my_reward.py:compute_score gave this to the answer 'x'")


async def test_a_function_can_be_tried_before_the_run(tmp_path: Path) -> None:
    reward = load_reward(str(reward_file(tmp_path)), "compute_reward")
    scores = [(await reward.score("gsm8k", answer, "4"))[0] for answer in ("#### 4", "#### 5", "four")]
    assert scores == [1.0, 0.0, 0.0]


async def test_a_spike_is_said_and_can_be_clipped(tmp_path: Path) -> None:
    [(line, _)] = Diagnosis().advise(
        {"reward/mean": 1.0, "reward/std": 30.0, "reward/min": 0.0, "reward/max": 1000.0}, 1
    )
    assert "one reward is an outlier: reward/max is 1e+03" in line
    assert "clip: [-1, 1]" in line
    path = reward_file(
        tmp_path, "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1000.0\n"
    )
    loaded = settings(f"reward.functions=[{{path: {path}, clip: [-1, 1]}}]")
    reward = RewardFunction.load(RewardFunctionSettings(functions=loaded.config.reward.functions))
    assert (await reward.score("mine", "x", "y"))[0] == 1.0


@pytest.mark.parametrize("value", ["float('inf')", "float('nan')", "None", "'1.0'"])
def test_an_infinite_reward_is_a_failure_and_never_trained_on(tmp_path: Path, value: str) -> None:
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    reward = load_reward(str(reward_file(tmp_path, f"{head}    return {value}\n")))
    requests = [RewardInput("mine", "x", "y")]
    [outcome] = reward.to_results(reward.call(requests), requests)
    assert isinstance(outcome, Failed)
    assert "a reward must be a finite number" in outcome.message


def test_a_reward_that_parts_from_validation_is_said() -> None:
    diagnosis, lines = Diagnosis(), list[str]()
    for step, (reward, validation) in enumerate([(0.2, 0.4), *[(0.9, 0.1)] * 5], 1):
        diagnosis.advise({"reward/mean": reward}, step)
        lines += [advice.text for advice in diagnosis.advise({"val/gsm8k/mean@1": validation}, step)]
    [line] = lines
    assert "possible reward hacking" in line
    assert "algorithm.kl_ctrl.kl_coef=0.01" in line


async def test_several_rewards_are_added_up_and_each_is_seen(tmp_path: Path) -> None:
    path = reward_file(
        tmp_path,
        SPEC_REWARD + "\ndef brief(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return -max(0, len(solution_str) - 4) / 10\n",
    )
    parts = [{"path": str(path), "name": "compute_reward"}, {"path": str(path), "name": "brief", "weight": 0.5}]
    score, numbers = await RewardFunction.load(RewardFunctionSettings(functions=parts)).score("gsm8k", "#### 4", "4")
    assert (score, numbers) == (0.9, {"compute_reward": 1.0, "brief": -0.2})


def test_workers_need_the_manager_that_uses_them() -> None:
    [hint] = [hint for hint in settings("reward.num_workers=8").hints if hint.startswith("reward.num_workers=8")]
    assert hint.endswith("has no effect: only reward.reward_manager.name=prime uses it")
    assert not any(
        "num_workers" in hint for hint in settings("reward.num_workers=8", "reward.reward_manager.name=prime").hints
    )


def test_answers_that_are_cut_are_said() -> None:
    [(line, _)] = Diagnosis().advise({"response_length/clip_ratio": 0.9}, 1)
    assert "try a larger data.max_response_length" in line


def test_messages_name_an_agent_that_scores_its_own_episodes() -> None:
    multi_turn = "actor_rollout_ref.rollout.multi_turn.enable=True"
    agent = "actor_rollout_ref.rollout.agent.default_agent_loop=mine.py:agent"
    assert resolve_scorer(settings(multi_turn, agent).config, "") == "the agent or its environment"
