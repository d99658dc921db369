"""`verl show` selects, sorts and compares recorded samples, and shows hostile ones as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from verl.commands.runs.show import main
from verl.errors import VerlError
from verl.tracking.sample_files import get_sample_file
from verl.types import Prompt, Sample
from verl.workers.sample_rows import SampleFile, SampleWriter, TokenValues

pytestmark = pytest.mark.unit

WORDS = ["", "What is", " 1+1?", " two", " three", " \x1b[31mred", " tool says 2", " so two"]


def decode(tokens: Sequence[int], keep_special: bool) -> str:
    return "".join(WORDS[token] for token in tokens)


def sample(group: int, index: int, response: list[int], score: float, mask: list[int] | None = None) -> Sample:
    tokens = np.array([1, 2, *response], np.int32)
    generated = np.array([0, 0, *(mask or [1] * len(response))], bool)
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(group, tokens, generated, zeros, zeros.astype(np.int32), score, index=index, metrics={"format": 1.0})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("")
    steps = {
        ("train", 3): [sample(0, 0, [3], 1.0), sample(0, 1, [4], 0.0), sample(5, 0, [5], 0.5)],
        ("val", 0): [sample(0, 0, [4], 0.0), sample(8, 0, [3], 1.0), sample(9, 0, [4], 0.0)],
        ("val", 9): [sample(0, 0, [3], 1.0), sample(8, 0, [3], 1.0), sample(9, 0, [3, 6, 7], 0.5, [1, 0, 1])],
    }
    for (split, step), samples in steps.items():
        values = TokenValues(np.ones(3, np.float32), np.full(3, 0.25, np.float32)) if split == "train" else None
        file = SampleFile(get_sample_file(tmp_path, split, step), split, step, {}, [])
        prompt = Prompt(0, [1, 2], "sums", "two")
        SampleWriter(decode).write(file, [(each, prompt, values) for each in samples])
    return tmp_path


def show(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> str:
    assert main([str(run), *options]) == 0
    return capsys.readouterr().out


def test_groups_are_lines_of_the_last_step_of_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, run)
    assert "train step 3: 3 recorded samples" in out
    assert [line.split()[:6] for line in out.splitlines()[2:]] == [
        ["group", "0", "mean", "0.500", "1", "0"],
        ["group", "5", "mean", "0.500", "0.5", "What"],
    ]


def test_the_worst_come_first_with_their_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, run, "--worst", "2")
    assert out.index("What is 1+1? three") < out.index("score 0.5")
    assert "score 0  format 1  advantage 0.25  stop  sums  truth two" in out
    assert "score 1 " not in out
    assert "What is 1+1? two" in show(capsys, run, "--best", "1")


def test_a_conversation_has_its_tool_results(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "What is 1+1? two tool says 2 so two" in show(capsys, run, "--split", "val", "--group", "9")


def test_samples_are_filtered_by_text_and_score(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 recorded samples" in show(capsys, run, "--find", "three")
    assert "2 recorded samples" in show(capsys, run, "--score", "0.5:")
    assert "1 recorded samples" in show(capsys, run, "--score", ":0.2")


def test_two_steps_are_compared_by_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, run, "--compare", "0", "9")
    assert "3 prompts: 2 better, 0 worse, 1 the same" in out
    changes = ["group 0  0.000 → 1.000", "group 9  0.000 → 0.500", "group 8  1.000 → 1.000"]
    assert changes == sorted(changes, key=out.index)


def test_control_characters_of_responses_do_not_reach_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = show(capsys, run, "--group", "5")
    assert "\x1b[31m" not in out
    assert "␛[31mred" in out


def test_what_is_not_there_is_named(run: Path, tmp_path: Path) -> None:
    for options, message in (
        (["--step", "4"], "step 4 has no samples; near it: 0, 3, 9"),
        (["--group", "77"], "--group 77: step 3 has no such sample"),
        (["--split", "train", "--compare", "3", "4"], "step 4 has no samples"),
    ):
        with pytest.raises(VerlError, match=message.replace("(", r"\(")):
            main([str(run), *options])
    with pytest.raises(VerlError, match="no such folder"):
        main([str(tmp_path / "none")])
