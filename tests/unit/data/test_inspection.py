"""`verl data`: what is shown is what a run would see, and every problem comes with its fix."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import chat_tokenizer
from transformers import PreTrainedTokenizerFast

from verl.commands.data import bin_lengths, draw_bars, open_console, show_report, show_rows
from verl.data.dataset import PromptDataset, PromptOptions
from verl.data.inspection import DataInspector, InspectionReport
from verl.errors import DataError
from verl.rewards.reward_function import describe_scorer, explain_no_scorer
from verl.rewards.settings import RewardFunctionSettings

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def good(content: str = "2+2", **more: Any) -> dict[str, Any]:
    row = {"prompt": user(content), "data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}}
    return {**row, "level": 1, **more}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def look(files: Any, tokenizer: Any = None, own: str | None = None, **options: Any) -> DataInspector:
    return DataInspector(
        files,
        tokenizer=tokenizer,
        describe_scorer=lambda source: describe_scorer(source, RewardFunctionSettings(own)),
        explain_no_scorer=explain_no_scorer,
        **options,
    )


def report(
    data: DataInspector, max_prompt_length: int = 100, is_overlong_fatal: bool = True, **options: Any
) -> InspectionReport:
    return data.inspect(max_prompt_length=max_prompt_length, is_overlong_fatal=is_overlong_fatal, **options)


def shown(data: DataInspector, seen: InspectionReport, *, rows: Any = (0,), whole: bool = False, **options: Any) -> str:
    out = open_console(file=io.StringIO(), width=80)
    settings = {"max_prompt_length": 100, "fate": "they are left out"} | options
    show_rows(data, out, rows, whole=whole)
    show_report(data, seen, out, **settings)
    return out.file.getvalue()


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_row_is_what_training_would_see(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    first = write(tmp_path / f"a{suffix}", [good("1"), good("2", extra_info={"index": 7})])
    second = write(tmp_path / f"b{suffix}", [good("3")])
    data, trained = (
        look([first, second], tokenizer),
        PromptDataset([first, second], tokenizer, PromptOptions(max_prompt_length=99)),
    )
    assert data.total_rows == 3
    for number, prompt in enumerate(trained):
        row = data.row(number)
        assert row.token_ids == prompt.token_ids
        expected = (prompt.data_source, prompt.ground_truth, prompt.extra_info)
        assert (row.data_source, row.ground_truth, row.extra_info) == expected
    assert data.row(2).location.startswith(str(second))
    assert data.row(1).text == "<|start|>user\n2<|end|><|start|>assistant\n"
    with pytest.raises(DataError, match="--row 3: rows go from 0 to 2"):
        data.row(3)


def test_without_a_tokenizer_messages_are_shown_as_written_and_lengths_are_characters(tmp_path: Path) -> None:
    data = look(write(tmp_path / "a.parquet", [good("12+34")]))
    assert (data.row(0).text, data.row(0).token_ids, data.unit) == ("user: 12+34", None, "characters")
    found = report(data, max_prompt_length=3)
    assert (found.lengths.tolist(), found.problems) == ([11], [])
    assert "set actor_rollout_ref.model.path=... for lengths in tokens" in shown(data, found)


def test_every_column_has_its_use(tmp_path: Path) -> None:
    assert look(write(tmp_path / "a.parquet", [good(extra_info={"x": 1}, answer="4")])).describe_columns() == {
        "prompt": "the prompt",
        "data_source": "selects the scorer, and is passed to it",
        "reward_model": "its ground_truth is passed to the scorer, its other fields as extra_info",
        "level": "passed to the scorer as extra_info['level']",
        "extra_info": "passed to the scorer",
        "answer": "passed to the scorer as extra_info['answer']",
    }
    raw = look(write(tmp_path / "b.jsonl", [{"question": "2+2", "answer": "4"}]), prompt_key="question")
    assert raw.describe_columns() == {"question": "the prompt", "answer": "the ground truth"}


def test_good_data_has_no_problems(tmp_path: Path, tokenizer: Any) -> None:
    data = look(write(tmp_path / "a.parquet", [good("1"), good("2")]), tokenizer)
    found = report(data)
    assert (found.rows, found.problems, dict(found.sources)) == (2, [], {"gsm8k": 2})
    assert found.lengths.tolist() == [len(data.row(0).token_ids or [])] * 2


PROBLEMS: list[tuple[dict[str, Any], str, str, bool]] = [
    (good(prompt=""), "line 2: the prompt is an empty string; remove the row or fill it", "", True),
    (good(prompt=[{"role": "user"}]), "line 2: message 0 of the prompt has no content", "", True),
    (good(prompt=user("  ")), "line 2: the prompt is blank", "fill it, or remove the row", False),
    (good(data_source="gsm8K"), "no built-in scorer knows it; did you mean 'gsm8k'? Fix the column", "", True),
    (good(data_source=None), "data_source: rows without one have no built-in scorer. Add the column", "", True),
    (good(reward_model=None), "line 2: no ground truth", "write it as reward_model", True),
    (good(reward_model='{"ground_truth": 4}'), "line 2: column 'reward_model' holds text", "", True),
    (good("the first"), "line 2: the prompt is a duplicate of ", "remove one of them, unless it is intended", False),
    (
        good(prompt="2+2"),
        "line 2: the prompt is a string without special tokens",
        "to apply it, write the prompt as",
        False,
    ),
    (good("x" * 100), "1 prompts are longer than data.max_prompt_length=100", "set data.max_prompt_length=118", True),
]


@pytest.mark.parametrize(("row", "what", "fix", "fatal"), PROBLEMS)
def test_a_problem_is_named_with_its_place_and_its_fix(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], what: str, fix: str, fatal: bool
) -> None:
    data = look(write(tmp_path / "a.jsonl", [good("the first"), row]), tokenizer)
    [problem] = report(data).problems
    assert what in problem.text
    assert problem.fix.startswith(fix)
    assert problem.fatal is fatal
    text = shown(data, report(data))
    assert (problem.text in text, problem.fix in text, "✓ none found" in text) == (True, True, False)


def test_a_line_that_is_not_json_does_not_hide_other_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [good("1")])
    path.write_text(path.read_text() + "oops\n" + json.dumps(good("2")) + "\n")
    found = report(look(path))
    assert [problem.text for problem in found.problems if "line 2: not valid JSON" in problem.text]
    assert (len(found.problems), found.rows, len(found.lengths)) == (1, 3, 2)


def test_a_missing_prompt_column_is_one_problem_and_the_rest_is_still_shown(tmp_path: Path) -> None:
    data = look(
        write(tmp_path / "a.parquet", [{"question": str(n), "data_source": "gsm8k", "answer": "4"} for n in "12"])
    )
    found = report(data)
    [problem] = found.problems
    assert "column 'prompt' not found" in problem.text
    assert problem.text.endswith("Set data.prompt_key=question")
    text = shown(data, found)
    assert "no prompt can be measured" in text
    assert "verl.rewards.scorers.gsm8k" in text


def test_rows_with_the_same_problem_are_counted_and_the_first_is_shown(tmp_path: Path) -> None:
    rows = [good(str(n)) if n % 3 else good(prompt=None) for n in range(3000)]
    [problem] = report(look(write(tmp_path / "a.parquet", rows))).problems
    assert problem.text.startswith(f"1,000 rows, the first {tmp_path / 'a.parquet'}, row 0: the prompt is missing")


def test_training_prompts_in_a_test_file_are_found(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.parquet", [good("1"), good("2")]), write(tmp_path / "test.jsonl", [good("2")])
    [problem] = report(look([train, test])).problems
    assert problem.text == f"{test}, line 1: the prompt is a duplicate of {train}, row 1"


def test_empty_files_and_files_with_other_columns_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [good("1")])
    empty = write(tmp_path / "empty.jsonl", [])
    other = write(tmp_path / "b.jsonl", [good("2", hint="x")])
    said = [(problem.text, problem.fatal) for problem in report(look([first, empty, other])).problems]
    assert said[0] == (f"{empty} has no rows", False)
    assert said[1] == (f"{other} also has hint, unlike a.jsonl; reward functions get the columns of each row", False)
    nothing = look(empty)
    [problem] = report(nothing).problems
    assert problem.fatal
    assert "has no rows" in shown(nothing, report(nothing), rows=())


def test_a_custom_function_scores_every_source_and_needs_no_ground_truth(tmp_path: Path) -> None:
    data = look(write(tmp_path / "a.jsonl", [good(data_source="mine", reward_model=None)]), own="my_reward.py")
    [problem] = report(data).problems
    assert (problem.fatal, "the scorer gets None" in problem.fix) == (False, True)
    assert "my_reward.py:compute_score" in shown(data, report(data))


def test_with_a_limit_only_the_first_rows_are_inspected(tmp_path: Path) -> None:
    files = [write(tmp_path / name, [good(f"{name}{n}") for n in range(5)]) for name in ("a.jsonl", "b.parquet")]
    for limit, rows in ((3, 3), (7, 7), (100, 10)):
        assert report(look(files), limit=limit).rows == rows


def test_special_tokens_blanks_and_ids_are_visible(tmp_path: Path, tokenizer: Any) -> None:
    data = look(write(tmp_path / "a.jsonl", [good("a b"), good("x" * 200)]), tokenizer)
    lines = shown(data, report(data, 1000)).splitlines()
    assert "│ <|start|>user" in lines
    assert "│ a b<|end|><|start|>assistant" in lines
    pieces = next(place for place, line in enumerate(lines) if line.startswith("  <|start|>  u"))
    assert lines[pieces].split()[:9] == ["<|start|>", "u", "s", "e", "r", "⏎", "a", "·", "b"]
    assert lines[pieces + 1].split()[:9] == ["0", "117", "115", "101", "114", "10", "97", "32", "98"]
    assert "... 166 more ..." in shown(data, report(data, 1000), rows=[1])
    assert "more ..." not in shown(data, report(data, 1000), rows=[1], whole=True)


@pytest.mark.parametrize(
    ("limit", "said"), [(100, "all are within data.max_prompt_length=100"), (30, "1 of 2 (50.00%) exceed")]
)
def test_the_limit_is_marked_and_what_is_beyond_it_is_counted(
    tmp_path: Path, tokenizer: Any, limit: int, said: str
) -> None:
    data = look(write(tmp_path / "a.jsonl", [good("1"), good("1" * 40)]), tokenizer)
    text = shown(data, report(data, limit, is_overlong_fatal=False), max_prompt_length=limit)
    assert text.count(f"◂ max_prompt_length={limit}") == 1
    assert said in text


LENGTHS = st.lists(st.integers(0, 100_000), min_size=1, max_size=60).map(lambda found: np.array(found, np.int64))


@given(LENGTHS)
def test_every_length_is_in_exactly_one_of_few_bins(lengths: npt.NDArray[np.int64]) -> None:
    found = bin_lengths(lengths)
    assert sum(count for *_, count in found) == len(lengths)
    assert len(found) <= 15
    assert all(left[1] == right[0] for left, right in pairwise(found))


@given(LENGTHS, st.integers(1, 200_000))
def test_the_limit_is_marked_once_unless_all_are_beyond_it(lengths: npt.NDArray[np.int64], limit: int) -> None:
    marks = sum("◂" in line.plain for line in draw_bars(lengths, limit))
    assert marks == (0 if limit < bin_lengths(lengths)[0][0] else 1)


def test_a_thin_tail_does_not_flatten_the_rest() -> None:
    lengths = np.array([*range(50, 150)] * 10 + [90_000], np.int64)
    found = bin_lengths(lengths)
    assert len(found) > 8
    assert found[-1] == (150, None, 1)


def test_on_a_terminal_only_what_should_stand_out_does(tmp_path: Path, tokenizer: Any) -> None:
    data = look(write(tmp_path / "a.jsonl", [good("a b"), good(prompt="")]), tokenizer)
    out = open_console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    show_rows(data, out, [0], whole=False)
    show_report(data, report(data), out, max_prompt_length=100, fate="")
    text = out.file.getvalue()
    assert "\x1b[2m│ \x1b[0ma b\x1b[1;35m<|end|>" in text
    assert '\x1b[1mground_truth  \x1b[0m"4"' in text
    assert f"\x1b[1;31m✗ \x1b[0m{tmp_path / 'a.jsonl'}, line 2: the prompt is an empty string" in text


def test_control_characters_of_rows_do_not_reach_the_terminal(tmp_path: Path) -> None:
    hostile = "\x1b]0;title\x07\x9b2J"
    data = look(write(tmp_path / "a.jsonl", [good(f"2+2{hostile}", data_source=hostile)]))
    text = shown(data, report(data))
    assert "2+2␛]0;title" in text
    assert not set("\x1b\x07\x9b") & set(text)
