"""The first run on GPUs: start, weight sync by each transport, probe, updates, sleep and wake, save, resume.

python tests/gpu/smoke.py [--gpus 1 2 8] [--transports host ipc nccl] [--model PATH] [--device H100] [--short]

NEVER RUN ON A GPU YET. Report what it prints, whatever it prints.

For each number of GPUs and each transport, `verl train` takes two steps with a checkpoint, and resumes for a third one.
Engines share the devices of the trainer, so they sleep and wake in every step; with nccl half of the GPUs are theirs.
Printed next to the estimates of `verl
plan`: the peak memory of the train worker, and tokens per second. The data are sums (`verl.demo`), and the default
model has random weights and the shape of Qwen2.5-0.5B: nothing is downloaded. `--model` trains another one.

`--short` (CI, without a GPU) takes the same way on the CPU: one rank in one process, a tiny model, host memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for what tests share
from verl.commands import plan
from verl.config.load import load
from verl.demo.assets import make_assets, make_tokenizer
from verl.demo.folder import Assets
from verl.memory_plan.accelerators import DEVICES, GIB

TRANSPORTS = ("host", "ipc", "nccl")
SAVED, LAST = 2, 3  # the step of the checkpoint, and the last one, after the resume
DEADLINE_S = 1800
SIZES = {"cuda": (64, 8, 128, 512), "cpu": (4, 2, 8, 4)}  # prompts, responses to each, tokens of both
NEEDED = {
    "probe": "weights/probe_gap",
    "sync": "timing_s/sync",
    "sleep": "timing_s/sleep",
    "update": "actor/grad_norm",
    "throughput": "perf/throughput",
}
"""What has to be in the metrics of every step."""
OTHERS = ("engine weights", "kv cache", "reserved")  # memory that is not the train worker's own


@dataclass(frozen=True)
class Case:
    """A number of devices, and how weights reach the engines."""

    gpus: int
    transport: str
    device: str = "cuda"

    def __str__(self) -> str:
        return f"{self.gpus} x {self.device}, {self.transport}"

    @property
    def train_gpus(self) -> int:
        """Those of the trainer: NCCL reaches engines on other devices only."""
        return self.gpus // 2 if self.transport == "nccl" else self.gpus

    def settings(self, model: Path, assets: Assets, folder: Path) -> list[str]:
        """Return the settings of `verl train`, without the number of steps."""
        prompts, responses, prompt, response = SIZES[self.device]
        rollout = "actor_rollout_ref.rollout"
        settings = [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={assets.train}",
            f"data.train_batch_size={prompts}",
            f"data.max_prompt_length={prompt}",
            f"data.max_response_length={response}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 2}",
            f"{rollout}.n={responses}",
            f"{rollout}.weight_transport={self.transport}",
            f"trainer.device={self.device}",
            f"trainer.n_gpus_per_node={self.train_gpus}",
            f"trainer.save_freq={SAVED}",
            "trainer.val_before_train=False",
            f"trainer.default_local_dir={folder}",
        ]
        if self.device == "cpu":
            return [*settings, f"{rollout}.name=hf", "trainer.local=True"]
        settings += ["actor_rollout_ref.actor.use_dynamic_bsz=True", f"{rollout}.gpu_memory_utilization=0.5"]
        if self.train_gpus == self.gpus:
            return [*settings, f"{rollout}.free_cache_engine=True"]
        own = f"{rollout}.n_gpus_per_node={self.gpus - self.train_gpus}"
        return [*settings, "actor_rollout_ref.hybrid_engine=False", own]


def list_cases(gpus: Sequence[int], transports: Sequence[str]) -> list[Case]:
    cases = [Case(count, transport) for count in gpus for transport in transports]
    return [case for case in cases if case.train_gpus > 0]


def find_problems(metrics: Sequence[dict[str, float]]) -> Iterator[str]:
    """Yield what is wrong with the metrics of the steps of a case: all lines of metrics.jsonl."""
    steps = {int(line["step"]): line for line in metrics if "timing_s/step" in line}
    if list(steps) != list(range(1, LAST + 1)):
        yield f"steps {list(steps)} instead of 1 to {LAST}: it did not train, save or resume"
    for step, line in steps.items():
        yield from (f"step {step}: no {name} ({key})" for name, key in NEEDED.items() if key not in line)
        if line.get("weights/version", step) != step:
            yield f"step {step}: the engines hold version {line['weights/version']:.0f} of the weights"


def estimate(case: Case, settings: Sequence[str], device: str) -> dict[str, float]:
    """Return the estimates of `verl plan`: peak GiB of the train worker, and tokens per second."""
    output = StringIO()
    with redirect_stdout(output):
        plan.main(["--device", device, "--json", *settings])
    report = json.loads(output.getvalue())
    peak = sum(size for part, size in report["memory"]["update"].items() if part not in OTHERS)
    prompts, responses, prompt, response = SIZES[case.device]
    seconds = sum(value for phase, value in report["seconds"].items() if phase != "save")
    tokens = prompts * responses * (prompt + response)
    return {"gib": round(peak / GIB, 2), "tokens_per_s": round(tokens / seconds)}


def train(settings: Sequence[str], steps: int) -> int:
    """Run `verl train` in a process of its own; return its exit code."""
    command = [sys.executable, "-m", "verl", "train", *settings, f"trainer.total_training_steps={steps}"]
    return subprocess.run(command, timeout=DEADLINE_S).returncode


def run(case: Case, model: Path, assets: Assets, folder: Path, device: str) -> dict[str, Any]:
    """Run one case; return its figures."""
    settings = case.settings(model, assets, folder)
    codes = [train(settings, steps) for steps in (SAVED, LAST)]
    lines = folder / "metrics.jsonl"
    metrics = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    problems = [f"exit code {code}" for code in codes if code] + list(find_problems(metrics))
    last = next((line for line in reversed(metrics) if "perf/throughput" in line), {})
    figures = {
        "tokens_per_s": last.get("perf/throughput"),
        "gib": last.get("perf/max_memory_allocated_gib"),
        "sync_s": last.get("timing_s/sync"),
        "probe_gap": last.get("weights/probe_gap"),
    }
    return {"case": str(case), **figures, "estimate": estimate(case, settings, device), "problems": problems}


def make_model(folder: Path) -> Path:
    """Write a model with the shape of Qwen2.5-0.5B, random weights and the tokenizer of the sums."""
    import torch
    from public_models import MODELS
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(**MODELS["Qwen2.5-0.5B"] | {"eos_token_id": tokenizer.eos_token_id})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--model", type=Path, help="a folder; default: random weights in the shape of Qwen2.5-0.5B")
    parser.add_argument("--device", choices=DEVICES, default="H100", help="for the estimates")
    parser.add_argument("--short", action="store_true", help="on the CPU, with a tiny model")
    options = parser.parse_args()
    cases = [Case(1, "host", "cpu")] if options.short else list_cases(options.gpus, options.transports)
    with tempfile.TemporaryDirectory(prefix="verl-gpu-smoke-") as directory:
        folder = Path(directory)
        assets = make_assets(folder / "assets")
        model = assets.model if options.short else options.model or make_model(folder / "model")
        for case in cases:  # all settings, before anything starts
            load([*case.settings(model, assets, folder), f"trainer.total_training_steps={LAST}"])
        results = []
        for index, case in enumerate(cases):
            results.append(run(case, model, assets, folder / f"run_{index}", options.device))
            print(json.dumps(results[-1]), flush=True)
    passed = all(not result["problems"] for result in results)
    print(json.dumps({"name": "gpu-smoke", "cases": len(results), "on_gpus": not options.short, "pass": passed}))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
