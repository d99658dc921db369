"""Loading, calling and checking a reward function; every error names the setting and a fix."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.reward_function import RewardFunction, describe_scorer, load_reward
from verl.rewards.scorers import gsm8k
from verl.rewards.settings import RewardFunctionSettings

pytestmark = pytest.mark.unit

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


def write(folder: Path, body: str, name: str = "my_reward.py") -> str:
    file = folder / name
    file.write_text(body)
    return str(file)


def returning(folder: Path, expression: str) -> RewardFunction:
    return load_reward(write(folder, f"{HEAD}    return {expression}\n"))


async def test_a_sync_function_from_a_file_scores(tmp_path: Path) -> None:
    reward = returning(tmp_path, "float(solution_str == ground_truth)")
    assert await reward.score("mine", "046", "046") == (1.0, {})
    assert await reward.score("mine", "047", "046") == (0.0, {})


async def test_an_async_function_and_an_async_object_score(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import asyncio\n"
        f"async {HEAD}    await asyncio.sleep(0)\n    return 0.5\n"
        "class Judge:\n    async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):\n"
        "        return 0.25\n"
        "judge = Judge()\n",
    )
    assert (await load_reward(path).score("", "", ""))[0] == 0.5
    assert (await load_reward(path, "judge").score("", "", ""))[0] == 0.25


async def test_a_module_name_works_like_a_file() -> None:
    assert (await load_reward("verl.rewards.scorers.exact_match").score("x", " 7 ", "7"))[0] == 1.0


async def test_reward_kwargs_and_extra_info_reach_the_function(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def f(data_source, solution_str, ground_truth, extra_info, scale):\n    return scale * extra_info['x']\n",
    )
    reward = load_reward(path, "f", {"scale": 2.0})
    assert (await reward.score("", "", "", {"x": 3}))[0] == 6.0


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("True", (1.0, {})),
        ("__import__('numpy').float32(0.5)", (0.5, {})),
        ("{'score': 1, 'format': False}", (1.0, {"format": 0.0})),
    ],
)
async def test_all_kinds_of_numbers_are_scores(tmp_path: Path, expression: str, expected: object) -> None:
    assert await returning(tmp_path, expression).score("", "", "") == expected


@pytest.mark.parametrize(
    "expression",
    [
        "None",
        "'1.0'",
        "float('nan')",
        "float('inf')",
        "[1.0]",
        "__import__('numpy').ones(2)",
        "{'acc': 1.0}",
        "{'score': None}",
        "{'score': 1.0} | dict.fromkeys(range(1000), 0.0)",
        "type('Odd', (), {'__float__': lambda self: 1 / 0, '__repr__': lambda self: 1 / 0})()",
    ],
)
async def test_what_is_not_a_finite_number_is_an_error_that_shows_the_sample(tmp_path: Path, expression: str) -> None:
    with pytest.raises(RewardError) as caught:
        await returning(tmp_path, expression).score("sums", "a" * 1000, "the truth")
    message = str(caught.value)
    assert "my_reward.py:compute_score" in message
    assert "'sums'" in message
    assert "'" + "a" * 200 + "' ... (1,000 characters)" in message
    assert "'the truth'" in message


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_an_exception_comes_with_the_users_traceback_and_nothing_else(tmp_path: Path, prefix: str) -> None:
    path = write(tmp_path, f"def inner():\n    return {{}}['gone']\n\n{prefix}{HEAD}    return inner()\n")
    with pytest.raises(RewardError) as caught:
        await load_reward(path).score("sums", "12", "3")
    message = str(caught.value)
    assert "KeyError: 'gone'" in message
    assert 'my_reward.py", line 2, in inner' in message
    assert "threads.py" not in message
    assert "reward_function.py" not in message
    assert "'sums'" in message


async def test_a_timeout_error_of_the_user_is_an_exception_like_others(tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEAD}    raise TimeoutError('judge is away')\n")
    with pytest.raises(RewardError, match="raised TimeoutError") as caught:
        await load_reward(path).score("sums", "12", "3")
    assert "judge is away" in str(caught.value)


async def test_a_parameter_response_next_to_those_of_compute_score_is_an_option(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD.replace("):", ", response=None):") + "    return float(response is None)\n")
    assert await load_reward(path).score("sums", "12", "3") == (1.0, {})


async def test_a_stop_iteration_is_an_exception_like_others(tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEAD}    return next(iter(()))\n")
    with pytest.raises(RewardError, match="StopIteration"):
        await load_reward(path).score("sums", "12", "3")


@pytest.mark.parametrize(
    ("body", "name", "parts"),
    [
        ("def other(): ...\n", "compute_score", ["no 'compute_score'", "it has: other", "custom_reward_function.name"]),
        ("x = 1\n", "compute_score", ["defines no function"]),
        ("compute_score = 3\n", "compute_score", ["is a int, not a function"]),
        ("def compute_score(question, reply): ...\n", "compute_score", ["(question, reply)", "extra_info=None"]),
        ("import not_there_at_all\n", "compute_score", ["imports 'not_there_at_all'", "not installed"]),
        ("\n1 / 0\n", "compute_score", ["importing it failed", "line 2", "ZeroDivisionError"]),
        ("def broken(:\n", "compute_score", ["SyntaxError", "line 1"]),
    ],
)
def test_a_file_without_a_usable_function_is_an_error_with_the_reason(
    tmp_path: Path, body: str, name: str, parts: list[str]
) -> None:
    with pytest.raises(RewardError) as caught:
        load_reward(write(tmp_path, body), name)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("path", "part"), [("nowhere/reward.py", "no such file"), ("no_such_package.x", "neither a file")]
)
def test_a_missing_file_or_module_is_named(path: str, part: str) -> None:
    with pytest.raises(RewardError, match=part) as caught:
        load_reward(path)
    assert path in str(caught.value)


async def test_an_unknown_data_source_names_a_fix() -> None:
    reward = load_reward(None)
    assert describe_scorer("my/data", RewardFunctionSettings()) is None
    with pytest.raises(RewardError, match=r"reward\.custom_reward_function\.path=") as caught:
        await reward.score("my/data", "1", "1")
    assert "openai/gsm8k" in str(caught.value)


def test_kwargs_without_a_function_are_refused() -> None:
    with pytest.raises(RewardError, match="take no arguments"):
        load_reward(None, kwargs={"scale": 1})


@pytest.mark.parametrize(
    ("source", "right", "wrong", "truth"),
    [
        ("addition", "46", "47", "46"),
        ("openai/gsm8k", "#### 46", "#### 47", "46"),
        ("lighteval/MATH", r"\boxed{46}", r"\boxed{47}", "46"),
        ("cais/mmlu", "The answer is (B)", "The answer is (C)", "B"),
        ("squad", "<answer>Paris</answer>", "<answer>Rome</answer>", ["Paris"]),
        ("mbpp", "def f(x):\n    return x + 1", "def f(x):\n    return x", {"asserts": ["assert f(45) == 46"]}),
        ("json_schema", "[46]", "46", {"type": "array"}),
    ],
)
async def test_every_built_in_scorer_distinguishes_right_from_wrong(
    source: str, right: str, wrong: str, truth: object
) -> None:
    reward = load_reward(None)
    assert (await reward.score(source, right, truth))[0] == 1.0
    assert (await reward.score(source, wrong, truth))[0] == 0.0
    assert (await reward.score(source, "", truth))[0] == 0.0


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("so it is 1,250.\n#### 1,250", "1250", 1.0),
        ("#### $72.00", "72", 1.0),
        ("#### 3 no, wait\n#### 4", "4", 1.0),
        ("#### 4", "5 + 5 = 10\n#### 10", 0.0),
        ("72", "72", 0.0),
        ("####", "72", 0.0),
        ("#### -3", "-3", 1.0),
    ],
)
def test_gsm8k_reads_the_number_after_the_last_mark(answer: str, truth: str, score: float) -> None:
    assert gsm8k.compute_score("gsm8k", answer, truth) == score


@given(st.integers(-(10**12), 10**12))
def test_gsm8k_accepts_a_number_however_its_thousands_are_written(number: int) -> None:
    assert gsm8k.compute_score("gsm8k", f"#### {number:,}", str(number)) == 1.0
    assert gsm8k.compute_score("gsm8k", f"#### {number + 1}", f"{number:,}") == 0.0


@given(st.text(alphabet="#0123456789,.$- x\n", max_size=80))
def test_gsm8k_survives_any_text(text: str) -> None:
    assert gsm8k.compute_score("gsm8k", text, "1") in (0.0, 1.0)


def test_gsm8k_refuses_a_ground_truth_without_a_number() -> None:
    with pytest.raises(RewardError, match="has no number"):
        gsm8k.compute_score("gsm8k", "#### 1", "one")


def test_a_reward_error_can_be_pickled() -> None:
    assert str(pickle.loads(pickle.dumps(RewardError("why")))) == "why"
