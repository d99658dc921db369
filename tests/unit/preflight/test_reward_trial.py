"""What is concluded from the scores of references, empty and hostile responses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from verl.commands.reward_test import HELP, format_table, judge
from verl.config.load import load_dict
from verl.preflight.finding import Finding, Severity
from verl.preflight.hostile_responses import list_hostile_responses
from verl.preflight.reward_rows import RewardRow, list_references
from verl.preflight.reward_trial import EMPTY, REFERENCE, Call, Outcome
from verl.types import Failed, Scored

pytestmark = pytest.mark.unit

ROW = RewardRow("train.parquet, row 0", "1+1=", "addition", "2", {}, ("2", "#### 2"))
HOSTILE = "an open box"


def make(kind: str, *results: float | Failed, response: str = "", seconds: float = 0.01) -> Outcome:
    scored = tuple(result if isinstance(result, Failed) else Scored(result, {}) for result in results)
    return Outcome(Call(ROW, kind, response or kind), scored, (seconds,) * len(scored))


def find(*outcomes: Outcome) -> list[Finding]:
    config = load_dict({}, ["data.train_batch_size=8", "rollout.n=4"], complete=False).config
    return judge(config, outcomes).sorted_findings


def test_a_reward_that_tells_the_reference_from_all_others_has_no_findings() -> None:
    assert find(make(REFERENCE, 1.0, 1.0), make(REFERENCE, 0.0, 0.0), make(EMPTY, 0.0), make(HOSTILE, 0.0)) == []


@pytest.mark.parametrize(
    ("outcomes", "severity", "text"),
    [
        ([make(REFERENCE, 0.0), make(EMPTY, 0.5)], Severity.WARNING, "no higher than an empty response on 1 of 1 rows"),
        ([make(REFERENCE, 0.0), make(EMPTY, 0.0), make(HOSTILE, 1.0)], Severity.WARNING, "on 1 of 1 rows"),
        ([make(REFERENCE, 1.0, 0.5), make(EMPTY, 0.0)], Severity.WARNING, "different scores for 1 of 2 responses"),
        (
            [make(REFERENCE, 1.0), make(EMPTY, 0.0), make(HOSTILE, 1.0)],
            Severity.WARNING,
            "as high as the reference solution score: an open box",
        ),
        (
            [make(REFERENCE, 1.0), make(EMPTY, 0.0), make(HOSTILE, Failed("error", "f: raised X\n  fix it"))],
            Severity.ERROR,
            "no score for 1 of 3 responses (an open box)",
        ),
        (
            [make(REFERENCE, 1.0, seconds=2.0), make(EMPTY, 0.0, seconds=2.0)],
            Severity.WARNING,
            "2.0 s (median of 2): 64 s for the 32 responses of a step",
        ),
    ],
)
def test_each_fault_of_a_reward_is_found(outcomes: list[Outcome], severity: Severity, text: str) -> None:
    [finding] = find(*outcomes)
    assert finding.severity == severity
    assert text in finding.problem
    assert finding.fix


def test_one_score_for_everything_is_an_error() -> None:
    first, *_ = find(make(REFERENCE, 1.0), make(EMPTY, 1.0), make(HOSTILE, 1.0))
    assert first.severity == Severity.ERROR
    assert first.problem == "every response scores 1, so that nothing can be learned"


def test_references_are_solutions_of_the_row_and_the_ground_truth_in_usual_forms() -> None:
    forms = ("7", "#### 7", "\\boxed{7}", "<answer>7</answer>", "The answer is 7.")
    assert list_references(7, {}) == forms
    assert list_references("7", {"answer": "3 + 4 = 7"}) == ("3 + 4 = 7", *forms)
    assert list_references(["7", "seven"], {}) == forms
    assert list_references({"tests": []}, {}) == ()


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}], None])
def test_hostile_responses_can_be_encoded_and_are_as_many_as_the_help_says(prompt: Any) -> None:
    responses = list_hostile_responses(prompt, "12")
    assert all(text.encode() is not None for text in responses.values())
    assert f"an empty response, and {len(responses)} hostile" in " ".join(HELP.split())
    assert not any(text.strip() == "12" for text in responses.values())


def test_a_line_shows_the_scores_and_times_of_each_kind() -> None:
    table = format_table([make(REFERENCE, 1.0), make(REFERENCE, 0.0), make(EMPTY, Failed("error", "x"))])
    head, reference, empty, *_ = table.splitlines()
    assert head.split() == ["response", "scores", "median", "longest", "failed"]
    assert re.fullmatch(r"reference +0 to 1 +10.0 ms +10.0 ms", reference)
    assert re.fullmatch(r"empty +none +10.0 ms +10.0 ms +1", empty)
