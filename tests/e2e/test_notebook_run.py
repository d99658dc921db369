"""The example notebook runs as it is, with a tiny model in place of the one that would be downloaded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GenerationConfig

from verl.demo.folder import Assets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


def test_the_notebook_trains(assets: Assets) -> None:
    GenerationConfig(eos_token_id=list(range(1, 33))).save_pretrained(assets.model)  # short responses
    command = [sys.executable, ROOT / "tests/run_notebook.py", ROOT / "examples/grpo/train_from_python.ipynb"]
    command += [f"Qwen/Qwen2.5-0.5B-Instruct={assets.model}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = re.search(r"reward (\S+) -> (\S+); the model is in", done.stdout)
    assert rewards is not None, done.stdout
    assert float(rewards[2]) > float(rewards[1])
