"""`verl data` shows prompts with the tools that the model will see."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sample_tools
from chat_bpe import bpe_tokenizer

from verl.commands.data import main

pytestmark = pytest.mark.unit


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    bpe_tokenizer().save_pretrained(tmp_path / "model")
    row = {"data_source": "keys", "prompt": [{"role": "user", "content": "What is red?"}], "ground_truth": "7"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    return [
        str(tmp_path / "train.parquet"),
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"reward.custom_reward_function.path={reward}",
        "data.max_prompt_length=4000",
        "--row=0",
    ]


def test_prompts_are_shown_with_their_tools(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    tools = ["enable=true", f"function_tool_path={sample_tools.__file__}"]
    code = main([*arguments, *(f"actor_rollout_ref.rollout.multi_turn.{each}" for each in tools)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "Return the value of a key." in shown
    main(arguments)
    assert "Return the value of a key." not in capsys.readouterr().out
