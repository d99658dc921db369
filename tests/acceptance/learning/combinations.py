"""Every pair of features: each combination is refused by name before anything starts, or trains two steps correctly.

make show-combinations [ARGS=--short]

`tests/combinations` has the factors of a run and a covering array over them. Each combination first runs in one
process, with transformers as the engine: metrics are finite and count episodes, and the weights of an episode sum to
one; if it resumes, the resumed run has the same weights to the bit. Then the train workers of the combination train on
the samples of that run, on as many gloo ranks as it has: losses, gradients and metrics of the first step equal those of
one rank without packing to 1e-5, in float32, and workers that resume from a checkpoint have the same weights and
moments to the bit.
Combinations with another data type do this again in their own, without the comparison. Those with vLLM also run in
Ray as a user starts them: a few of them, others at each commit.

`--short` (CI): combinations in which each level of each factor occurs once, other ones in each rotation, one with vLLM.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from _common import ROOT, finish, metrics_of, train  # isort: skip - puts tests/ on the path
import torch
from ranks import free_port, run_ranks
from rotation import count_commits

sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # for own estimators in Ray

from tests.combinations.assets import make_assets
from tests.combinations.factors import FACTORS, Combination, list_overrides, plain
from tests.combinations.pairs import PairTable, cover, list_all_pairs, list_pairs
from tests.combinations.runs import (
    BrokenInvariantError,
    Job,
    Trained,
    check_run,
    check_trained,
    compare,
    hash_model,
    load,
    run_locally,
    to_local,
    to_reference,
    train_on_rank,
)

PROCESSES = 2
IN_RAY = 8  # combinations that a full run also starts in Ray and vLLM, where each takes a minute or two
Rows = list[tuple[int, Combination]]


def choose(rows: list[Combination], *, short: bool) -> Rows:
    """Return the combinations to run, with their numbers; in the short form as few as have every level."""
    numbered = list(enumerate(rows))
    if not short:
        return numbered
    random.Random(count_commits()).shuffle(numbered)
    left, chosen = {level for row in rows for level in row.items()}, []
    while left:
        best = max(numbered, key=lambda each: len(left & each[1].items()))
        left -= best[1].items()
        chosen.append(best)
    return sorted(chosen)


def take_turns(rows: Rows, count: int) -> Rows:
    """Return `count` of the rows, others at each commit."""
    start = count_commits() * count % max(len(rows), 1)
    return [*rows[start:], *rows[:start]][:count]


def main_of_rank(rank: int, folder: Path, rows: Rows) -> None:
    """Run combinations in this process, then those with two ranks together with the other one."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for number, row in rows[rank::PROCESSES]:
        with guarded(folder, number, rank, row):
            run_alone(folder / str(number), folder, row)
    (folder / f"done-{rank}").touch()
    wait_for(folder / f"done-{1 - rank}", 7200)
    for number, row in rows:
        job = folder / str(number) / "job.pickle"
        if row["ranks"] == "2" and job.exists():
            with guarded(folder, number, rank, row):
                train_together(folder / str(number), rank, row)
            (folder / str(number) / f"trained-{rank}").touch()
            wait_for(folder / str(number) / f"trained-{1 - rank}", 300)


class guarded:
    """Writes what went wrong with a combination, and goes on."""

    def __init__(self, folder: Path, number: int, rank: int, row: Combination) -> None:
        self.file, self.start = folder / f"result-{number}-{rank}.json", time.monotonic()
        self.number, self.row = number, row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        from verl.training.process_group import close_process_group

        close_process_group()
        problem = "" if error is None else f"{type(error).__name__}: {error}"
        known = json.loads(self.file.read_text()) if self.file.exists() else ""
        self.file.write_text(json.dumps(known or problem))
        if problem:
            levels = {factor: level for factor, level in self.row.items() if level != plain()[factor]}
            print(f"BROKEN {self.number}: {problem[:1500]}\n  {levels}", flush=True)
            if not isinstance(error, BrokenInvariantError):
                traceback.print_exception(error)
        else:
            print(f"{self.number}: {time.monotonic() - self.start:.1f} s", flush=True)
        return isinstance(error, Exception)


def run_alone(own: Path, folder: Path, row: Combination) -> None:
    """Run a combination on one rank, and train one rank without packing on its samples."""
    own.mkdir()
    run = own / "run"
    place = {"trainer.default_local_dir": str(run)}
    config = load(to_local(row), folder, **place)
    with redirect_stdout(sys.stderr):
        handles = run_locally(config)
    check_run(run, handles)
    if row["resume"] == "on":
        again = {"trainer.default_local_dir": str(own / "resumed"), "trainer.resume_mode": "path"}
        again |= {"trainer.resume_from_path": str(run / "global_step_1")}
        resumed = load(to_local(row), folder, **again)
        check_run(own / "resumed", run_locally(resumed), first=1)
        if hash_model(run) != hash_model(own / "resumed"):
            raise BrokenInvariantError("the resumed run has other weights")
    shutil.rmtree(run)
    shutil.rmtree(own / "resumed", ignore_errors=True)
    ports = itertools.repeat(0)
    reference = Job(load(to_reference(row), folder), handles)
    expected = train_on_rank(reference, own, 0, 1, ports, resumes=False)
    check_trained(expected)
    jobs = [Job(load(each, folder, **{"trainer.local": False}), handles) for each in own_variants(row)]
    if row["ranks"] == "1":
        check_jobs(jobs, expected, own, 0, 1, ports)
    else:
        (own / "job.pickle").write_bytes(pickle.dumps((jobs, expected)))


def own_variants(row: Combination) -> list[Combination]:
    """Return the combination as the workers train it: in float32, and in its own data type if that is another one."""
    row = row | {"engine": "hf"} | ({"LoRA": "merged"} if row["LoRA"] == "adapter" else {})
    return [row | {"dtype": "float32"}, *([row] if row["dtype"] != "float32" else [])]


def train_together(own: Path, rank: int, row: Combination) -> None:
    jobs, expected = pickle.loads((own / "job.pickle").read_bytes())
    check_jobs(jobs, expected, own, rank, 2, share_ports(own, rank))


def share_ports(own: Path, rank: int) -> Iterator[int]:
    """Yield ports that rank 0 chooses."""
    for number in itertools.count():
        file = own / f"port-{number}"
        if rank == 0:
            file.with_suffix(".new").write_text(str(free_port()))
            file.with_suffix(".new").rename(file)
        wait_for(file, 120)
        yield int(file.read_text())


def check_jobs(jobs: list[Job], expected: Trained, own: Path, rank: int, ranks: int, ports: Iterator[int]) -> None:
    for index, job in enumerate(jobs):
        trained = train_on_rank(job, own / f"checkpoint-{index}", rank, ranks, ports)
        check_trained(trained)
        if index == 0:
            compare(trained, expected)


def wait_for(file: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file.name} did not appear within {seconds:g} s")
        time.sleep(0.05)


def run_in_ray(own: Path, folder: Path, row: Combination) -> str:
    """Run a combination in Ray and vLLM; return what is wrong, or "". If it resumes, it must have the same weights."""
    own.mkdir(exist_ok=True)
    settings = [f"{key}={_format(value)}" for key, value in list_overrides(row, folder).items()]
    runs = {"whole": [], "again": ["trainer.resume_mode=path", f"trainer.resume_from_path={own}/whole/global_step_1"]}
    for name, more in runs.items():
        if name == "again" and row["resume"] == "off":
            continue
        code, _ = train(*settings, *more, f"trainer.default_local_dir={own / name}", deadline_s=900)
        if code:
            return f"{name}: exit code {code}"
        steps = [line for line in metrics_of(own / name) if "reward/mean" in line]
        numbers = [value for line in steps for value in line.values() if isinstance(value, float)]
        if len(steps) != (2 if name == "whole" else 1) or not all(value - value == 0 for value in numbers):
            return f"{name}: {len(steps)} steps, or numbers that are not finite"
    if row["resume"] == "on" and hash_model(own / "whole") != hash_model(own / "again"):
        return "the resumed run has other weights"
    return ""


def _format(value: Any) -> str:
    """Return a value in the grammar of overrides."""
    if isinstance(value, list):
        return f"[{','.join(map(_format, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {_format(each)}" for key, each in value.items()) + "}"
    return f"'{value}'" if isinstance(value, str) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--rows", help="numbers of combinations, separated by commas: these alone")
    parser.add_argument("--without-ray", action="store_true")
    options = parser.parse_args()
    table = PairTable()
    rows = cover(table)
    wanted = choose(rows, short=options.short)
    if options.rows:
        wanted = [(int(number), rows[int(number)]) for number in options.rows.split(",")]
    covered = {pair for row in rows for pair in list_pairs(row)}
    with tempfile.TemporaryDirectory(prefix="verl-combinations-") as directory:
        folder = Path(directory)
        make_assets(folder)
        run_ranks(main_of_rank, PROCESSES, folder, wanted, deadline_s=4 * 3600)
        problems = {
            number: [
                found for file in folder.glob(f"result-{number}-*.json") if (found := json.loads(file.read_text()))
            ]
            for number, _ in wanted
        }
        with_vllm = [(number, row) for number, row in wanted if row["engine"] == "vllm"]
        in_ray = () if options.without_ray else take_turns(with_vllm, 1 if options.short else IN_RAY)
        for number, row in in_ray:
            if found := run_in_ray(folder / f"ray-{number}", folder, row):
                problems[number].append(found)
                print(f"BROKEN {number} in Ray: {found}\n  {row}", flush=True)
    broken = [number for number, found in problems.items() if found]
    left = set(list_all_pairs()) - covered - table.refused.keys()
    finish(
        "combinations",
        not broken and not left,
        short=options.short,
        factors=len(FACTORS),
        levels=sum(map(len, FACTORS.values())),
        pairs=len(list_all_pairs()),
        pairs_refused=len(table.refused),
        pairs_not_covered=len(left),
        combinations=len(rows),
        run=len(wanted),
        run_on_two_ranks=sum(row["ranks"] == "2" for _, row in wanted),
        run_in_ray_and_vllm=len(in_ray),
        refused_rules=len(set(table.refused.values())) + len(table.larger),
        broken=broken,
    )


if __name__ == "__main__":
    main()
