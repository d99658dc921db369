"""A real chat model learns: GRPO on SmolLM2-135M-Instruct through Ray, FSDP2 and vLLM, on two cores.

The settings of examples/smollm2/grpo.yaml. Held-out accuracy on two-digit sums, asked in plain English, must rise by
0.2 or more, and the 95% interval of the rise must exclude 0. After that: the run's generation and update next to bare
vLLM and a plain PyTorch update of the same model, in tokens per second. Needs the packages of examples/smollm2.
`--short` (CI) takes two small steps and asks that the engines hold the trained weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from _common import ROOT, finish, metrics_of, train

CONFIG = "examples/smollm2/grpo.yaml"
METRIC = "val/sums/mean@1"
RISE = 0.2
EARLY = slice(1, 4)  # steps whose policy still writes as the model that the bare engines run
SHORT = (
    "data.train_batch_size=4",
    "data.val_max_samples=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.save_freq=-1",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--held-out", type=int, default=512, help="sums of a validation")
    parser.add_argument("--keep", type=Path, help="copy metrics.jsonl here")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verl-real-model-") as directory:
        folder = Path(directory)
        prepare = [sys.executable, str(ROOT / "examples/smollm2/prepare.py"), "--local_dir", str(folder)]
        subprocess.run(prepare, check=True)
        code, watch = train(
            f"data.train_files={folder / 'train.parquet'}",
            f"data.val_files={folder / 'test.parquet'}",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"reward.custom_reward_function.path={ROOT / 'examples/smollm2/sums.py'}",
            f"trainer.default_local_dir={folder / 'run'}",
            "trainer.resume_mode=disable",
            f"data.val_max_samples={options.held_out}",
            *(SHORT if options.short else ()),
            *options.overrides,
            config=CONFIG,
            deadline_s=3 * 3600,
        )
        minutes, stolen = watch.seconds() / 60, watch.stolen()
        if code != 0:
            finish("real_model", False, exit_code=code)
        lines = metrics_of(folder / "run")
        if options.keep:
            options.keep.write_bytes((folder / "run/metrics.jsonl").read_bytes())
        steps = [line for line in lines if "reward/mean" in line]
        accuracy = [line[METRIC] for line in lines if METRIC in line]
        gap = max(line["weights/probe_gap"] for line in steps)
        if options.short:
            finish("real_model", len(steps) == 2 and len(accuracy) == 2 and gap < 1e-3, steps=2, probe_gap=gap)
        bare = measure_bare(str(folder / "model"))
    rise, margin = compare(accuracy[0], accuracy[-1], options.held_out)
    finish(
        "real_model",
        rise >= RISE and rise - margin > 0,
        steps=len(steps),
        before=round(accuracy[0], 3),
        after=round(accuracy[-1], 3),
        rise=f"{rise:.3f} ± {margin:.3f}",
        curve=[round(value, 3) for value in accuracy],
        minutes=round(minutes, 1),
        stolen_by_the_host=round(stolen, 3),
        seconds_of_a_step={name: median_of(steps, f"timing_s/{name}") for name in ("step", "gen", "update", "sync")},
        tokens_per_s=tokens_per_second(steps[EARLY]),
        bare_tokens_per_s=bare,
        probe_gap=gap,
    )


def compare(before: float, after: float, count: int) -> tuple[float, float]:
    """The rise of an accuracy, and half of its 95% interval (of independent samples: wider than that of pairs)."""
    variance = sum(share * (1 - share) / count for share in (before, after))
    return after - before, 1.96 * math.sqrt(variance)


def tokens_per_second(steps: list[dict[str, Any]]) -> dict[str, float]:
    generated = [step["plan/samples"] * step["response_length/mean"] / step["timing_s/gen"] for step in steps]
    trained = [step["plan/tokens"] / step["timing_s/update"] for step in steps]
    computed = [step["plan/computed_tokens"] / step["timing_s/update"] for step in steps]  # shared prompts count once
    rates = {"generation": generated, "update": trained, "update_computed": computed}
    return {name: round(median(values), 1) for name, values in rates.items()}


def median_of(steps: list[dict[str, Any]], name: str) -> float:
    return round(median(step[name] for step in steps), 2)


def measure_bare(model: str) -> dict[str, float]:
    """Tokens per second of two bare vLLM engines with a core each, and of a plain update on both cores."""
    engines = [start_bare("generation", model, core) for core in (0, 1)]
    generation = sum(rate_of(engine) for engine in engines)
    return {"generation": round(generation, 1), "update": round(rate_of(start_bare("update", model)), 1)}


def start_bare(kind: str, model: str, core: int | None = None) -> subprocess.Popen[str]:
    environment = dict(os.environ) | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if core is not None:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("_bare.py")), kind, model]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def rate_of(process: subprocess.Popen[str]) -> float:
    output, _ = process.communicate(timeout=1200)
    if process.returncode:
        raise SystemExit(f"{process.args} failed")
    result = json.loads(output.strip().splitlines()[-1])
    return float(result["tokens"] / result["seconds"])


if __name__ == "__main__":
    main()
