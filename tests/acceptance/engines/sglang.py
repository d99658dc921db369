"""SGLang generates for a run as vLLM does: same contract, same numbers as the trainer, and it may die.

1. 20 weight swaps under 24 running requests: each token's log-prob is that of a forward pass with the weights of its
   version, up to 1e-4, and some response has tokens of several versions.
2. 5 GRPO steps on additions with one engine of SGLang. Its process is killed after the second step. The run goes on
   with a new one, and the largest |trainer log-prob - engine log-prob| of any token is <= 1e-4 in every step.
3. The contract suite of rollout engines, with tied and with untied embeddings.

`--short` (CI) takes the first part alone.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import ROOT, finish, metrics_of, short_grpo, skip, train
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(ROOT))

from tests.second_environment import make_environment
from tests.sglang_environment import find_packages
from verl.config.rollout_engines import get_rollout_engine
from verl.demo.assets import make_assets
from verl.rollout.engine import RolloutEngine, load_weights, make_engine
from verl.rollout.sglang.settings import SglangSettings
from verl.types import Completion, SamplingParams
from verl.weights.bucket import pack

LIMIT, STEPS, SWAPS, REQUESTS = 1e-4, 5, 20, 24
METRIC = "training/rollout_logprobs_diff_max"
PROMPT = [5, 6, 7, 8]
MARK = "VERL_SHOW_SGLANG"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    if isinstance(packages := find_packages(), str):
        skip("sglang", f"SGLang cannot be installed: {packages}")
    with tempfile.TemporaryDirectory(prefix="verl-sglang-") as directory:
        folder = Path(directory)
        python = make_environment(folder / "environment", packages)
        make_assets(folder)
        figures, passed = asyncio.run(swap_weights(folder / "model", python))
        if not options.short:
            trained, run_passed = run_with_a_kill(folder, python)
            contract_passed = run_contract()
            figures |= {**trained, "contract": contract_passed}
            passed = passed and run_passed and contract_passed
    finish("sglang", passed, **figures, allowed=LIMIT)


def run_with_a_kill(folder: Path, python: str) -> tuple[dict[str, Any], bool]:
    os.environ[MARK] = uuid.uuid4().hex
    killed: list[int] = []
    threading.Thread(target=kill_engine, args=(folder / "run", killed), daemon=True).start()
    rollout = {"name": "sglang", "python": python, "num_engines": 1}
    settings = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()]
    code, _ = train(*short_grpo(folder, prompts=16, steps=STEPS), *settings, deadline_s=1800)
    lines = [line for line in metrics_of(folder / "run") if METRIC in line] if code == 0 else []
    gap = max((line[METRIC] for line in lines), default=None)
    figures = {"steps": len(lines), "exit_code": code, "killed": len(killed), "largest_gap": gap}
    return figures, code == 0 and len(lines) == STEPS and len(killed) == 1 and gap is not None and gap <= LIMIT


def kill_engine(run: Path, killed: list[int]) -> None:
    """Kill the process of the engine once two steps are done."""
    file = run / "metrics.jsonl"
    while not file.exists() or sum(METRIC in line for line in file.read_text().splitlines()) < 2:
        time.sleep(0.2)
    for process in psutil.process_iter():
        try:
            is_engine = "verl.rollout.isolated.server" in process.cmdline()
            if is_engine and process.environ().get(MARK) == os.environ[MARK]:
                process.kill()
                killed.append(process.pid)
        except psutil.Error:
            continue


async def swap_weights(path: Path, python: str) -> tuple[dict[str, Any], bool]:
    """Swap the weights of an engine under requests that start again as they end."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    settings = SglangSettings(str(path), dtype="float32", max_model_len=64, max_num_seqs=16)
    engine = make_engine(get_rollout_engine("sglang"), settings, python)
    await engine.start()
    try:
        models = [copy.deepcopy(model)]
        await sync(engine, model, 0)
        running = [asyncio.create_task(ask(engine)) for _ in range(REQUESTS)]
        responses: list[Completion] = []
        for version in range(1, SWAPS + 1):
            await asyncio.sleep(0.05)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
            await sync(engine, model, version)
            models.append(copy.deepcopy(model))
            await engine.compute_logprobs([PROMPT])
            responses += [await task for task in running if task.done()]
            running = [asyncio.create_task(ask(engine)) if task.done() else task for task in running]
        responses += await asyncio.gather(*running)
    finally:
        await engine.close()
    gap = max(measure_gap(models, response) for response in responses)
    widest = max(len(set(response.versions.tolist())) for response in responses)
    figures = {"swaps": SWAPS, "responses": len(responses), "swap_gap": gap, "versions_in_a_response": widest}
    return figures, gap <= LIMIT and widest > 1


async def ask(engine: RolloutEngine) -> Completion:
    return await engine.generate(PROMPT, SamplingParams(max_tokens=56))


async def sync(engine: RolloutEngine, model: PreTrainedModel, version: int) -> None:
    await load_weights(engine, list(pack(model.named_parameters(), max_bytes=1 << 20)), version)


@torch.no_grad()
def measure_gap(models: list[PreTrainedModel], response: Completion) -> float:
    """Return the largest difference of a log-prob to the one of the model with the weights of its token."""
    tokens, worst = PROMPT + response.token_ids, 0.0
    for version in set(response.versions.tolist()):
        logprobs = models[version](torch.tensor([tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
        gaps = (torch.tensor(response.logprobs) - own).abs()[torch.tensor(response.versions) == version]
        worst = max(worst, float(gaps.max()))
    return worst


def run_contract() -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "tests/contract/test_rollout_engine.py", "-k", "sglang"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"VERL_TEST_ENGINES": "sglang"}).returncode == 0


if __name__ == "__main__":
    main()
