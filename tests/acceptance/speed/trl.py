"""A GRPO step next to one of TRL's GRPOTrainer: the same model, batch and lengths, both cores, interleaved.

make show-trl [ARGS=--short]

We run with two engines and two train ranks on the two cores, TRL with two threads and the generation of transformers
(its vLLM mode needs an accelerator), in an environment of its own, made once under ~/.cache/verl. The model and the
lengths are those of `step.py`. The figure is tokens per second, ours by TRL's, of the medians over the steps. Held:
at least 1.5 with responses of one length, 2.5 with long-tailed ones.

`--short` (CI): one small step of each, without a bound, and without TRL where its environment has not been made.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from _common import finish  # isort: skip - puts tests/ on the path
from _plots import draw_bars
from _trl_environment import find_trl, trl_python
from recording_console import RecordingConsole
from step import CASES, RESPONSES, SHORT, Case, Part, RecordingPlanner, make_model, settings

from verl.config.load import load
from verl.demo.assets import make_assets
from verl.trainer.build.rl_builder import build_trainer

FASTER = {"uniform": 1.5, "long-tailed": 2.5}
RANKS, WARM_UP = 2, 1
STEPS = {"uniform": 5, "long-tailed": 2}  # of which one takes TRL two minutes


def start_trl(python: Path, model: Path, case: Case) -> Part:
    """Start TRL in its own environment, and out of this folder: this file would shadow the package."""
    script = Path(__file__).with_name("_trl_grpo.py")
    sizes = (case.prompts, RESPONSES, case.longest, WARM_UP + case.steps)
    alone = {"PYTHONSAFEPATH": "1", "PYTHONPATH": "", "VIRTUAL_ENV": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    return Part([str(python), str(script), str(model), *map(str, sizes)], **alone)


async def measure(folder: Path, case: Case, python: Path | None) -> dict[str, float]:
    """Return the medians of a case: seconds and tokens per second of both."""
    make_model(folder / "model", case.mean)
    make_assets(folder / "assets")
    trl = None if python is None else start_trl(python, folder / "model", case)
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    try:
        [loaded] = load(settings(folder, case, RANKS))
        if trl is not None:
            trl.wait()
        async with build_trainer(loaded.config, RecordingConsole()) as loop:
            task = loop.task
            planner = task.planner = RecordingPlanner(task.planner)  # type: ignore[assignment]
            await task.begin(0)
            for version in range(WARM_UP + case.steps):
                seconds = (await task.step(version))["timing_s/step"]
                ours.append((seconds, sum(handle.generated for handle in planner.handles)))
                if trl is not None:
                    theirs.append(tuple(await asyncio.to_thread(trl.run, "step")))
                print("ours and TRL's seconds and tokens", ours[-1], theirs[-1:], flush=True)
    finally:
        if trl is not None:
            trl.close()
    figures: dict[str, float] = {}
    for name, steps in (("ours", ours[WARM_UP:]), ("trl", theirs[WARM_UP:])):
        if steps:
            figures[f"{name}_s"] = round(median(seconds for seconds, _ in steps), 2)
            figures[f"{name}_tokens_per_s"] = round(median(tokens / seconds for seconds, tokens in steps))
    if theirs:
        figures["faster"] = round(figures["ours_tokens_per_s"] / figures["trl_tokens_per_s"], 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", choices=CASES, help="one case alone")
    parser.add_argument("--plot", type=Path, help="SVG file to draw the figures in")
    options = parser.parse_args()
    short = options.short
    python = find_trl() if short else trl_python()
    figures: dict[str, Any] = {}
    cases = SHORT if short else {name: replace(case, steps=STEPS[name]) for name, case in CASES.items()}
    for name, case in cases.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="verl-trl-") as folder:
            figures[name] = asyncio.run(measure(Path(folder), case, python))
            print(name, figures[name], flush=True)
        if short:
            break  # one case starts everything
    held = {} if short else {name: bound for name, bound in FASTER.items() if name in figures}
    passed = all(figures[name]["faster"] >= bound for name, bound in held.items())
    if options.plot:
        rows = [
            (f"{system}, {name} lengths", case[f"{key}_tokens_per_s"], key == "ours")
            for name, case in figures.items()
            for key, system in (("ours", "verl"), ("trl", "TRL"))
            if f"{key}_tokens_per_s" in case
        ]
        draw_bars(options.plot, "A step of GRPO on two cores", rows, "tokens/s")
    finish("trl", passed, cases=figures, bounds=held)


if __name__ == "__main__":
    main()
