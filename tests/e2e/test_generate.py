"""`verl generate` with vLLM under Ray, and `verl eval` on what it wrote, as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from verl.demo.folder import Assets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.rotating(2)]


def verl(*arguments: object) -> str:
    command = [sys.executable, "-m", "verl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_generate_and_eval_a_file_of_prompts(assets: Assets, tmp_path: Path) -> None:
    responses, figures = tmp_path / "responses.parquet", tmp_path / "figures.json"
    output = verl(
        *("generate", assets.test, "--output", responses, "--part", 4, f"model.path={assets.model}", "rollout.n=3"),
        *("data.max_prompt_length=8", "data.max_response_length=4", "data.train_max_samples=10"),
        "trainer.n_gpus_per_node=1",
    )
    assert "8 of 10 prompts are finished" in output
    rows = pq.read_table(responses).to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == list(range(10))
    assert all(len(row["responses"]) == 3 for row in rows)
    assert any(len(set(row["responses"])) == 3 for row in rows), "every answer has a seed of its own"
    assert not responses.with_name("responses.parquet.parts").exists()

    shown = verl("eval", responses, "--output", figures)
    [found] = json.loads(figures.read_text())["data_sources"].values()
    assert set(found) == {"mean@3", "pass@1", "pass@2", "pass@3", "maj@3"}
    assert "mean@3" in shown
