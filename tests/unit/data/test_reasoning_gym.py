"""`reasoning_gym://TASK` as data and reward: with a package that looks like it, and with the real one if installed."""

import json
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.config.load import load
from verl.data.dataset import extract_reward_fields
from verl.data.files import find_files
from verl.data.remote_files import fetch_files
from verl.errors import DataError, RewardError
from verl.rewards.reward_function import load_reward
from verl.rewards.scorers import reasoning_gym as scorer
from verl.rewards.scorers.reasoning_gym import compute_score, is_harmless
from verl.trainer.build.run_sources import DATA, digest_sources

pytestmark = pytest.mark.unit


@dataclass
class SumConfig:
    size: int = 500
    seed: int | None = None
    digits: int = 1


class Sums:
    """A task of two numbers with so many digits."""

    def __init__(self, config: SumConfig) -> None:
        assert config.size > 0, "size must be positive"
        self.config = config

    def __iter__(self) -> Any:
        for index in range(self.config.size):
            one = 10 ** (self.config.digits - 1) + index + (self.config.seed or 0)
            yield {"question": f"{one} + 1?", "answer": str(one + 1), "metadata": {"one": one}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if int(answer) == entry["metadata"]["one"] + 1 else 0.01


class Levels:
    def set_global_level(self, level: int) -> None:
        self.level = level

    def generate_configuration(self) -> SumConfig:
        return SumConfig(digits=self.level + 1)


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"sums": (Sums, SumConfig), "puzzle24": (Sums, SumConfig), "game_of_life_halting": (Sums, SumConfig)}
    tasks["coin_flip"] = (Sums, SumConfig)
    factory = SimpleNamespace(DATASETS=tasks, CURRICULA={"sums": Levels}, create_curriculum=lambda _: Levels())
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(factory=factory))
    monkeypatch.setattr(metadata, "version", lambda _: "0.1.25")


def read_rows(address: str, cache: Path) -> list[dict[str, Any]]:
    [path] = fetch_files(address, cache)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_have_the_questions_of_the_task_at_its_difficulty(gym: None, tmp_path: Path) -> None:
    rows = read_rows("reasoning_gym://sums?size=2&seed=5&difficulty=2", tmp_path)
    assert [row["data_source"] for row in rows] == ["reasoning_gym/sums"] * 2
    assert [row["prompt"][0]["content"].splitlines()[0] for row in rows] == ["105 + 1?", "106 + 1?"]
    assert rows == read_rows("reasoning_gym://sums?size=2&seed=5&difficulty=2", tmp_path)
    assert rows != read_rows("reasoning_gym://sums?size=2&seed=6&difficulty=2", tmp_path)


async def test_the_verifier_of_the_task_scores_its_rows(gym: None, tmp_path: Path) -> None:
    fields = extract_reward_fields(read_rows("reasoning_gym://sums?size=1&digits=2", tmp_path)[0])
    reward = load_reward(None)
    scores = {
        response: (await reward.score(solution_str=response, **fields))[0]
        for response in ("<answer>9</answer> no: <answer> 11 </answer>", "11", "12", "eleven")
    }
    assert list(scores.values()) == [1.0, 1.0, 0.01, 0.0]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("summs?size=2", "has no task 'summs'; it has sums"),
        ("sums?size=0", "size must be positive"),
        ("sums?length=2", "unexpected keyword argument 'length'"),
        ("puzzle24?difficulty=1", "no levels of difficulty"),
        ("game_of_life_halting", "gives 1 for wrong answers"),
        ("coin_flip", "gives 1 for wrong answers"),
    ],
)
def test_wrong_tasks_and_options_are_named(gym: None, tmp_path: Path, address: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fetch_files(f"reasoning_gym://{address}", tmp_path)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"\[reasoning-gym\]"):
        find_files("reasoning_gym://sums")


def test_a_row_without_its_entry_is_an_error() -> None:
    with pytest.raises(RewardError, match="no entry of the task"):
        compute_score("reasoning_gym/sums", "1", "1", {})


HOSTILE = [
    '__import__("os").system("true")',
    "exec(open)",
    "().__class__",
    "1 if exec else 2",
    "x.func",
    "(1).real",
    "sympify(x)",
    "1e5.real",
    "f'{1}'",
    "[1][0]",
    "9" * 501,
    "\uff45xec(1)",  # Python reads these letters as ASCII
    "N(sqrt(2), 10**8)",  # digits
    "9**9**9",
    "(9**999)**(999**9)",
    "2 - sqrt(9**9**9)",
    "exp(exp(exp(99)))",
    "E**E**E**E**E",
    "1e99999",
    "cosh(9**9)",
]


@pytest.mark.parametrize("answer", HOSTILE)
def test_answers_that_could_run_code_never_reach_verifiers_that_evaluate(gym: None, answer: str) -> None:
    assert not is_harmless("puzzle24", answer)
    info = {"entry": json.dumps({"answer": "", "metadata": {"one": 1}}), "options": "{}"}
    assert compute_score("reasoning_gym/puzzle24", answer, "", info)["unreadable"] == 1.0


def test_plain_answers_reach_verifiers_that_evaluate() -> None:
    answers = ["(1 + 2) * 8", "x**2/2 + C", "-sin(2*x) + 1.5e-3*exp(x)", "3*x + Abs(y)"]
    assert all(is_harmless("simple_integration", answer) for answer in answers)
    assert is_harmless("n_queens", "[['_', 'Q'], ['Q', '_']]")
    assert not is_harmless("n_queens", "print(1)")
    assert not is_harmless("n_queens", "[0] * 9**9")
    assert not is_harmless("n_queens", "[1<<(1<<40)]")


def test_numbers_that_take_too_long_or_are_none_never_reach_a_verifier() -> None:
    assert not is_harmless("fraction_simplification", "1e99999999")
    assert is_harmless("fraction_simplification", "1e9/3")
    assert not any(is_harmless("complex_arithmetic", answer) for answer in ("nan", "NaN+1j", "1 + infj"))
    assert is_harmless("complex_arithmetic", "-15.0 + 3.0i")


@pytest.mark.parametrize("error", [OverflowError, RecursionError, SyntaxError])
def test_an_answer_that_its_verifier_cannot_read_scores_0(
    gym: None, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: Any) -> float:
        raise error

    monkeypatch.setattr(Sums, "score_answer", fail)
    info = {"entry": json.dumps({"answer": ""}), "options": "{}"}
    assert compute_score("reasoning_gym/sums", "1", "", info) == {"score": 0.0, "solved": 0.0, "unreadable": 1.0}


def test_an_answer_that_its_verifier_never_finishes_scores_0(gym: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(*_: Any) -> float:
        while True:
            pass

    monkeypatch.setattr(Sums, "score_answer", spin)
    monkeypatch.setattr(scorer, "_MAX_CPU_S", 0.3)
    info = {"entry": json.dumps({"answer": ""}), "options": "{}"}
    assert compute_score("reasoning_gym/sums", "1", "", info)["unreadable"] == 1.0


def test_the_resume_digest_of_a_task_is_that_of_its_rows(
    gym: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def digest(address: str) -> str:
        settings = [f"data.train_files='{address}'", "actor_rollout_ref.model.path=some/model"]
        return digest_sources(load(settings)[0].config)[DATA]

    first = digest("reasoning_gym://sums?size=2&seed=5")
    assert digest("reasoning_gym://sums?size=2&seed=5") == first
    assert digest("reasoning_gym://sums?size=2&seed=6") != first
    monkeypatch.setattr(metadata, "version", lambda _: "0.1.26")
    assert digest("reasoning_gym://sums?size=2&seed=5") == first, "another version that makes the same rows"


def test_the_settings_of_the_example_are_valid() -> None:
    [loaded] = load(["--config-path", "examples/reasoning_gym", "--config-name", "grpo"])
    files = loaded.config.data.train_files
    assert len(files) == len(loaded.config.data.train_weights or []) == 3
    assert not set(files) & set(loaded.config.data.val_files or [])


@pytest.mark.parametrize("task", ["chain_sum?difficulty=2", "countdown", "n_queens", "arc_agi", "word_sorting"])
def test_the_answers_of_real_tasks_score_1(task: str, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    for row in read_rows(f"reasoning_gym://{task}{'&' if '?' in task else '?'}size=2", tmp_path):
        answer = row["reward_model"]["ground_truth"]
        scores = compute_score(row["data_source"], f"<answer>{answer}</answer>", answer, row["extra_info"])
        assert scores["score"] == 1.0
