"""A process of vLLM that is killed, or whose owner is: what it has generated is kept, and no process is left."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from tiny import tiny_qwen2
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from verl.errors import ProcessLostError
from verl.rollout.engine import load_weights
from verl.rollout.vllm.engine import VllmEngine
from verl.rollout.vllm.settings import VllmSettings
from verl.types import SamplingParams
from verl.weights.bucket import pack

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


async def test_what_a_killed_process_has_generated_is_kept(tmp_path: Path) -> None:
    Qwen2ForCausalLM(tiny_qwen2(vocab_size=64, max_position_embeddings=4096)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    engine = VllmEngine(VllmSettings(str(tmp_path), dtype="float32", max_model_len=4096, max_num_seqs=16))
    await engine.start()
    try:
        await load_weights(engine, list(pack(dict(model.named_parameters()).items(), max_bytes=20_000)), 3)
        prompts = [[5, 6, 7, 8], [9, 10]]
        requests = [asyncio.create_task(engine.generate(each, SamplingParams(max_tokens=4000))) for each in prompts]
        states = engine._llm.output_processor.request_states
        while len(states) < 2 or min(state.detokenizer.num_output_tokens() for state in states.values()) < 8:
            await asyncio.sleep(0.01)
        [process] = [each for each in psutil.Process().children() if "EngineCore" in " ".join(each.cmdline())]
        process.kill()
        for prompt, outcome in zip(prompts, await asyncio.gather(*requests, return_exceptions=True), strict=True):
            assert isinstance(outcome, ProcessLostError)
            partial = outcome.partial
            assert 8 <= len(partial.token_ids) < 4000
            assert partial.versions.tolist() == [3] * len(partial.token_ids)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + partial.token_ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(partial.token_ids)[:, None])[:, 0]
            assert (torch.tensor(partial.logprobs) - expected).abs().max() < 1e-4
    finally:
        await engine.close()
