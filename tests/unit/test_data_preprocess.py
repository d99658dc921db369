"""`examples/data_preprocess`: tiny raw data in, files out that a run reads and whose reference solutions score 1."""

from __future__ import annotations

import builtins
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import chat_tokenizer

from verl.data.dataset import PromptDataset, PromptOptions
from verl.rewards.reward_function import load_reward
from verl.types import Prompt

pytestmark = pytest.mark.unit

SCRIPTS = Path(__file__).parents[2] / "examples" / "data_preprocess"

GSM8K = [
    {"question": "A dozen and a thousand?", "answer": "12 + 1000 = <<12+1000=1012>>1012\n#### 1,012"},
    {"question": "Half of five?", "answer": "#### 2.5"},
    {"question": "Owing three?", "answer": "#### -3"},
]
MATH = [
    {"problem": "Half?", "solution": r"So \boxed{1} is wrong, and $\boxed{\frac{1}{2}}$ right.", "level": "Level 1"},
    {"problem": "Roots of $x^2-1$?", "solution": r"\boxed{\{-1, 1\}}"},
    {"problem": "Two?", "solution": "It is 2.", "answer": "2"},
]
CODE = [
    {
        "text": "Write a function that adds two numbers.",
        "code": "def add(a, b):\n    return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"],
        "test_setup_code": "",
    },
    {
        "question": "Read two numbers, print their sum.",
        "input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}),
        "code": "print(sum(map(int, input().split())))",
    },
    {
        "prompt": "def double(x):\n    '''Twice x.'''\n",
        "canonical_solution": "def double(x):\n    return 2 * x",
        "test": "def check(candidate):\n    assert candidate(2) == 4",
        "entry_point": "double",
    },
    {
        "problem": "Write `larger(a, b)`.",
        "inputs": [[1, 2], [5, 3]],
        "outputs": [2, 5],
        "fn_name": "larger",
        "code": "def larger(a, b):\n    return max(a, b)",
    },
]
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "The capital of Peru?"},
            {"role": "assistant", "content": "Lima"},
            {"role": "user", "content": "And of Kenya?"},
            {"role": "assistant", "content": "Nairobi"},
        ]
    },
    {"conversations": [{"from": "human", "value": "The capital of France?"}, {"from": "gpt", "value": "Paris"}]},
]


def run(script: str, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """As `python examples/data_preprocess/<script> ...` does, in this process."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    return int(ended.value.code or 0)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(path: Path) -> list[Prompt]:
    return list(PromptDataset(path, chat_tokenizer(), PromptOptions(max_prompt_length=2000)))


@pytest.mark.parametrize(
    ("script", "examples", "answers", "more"),
    [
        ("gsm8k.py", GSM8K, [row["answer"] for row in GSM8K], []),
        ("math_dataset.py", MATH, [*(row["solution"] for row in MATH[:2]), r"\boxed{2}"], ["--data_source", "math"]),
        ("code_dataset.py", CODE, [row.get("code") or row.get("canonical_solution") for row in CODE], []),
        ("multiturn.py", CHATS, ["Nairobi", "Paris"], ["--data_source", "squad"]),
    ],
)
async def test_rows_are_read_by_a_run_and_reference_solutions_score_1(
    script: str, examples: list[dict[str, Any]], answers: list[str], more: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    raw = write(tmp_path / "raw" / "train.jsonl", examples).parent
    write(raw / "test.jsonl", examples[:1])
    assert run(script, monkeypatch, "--source", raw, "--local_dir", tmp_path / "out", *more) == 0
    reward, rows = load_reward(None), prompts(tmp_path / "out" / "train.parquet")
    assert [prompt.extra_info["index"] for prompt in rows] == [*range(len(examples))]
    for prompt, answer in zip(rows, answers, strict=True):
        assert (await reward.score(prompt.data_source, answer, prompt.ground_truth, prompt.extra_info))[0] == 1.0
        assert (await reward.score(prompt.data_source, "I do not know.", prompt.ground_truth))[0] == 0.0
    [tested] = prompts(tmp_path / "out" / "test.parquet")
    assert tested.extra_info["split"] == "test"
    schema = pq.read_schema(tmp_path / "out" / "train.parquet")
    assert schema.names == ["data_source", "prompt", "reward_model", "extra_info"]
    assert {field.name for field in schema.field("reward_model").type} == {"style", "ground_truth"}


def test_all_turns_but_the_last_are_the_prompt(tmp_path: Path, monkeypatch: Any) -> None:
    raw = write(tmp_path / "train.jsonl", CHATS * 2)
    assert run("multiturn.py", monkeypatch, "--source", raw, "--local_save_dir", tmp_path, "--test_size", "0") == 0
    row = pq.read_table(tmp_path / "train.parquet").to_pylist()[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "user"]
    assert (row["reward_model"]["ground_truth"], row["extra_info"]["turns"]) == ("Nairobi", 2)
    assert not (tmp_path / "test.parquet").exists()


def test_parquet_as_the_hub_lays_it_out_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "raw" / "main"
    folder.mkdir(parents=True)
    for part, row in enumerate(GSM8K):
        pq.write_table(pa.Table.from_pylist([row]), folder / f"train-{part:05d}-of-00003.parquet")
    assert run("gsm8k.py", monkeypatch, "--source", tmp_path / "raw", "--local_dir", tmp_path, "--test_size", "1") == 0
    rows = [pq.read_table(tmp_path / f"{split}.parquet").num_rows for split in ("train", "test")]
    assert rows == [2, 1]


def test_raw_files_in_the_folder_itself_are_enough(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    write(tmp_path / "train.jsonl", GSM8K)
    write(tmp_path / "test.jsonl", GSM8K)
    assert run("gsm8k.py", monkeypatch, "--local_dir", tmp_path) == 0
    assert f"{tmp_path / 'test.parquet'}: 3 rows\n" in capsys.readouterr().out


def test_large_files_have_row_groups_that_a_reader_can_take_one_by_one(tmp_path: Path, monkeypatch: Any) -> None:
    raw = write(tmp_path / "train.jsonl", GSM8K * 1500)
    assert run("gsm8k.py", monkeypatch, "--source", raw, "--local_dir", tmp_path, "--test_size", "100") == 0
    assert pq.ParquetFile(tmp_path / "train.parquet").num_row_groups == 3


def test_unusable_examples_are_skipped_and_counted(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    bad = {"question": "?", "answer": "no number"}
    write(tmp_path / "raw" / "train.jsonl", [*GSM8K, bad])
    write(tmp_path / "raw" / "test.jsonl", GSM8K)
    assert run("gsm8k.py", monkeypatch, "--source", tmp_path / "raw", "--local_dir", tmp_path) == 0
    assert "3 rows, 1 skipped (the first: example 3 of train has a solution without a number" in capsys.readouterr().out
    write(tmp_path / "raw" / "train.jsonl", [{"problem": "?"}])
    assert run("gsm8k.py", monkeypatch, "--source", tmp_path / "raw", "--local_dir", tmp_path) == 2
    assert (
        "none of the 1 examples can be used; the first: example 0 of train has none of the fields question; it has: "
        in (capsys.readouterr().err)
    )


def test_missing_data_is_reported_with_the_fix(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = ("--local_dir", tmp_path / "out")
    assert run("gsm8k.py", monkeypatch, "--source", tmp_path, *out) == 2
    assert "does not exist" in capsys.readouterr().err
    assert run("multiturn.py", monkeypatch, *out) == 2
    assert "use a local copy with --source FOLDER" in capsys.readouterr().err
    write(tmp_path / "train.jsonl", GSM8K)
    assert run("gsm8k.py", monkeypatch, "--source", tmp_path / "train.jsonl", *out, "--test_size", "3") == 2
    assert "--test_size 3: there are only 3 examples" in capsys.readouterr().err

    real = builtins.__import__

    def without_datasets(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ModuleNotFoundError("No module named 'datasets'", name="datasets")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    assert run("gsm8k.py", monkeypatch, *out) == 2
    assert "pip install datasets, or use a local copy with --source FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.py") if path.name != "rows.py"))
def test_every_script_has_help(script: str, monkeypatch: Any, capsys: Any) -> None:
    assert run(script, monkeypatch, "--help") == 0
    assert "--local_save_dir" in capsys.readouterr().out
