"""`verl generate` and `verl eval` in one process, with transformers as the engine: resumed runs, scores, figures."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_bpe import bpe_tokenizer
from transformers import AutoTokenizer

from verl.cli import main
from verl.commands.models import generate as generate_command
from verl.commands.models.response_files import PartFiles
from verl.config.load import load_dict
from verl.demo.assets import make_assets, make_model
from verl.demo.folder import Assets

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("assets"))


def generate(assets: Assets, output: Path, *more: str, files: Sequence[str] | None = None) -> int:
    return main(
        [
            *(
                "generate",
                *([str(assets.test)] if files is None else files),
                "--output",
                str(output),
                "--part",
                "2",
                f"model.path={assets.model}",
            ),
            *("rollout.name=hf", "rollout.n=2", "data.max_prompt_length=8", "data.max_response_length=4"),
            *("data.train_max_samples=5", "trainer.local=True", *more),
        ]
    )


def test_an_interrupted_run_resumes_and_gives_the_same_responses(
    assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole.parquet", tmp_path / "broken.parquet"
    assert generate(assets, whole) == 0
    table = pq.read_table(whole).to_pylist()
    assert [row["extra_info"]["index"] for row in table] == [0, 1, 2, 3, 4]
    assert all(len(row["responses"]) == len(row["finish_reasons"]) == 2 for row in table)
    assert all(1 <= length <= 4 for row in table for length in row["response_lengths"])

    write, written = PartFiles.write, []

    def dies_in_the_third(self: PartFiles, start: int, rows: pa.Table) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(start)
        write(self, start, rows)

    with monkeypatch.context() as patched:
        patched.setattr(PartFiles, "write", dies_in_the_third)
        assert generate(assets, broken) == 130
    assert not broken.exists()
    assert generate(assets, broken, "rollout.temperature=0.5") == 2
    assert "parts of a run with other settings or files" in capsys.readouterr().err
    assert generate(assets, broken, "--part", "3") == 2  # its parts would overlap with those that are there
    assert "parts of a run with other settings or files" in capsys.readouterr().err
    assert generate(assets, broken) == 0
    assert "2 parts of 2 prompts are finished" in capsys.readouterr().out
    assert pq.read_table(broken).to_pylist() == table
    assert not broken.with_name("broken.parquet.parts").exists()
    assert generate(assets, broken) == 2
    assert "already exists" in capsys.readouterr().err


def test_rows_keep_all_columns_that_any_of_them_has(
    assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "extra_info": {}, "mixed": 1},
        {"prompt": "1+2=", "extra_info": {}, "mixed": "one", "late": [1]},
        {"prompt": "1+3=", "mixed": None, "number": 1, "nested": {"inner": {}}},
        {"prompt": "1+4=", "number": 2.5, "nested": {"inner": {}, "more": "x"}, "responses": "of another run"},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert generate(assets, tmp_path / "a.parquet", f"data.train_files={data}", files=[]) == 0
    found = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row.pop("prompt") for row in found] == [row["prompt"] for row in rows]
    assert all(len(row.pop("responses")) == len(row.pop("finish_reasons")) == 2 for row in found)
    assert all(len(row.pop("response_lengths")) == 2 for row in found)
    none = dict.fromkeys(["extra_info", "mixed", "late", "number", "nested"])
    assert found == [
        none | {"mixed": "1"},
        none | {"mixed": '"one"', "late": [1]},
        none | {"number": 1.0, "nested": {"inner": None, "more": None}},
        none | {"number": 2.5, "nested": {"inner": None, "more": "x"}},
    ]
    said = capsys.readouterr().out
    assert "column 'mixed' has values of different types and is written as JSON text" in said
    assert "column 'responses' of the files is dropped" in said


def test_parts_of_other_files_are_not_mixed(assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, tokenizer = tmp_path / "data.jsonl", tmp_path / "tokenizer"
    data.write_text('{"prompt": "1+1="}\n')
    AutoTokenizer.from_pretrained(assets.model).save_pretrained(tokenizer)
    given = {"data": {"train_files": str(data)}, "actor_rollout_ref": {"model": {"path": str(assets.model)}}}
    given["actor_rollout_ref"]["model"]["tokenizer_path"] = str(tokenizer)
    config = load_dict(given).config
    made = generate_command._describe_inputs(config)
    assert generate_command._describe_inputs(config) == made
    data.write_text('{"prompt": "1+22="}\n')
    changed = generate_command._describe_inputs(config)
    assert changed != made
    os.utime(tokenizer / "tokenizer.json", ns=(1, 1))
    assert generate_command._describe_inputs(config) != changed
    assert generate(assets, tmp_path / "answers.jsonl") == 2
    assert "must end in .parquet or .pq; try --output" in capsys.readouterr().err


def test_greedy_responses_are_allowed_and_equal_ones_are_noticed(
    assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = ["rollout.temperature=0", "algorithm.adv_estimator=grpo_passk"]
    assert generate(assets, tmp_path / "a.parquet", *greedy, "rollout.n=1") == 0
    said = capsys.readouterr().out
    assert "hint: " not in said  # the short names are documented
    assert "greedy responses" not in said
    assert generate(assets, tmp_path / "b.parquet", *greedy) == 0
    assert "2 greedy responses to a prompt are all equal" in " ".join(capsys.readouterr().out.split())
    for row in pq.read_table(tmp_path / "b.parquet").to_pylist():
        assert row["responses"][0] == row["responses"][1]


def answers(path: Path) -> Path:
    rows = [
        {"data_source": source, "ground_truth": "4", "responses": responses}
        for source, responses in [
            ("gsm8k", ["#### 4", "#### 5", "#### 4", "#### 4"]),
            ("gsm8k", ["#### 1", "#### 1", "#### 4", "#### 2"]),
            ("addition", ["4", "4", "4", "4"]),
        ]
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_responses_are_scored_by_built_in_scorers_and_counted_by_data_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = answers(tmp_path / "responses.parquet"), tmp_path / "figures.json"
    assert main(["eval", str(path), "--output", str(output), "--k", "1,2,9"]) == 0
    assert "--k 9: no prompt has 9 scored responses" in capsys.readouterr().out
    assert main(["eval", str(path), "--output", str(output), "--k", "1,2"]) == 0
    found = json.loads(output.read_text())
    assert found["failures"] == 0
    gsm8k = {name: one["value"] for name, one in found["data_sources"]["gsm8k"].items()}
    assert gsm8k == {"mean@4": 0.5, "pass@1": 0.5, "pass@2": pytest.approx((1.0 + 0.5) / 2), "maj@4": 0.5}
    assert found["data_sources"]["addition"]["maj@4"]["value"] == 1.0
    scores = [json.loads(line) for line in (tmp_path / "responses.scores.jsonl").read_text().splitlines()]
    assert len(scores) == 12
    assert {"location", "data_source", "index", "response", "score", "metrics"} <= scores[0].keys()
    assert "pass@2" in capsys.readouterr().out


def test_failures_of_a_custom_reward_are_not_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = answers(tmp_path / "responses.parquet")
    reward = tmp_path / "mine.py"
    reward.write_text("def compute_reward(response, **others):\n    return 1 / (0 if '5' in response else 1)\n")
    own = [f"reward.custom_reward_function.path={reward}", "reward.custom_reward_function.name=compute_reward"]
    assert main(["eval", str(path), *own, "reward.max_failure_rate=0.01"]) == 2
    assert "1 of 12 responses could not be scored" in capsys.readouterr().err
    assert main(["eval", str(path), *own, "reward.max_failure_rate=0.2"]) == 0
    assert "mean@4     1.0000" in capsys.readouterr().out


def test_missing_responses_are_failures_and_no_responses_at_all_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluated(*responses: Any) -> int:
        path = tmp_path / "answers.jsonl"
        rows = ({"data_source": "addition", "ground_truth": "4", "responses": each} for each in responses)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return main(["eval", str(path), "reward.max_failure_rate=0.5"])

    assert evaluated(["4", None], [], ["4", 7], "4") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 of 6 responses could not be scored" in said
    assert "line 1, column 'responses': no response" in said
    assert evaluated(["4", None], None) == 2
    assert "2 of 3 responses could not be scored" in capsys.readouterr().err
    for nothing in ([[], []], [None], []):
        assert evaluated(*nothing) == 2
        assert "no responses in column 'responses'" in capsys.readouterr().err
    assert evaluated(7) == 2
    assert "line 1, column 'responses': responses must be a text or a list of texts, not int" in capsys.readouterr().err


def test_settings_may_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(data_source, solution_str, ground_truth, **_): return 0.25\n")
    (tmp_path / "mine.yaml").write_text(f"reward:\n  custom_reward_function:\n    path: {tmp_path / 'mine.py'}\n")
    path = answers(tmp_path / "responses.parquet")
    assert main(["eval", "--config-path", str(tmp_path), "--config-name", "mine", str(path)]) == 0
    assert "mean@4     0.2500" in capsys.readouterr().out


def test_missing_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 2
    assert "name a file with responses" in capsys.readouterr().err
    assert main(["eval", str(answers(tmp_path / "a.parquet")), "--responses", "answer"]) == 2
    assert "no column 'answer'; columns: data_source, ground_truth, responses" in capsys.readouterr().err
    judged = ["reward.reward_model.enable=True", "reward.reward_model.model_path=mine"]
    assert main(["eval", str(tmp_path / "a.parquet"), *judged]) == 2
    assert "verl eval only supports reward functions" in capsys.readouterr().err
    assert main(["generate"]) == 2
    assert "2 settings are wrong" in capsys.readouterr().err


ECHO = '''
class Echo:
    """Repeats what the model says, once; the last turn earns a half."""

    def reset(self, row):
        if row["ground_truth"] == "broken":
            raise OSError("no board")
        self.turns = 0
        return "Say something."

    def step(self, reply):
        self.turns += 1
        return ([{"role": "user", "content": f"You said {reply.content}"}], 0.5 * self.turns, self.turns == 2)
'''


def test_episodes_of_an_environment_are_written_as_conversations_with_their_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = bpe_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "echo.py").write_text(ECHO)
    prompt = [{"role": "user", "content": "Hello"}]
    rows = [{"prompt": prompt, "reward_model": {"ground_truth": truth}} for truth in ("a", "broken", "c")]
    data, output = tmp_path / "data.jsonl", tmp_path / "episodes.parquet"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["rollout.name=hf", "rollout.n=2", "data.max_prompt_length=64", "data.max_response_length=64"]
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    settings += [f"{multi_turn}.enable=true", f"{multi_turn}.environment={tmp_path / 'echo.py'}:Echo"]
    settings += [f"model.path={tmp_path / 'model'}", "trainer.local=True", "rollout.temperature=0.1"]
    assert main(["generate", str(data), "--output", str(output), *settings]) == 0
    first, broken, last = pq.read_table(output).to_pylist()
    assert "2 episodes failed (finish_reasons: error), one:" in capsys.readouterr().out
    assert broken["finish_reasons"] == ["error", "error"]
    assert broken["rewards"] == [None, None]
    for row in (first, last):
        for text, reward in zip(row["conversations"], row["rewards"], strict=True):
            conversation = json.loads(text)
            assert [message["role"] for message in conversation][:2] == ["user", "assistant"]
            assert conversation[0]["content"] == "Say something."
            assert reward in (0.5, 1.5), "of one turn, if it used all tokens, or of two"
            replies = [message["content"] for message in conversation if message["role"] == "assistant"]
            assert len(replies) == (2 if reward == 1.5 else 1)
