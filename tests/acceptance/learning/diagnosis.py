"""Diagnosis: every rule notices a run that provokes it, and no rule warns about healthy runs.

make show-diagnosis [ARGS="[--short] [--seeds N] [--steps N] [--only RULE]"]

Rules are provoked by real runs in one process, with a tiny model and the transformers engine; those that need many
devices, a full engine or many steps by simulated metrics, which the table says. Healthy runs train as `verl demo` does,
each with another seed, for as many steps as all rules but memory-growth look at. What the run printed and what its
metrics.jsonl gives afterwards must agree. `--short` (CI) has 2 shorter healthy runs, of a model that is hardly warmed
up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from dataclasses import dataclass
from pathlib import Path

from _common import Stopwatch, finish
from _diagnosis_runs import PROVOCATIONS, SIMULATIONS, make_models, provoke, train_healthy

from verl.demo.assets import make_assets
from verl.demo.warmup import warm_up
from verl.diagnosis.diagnosis import diagnose
from verl.diagnosis.rules import RULES
from verl.tracking.run_folder import RunFolder

WORKERS = 2
HEALTHY_STEPS = 46  # gradient-drift looks at 45
SHORT_STEPS = 24  # entropy-collapse and length-explosion look at 20


@dataclass(frozen=True)
class Result:
    """What was said about a run: (step, rule), by the run itself and from its metrics afterwards."""

    name: str
    code: int
    steps: int
    printed: list[tuple[int, str]]
    found: list[tuple[int, str]]
    rewards: tuple[float, float]  # means of the first and the last ten steps

    def first(self, rule: str) -> int | None:
        return next((step for step, name in self.printed if name == rule), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seeds", type=int, help="healthy runs")
    parser.add_argument("--steps", type=int, help="of a healthy run")
    parser.add_argument("--only", help="provoke this rule alone, without healthy runs")
    options = parser.parse_args()
    watch, seeds = Stopwatch(), options.seeds if options.seeds is not None else 2 if options.short else 10
    cases = [
        case for case in PROVOCATIONS if options.only in (None, case.rule) and not (case.is_long and options.short)
    ]
    with tempfile.TemporaryDirectory(prefix="verl-diagnosis-") as directory:
        folder = Path(directory)
        make_assets(folder)
        make_models(folder)
        with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
            if options.only is None:
                warmed_up = pool.apply_async(warm_up_model, (folder, options.short))
            provoked = [pool.apply_async(run_case, (PROVOCATIONS.index(case), folder)) for case in cases]
            results = {case.rule: (case.how, result.get()) for case, result in zip(cases, provoked, strict=True)}
            healthy: list[Result] = []
            if options.only is None:
                print(warmed_up.get(), flush=True)
                steps = options.steps or (SHORT_STEPS if options.short else HEALTHY_STEPS)
                runs = [(seed, folder, steps, options.short) for seed in range(seeds)]
                healthy = pool.starmap(run_healthy, runs, chunksize=1)
    problems = [*report_real(results), *report_simulated(set(results), options.only), *report_healthy(healthy)]
    for problem in problems:
        print(problem)
    simulated = sorted(set(SIMULATIONS) - set(results)) if options.only is None else []
    finish(
        "diagnosis",
        not problems,
        rules=len(RULES),
        provoked_by_real_runs=len(results),
        simulated=simulated,
        healthy_runs=len(healthy),
        healthy_steps=sum(each.steps for each in healthy),
        problems=problems,
        seconds=round(watch.seconds()),
        stolen=round(watch.stolen(), 2),
    )


def run_case(index: int, folder: Path) -> Result:
    case = PROVOCATIONS[index]
    return read_result(folder / case.rule, provoke(case, folder))


def run_healthy(seed: int, folder: Path, steps: int, is_short: bool) -> Result:
    return read_result(folder / f"healthy-{seed}", train_healthy(seed, folder, steps, is_short=is_short))


def warm_up_model(folder: Path, is_short: bool) -> str:
    return str(warm_up(folder, max_steps=60) if is_short else warm_up(folder))


def read_result(path: Path, code: int) -> Result:
    if code:
        return Result(path.name, code, 0, [], [], (0.0, 0.0))
    folder = RunFolder(path)
    metrics = folder.read_metrics()
    rewards = [each.values["reward/mean"] for each in metrics if "reward/mean" in each.values]
    return Result(
        path.name,
        code,
        len(rewards),
        [(warning.step, warning.rule) for warning in folder.read_warnings() if warning.rule],
        [(step, advice.rule) for step, advice in diagnose((each.step, each.values) for each in metrics)],
        (sum(rewards[:10]) / len(rewards[:10]), sum(rewards[-10:]) / len(rewards[-10:])),
    )


def report_real(results: dict[str, tuple[str, Result]]) -> list[str]:
    """Print what each rule noticed in the run that provokes it; return problems."""
    problems = []
    print(f"{'rule':<22}{'provoked by a real run':<62}{'step':>5}  other rules")
    for rule, (how, result) in results.items():
        others = sorted({name for _, name in result.printed} - {rule})
        print(f"{rule:<22}{how:<62}{result.first(rule) or '-':>5}  {', '.join(others)}")
        if result.code:
            problems.append(f"{rule}: its run ended with exit code {result.code}")
        elif result.first(rule) is None:
            problems.append(f"{rule}: not noticed in {result.steps} steps")
        elif set(result.printed) != set(result.found):
            problems.append(f"{rule}: the run printed {result.printed}, its metrics give {result.found}")
    return problems


def report_simulated(real: set[str], only: str | None) -> list[str]:
    """Print what rules noticed in simulated metrics; return problems."""
    problems = []
    print(f"{'rule':<22}{'provoked by simulated metrics':<62}{'step':>5}  other rules")
    for rule, (how, simulate) in SIMULATIONS.items():
        if only in (None, rule):
            steps = [(step, advice.rule) for step, advice in diagnose(enumerate(simulate(), 1))]
            first = next((step for step, name in steps if name == rule), None)
            others = sorted({name for _, name in steps} - {rule})
            print(f"{rule:<22}{how:<62}{first or '-':>5}  {', '.join(others)}")
            problems += [] if first else [f"{rule}: not noticed in simulated metrics"]
    missing = {rule.name for rule in RULES} - real - set(SIMULATIONS)
    return problems + [f"{rule}: nothing provokes it" for rule in sorted(missing) if only is None]


def report_healthy(results: list[Result]) -> list[str]:
    """Print how healthy runs went; return problems."""
    for result in results:
        before, after = result.rewards
        print(f"{result.name}: {result.steps} steps, reward {before:.3f} to {after:.3f}, {len(result.found)} warnings")
    return [
        f"{result.name}: exit code {result.code}, printed {result.printed}, metrics give {result.found}"
        for result in results
        if result.code or result.printed or result.found
    ]


if __name__ == "__main__":
    main()
