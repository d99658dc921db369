"""`verl gpu-check`: whether this machine does what a run on GPUs needs."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl.commands.arguments import ArgumentParser
from verl.config.rollout_engines import DEFAULT_ENGINE, IN_PROCESS_ENGINE
from verl.gpu_check.runner import has_passed, make_report, remember, run_stages
from verl.gpu_check.stage import Context, Result, State
from verl.gpu_check.stages import STAGES

TERMINATED = 143
_WIDTH = max(map(len, STAGES)) + 2
HELP = f"""\
usage: verl gpu-check [--stages A,B] [--model PATH] [--steps N] [--engine NAME] [--device NAME] [--timeout S]
                      [--report FILE]

Check GPUs, drivers and packages by what runs do with them, and write a report to attach to an issue. Each stage
compares results with others that were computed in a simpler way, and prints one line. Without a GPU the stages run on
the CPU, each in the way that the CPU has. Exits with code 1 if a stage fails. What passes on GPUs is recorded on this
machine: later runs send weights by CUDA IPC or NCCL, until a version or the driver changes.

options:
  --stages A,B            these alone; default: all
  --model PATH            model folder or name of the stages that train; default: a tiny one with random weights
  --steps N               GRPO steps of the stages that learn (20)
  --engine NAME           {DEFAULT_ENGINE}, or {IN_PROCESS_ENGINE} (transformers)
  --device NAME           cuda or cpu; default: cuda if nvidia-smi lists a GPU
  --timeout S             seconds after which a stage has failed (1800)
  --report FILE           where the report goes (gpu-check.json)

stages:
{"".join(f"  {name:<{_WIDTH}}{stage.summary}" + chr(10) for name, stage in STAGES.items())}"""


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the names of the stages."""
    parser = ArgumentParser("verl gpu-check")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engine", default=DEFAULT_ENGINE, choices=(DEFAULT_ENGINE, IN_PROCESS_ENGINE))
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--report", type=Path, default=Path("gpu-check.json"))
    options = parser.parse_args(argv)
    names = options.stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"--stages: unknown {', '.join(unknown)}; there are {', '.join(STAGES)}")
    if options.steps < 4:
        parser.error("--steps: at least 4, so that the reward can rise")
    return options, names


def main(argv: Sequence[str]) -> int:
    """Run the stages, print a line for each, and write the report."""
    from verl.preflight.machine import count_gpus  # imports pydantic

    options, names = read_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # after the current stage has been ended
    gpus = count_gpus()
    device = options.device or ("cuda" if gpus else "cpu")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="verl-gpu-check-") as folder:
        gpus = gpus if device == "cuda" else 0
        context = Context(device, gpus, Path(folder), options.model, options.engine, options.steps)
        sys.stdout.write(f"{gpus} GPUs\n" if gpus else "no GPU: on the CPU\n" if device == "cpu" else "no GPU\n")
        for result in run_stages(names, context, options.timeout):
            results.append(result)
            remember(context, result)
            sys.stdout.write(f"{result}\n")
            sys.stdout.flush()
            options.report.write_text(json.dumps(make_report(context, results), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{_summarize(results)}; report: {options.report}\n")
    return int(not has_passed(results))


def _summarize(results: Sequence[Result]) -> str:
    counts = {state: sum(result.state == state for result in results) for state in State}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)
