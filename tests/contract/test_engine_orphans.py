"""A real engine whose owner is killed, so that nobody can end it: it ends by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

OWNER = """
import asyncio, sys
from verl.rollout.vllm.engine import VllmEngine
from verl.rollout.vllm.settings import VllmSettings

async def main():
    engine = VllmEngine(VllmSettings(sys.argv[1], dtype="float32", max_model_len=64, max_num_seqs=16))
    await engine.start()
    print("up", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_vllms_process_does_not_outlive_its_owner(tmp_path: Path) -> None:
    Qwen2ForCausalLM(tiny_qwen2(vocab_size=64, max_position_embeddings=128)).save_pretrained(tmp_path / "model")
    (tmp_path / "owner.py").write_text(OWNER)
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert "up\n" in iter(owner.stdout.readline, "")
        below = psutil.Process(owner.pid).children(recursive=True)
        assert any("EngineCore" in " ".join(process.cmdline()) for process in below)
        owner.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(below, timeout=60)
    for process in alive:
        process.kill()
    assert alive == []
