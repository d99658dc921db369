"""Trying reward functions in real processes: exceptions, hangs, exits, and what `verl reward-test` prints."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from verl.cli import main
from verl.config.load import load_dict
from verl.preflight.reward_rows import read_reward_rows
from verl.preflight.reward_trial import EMPTY, REFERENCE, Call, try_reward

pytestmark = pytest.mark.contract

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
ROW = '{"prompt": "1+1=", "data_source": "mine", "ground_truth": "2"}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROW)
    return tmp_path


def set_reward(body: str) -> str:
    Path("reward.py").write_text(HEAD + body + "\n")
    return "reward.custom_reward_function.path=reward.py"


def test_a_call_that_hangs_or_exits_fails_alone(folder: Path) -> None:
    body = "exit_or_hang = {'': lambda: __import__('os')._exit(3), '#### 2': lambda: exec('while True: pass')}\n"
    setting = set_reward(body + "    exit_or_hang.get(solution_str, int)()\n    return 1.0")
    config = load_dict({}, [setting], complete=False).config
    [row] = read_reward_rows("rows.jsonl", "prompt", 4)
    calls = [Call(row, REFERENCE, text) for text in row.references] + [Call(row, EMPTY, "")]
    outcomes = asyncio.run(try_reward(config, calls, timeout_s=5.0, repeats=2))
    kinds = {outcome.call.response: outcome.failure.kind for outcome in outcomes if outcome.failure is not None}
    assert kinds == {"#### 2": "timeout", "": "died"}
    assert all(outcome.scores == [1.0, 1.0] for outcome in outcomes if outcome.failure is None)


def test_a_good_function_passes_and_a_broken_one_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = set_reward("return float(solution_str == ground_truth)")
    assert main(["reward-test", "rows.jsonl", setting]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    setting = set_reward("return float(solution_str.split()[-1] == ground_truth)")
    assert main(["reward-test", "rows.jsonl", setting]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "IndexError" in said
    assert "(empty, blank" in said
    assert "a policy could not be trained on it" in said
