"""`verl audit` proves from a run's folder that every prompt was trained once, however often the run was killed.

make show-audit [ARGS="--kills 5"]

A synchronous and an asynchronous run (`trainer.max_staleness=2`, in which the reward of one prompt in four takes as
long as several steps), with Ray and vLLM, are killed (SIGKILL) at random moments and resumed. Held: the audit of both
finds nothing wrong and has compared checkpoints, metrics and samples; the trained positions, read from
`trained.jsonl` by this script, are all from the first to the last, each once.

Then errors are planted in copies of the folders, `PLANTS` of each kind, at random steps and positions. Held: the audit
finds each and names its step or position. A version within the allowed staleness can only be compared where the group
is in `samples/`: there it is planted.

`--short`: 1 kill each, in one process with transformers, and fewer plants.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import REWARDS, finish  # isort: skip - puts tests/ on the path
from _killed_run import BATCH, KilledRun

from verl.commands.runs.audit import audit_run
from verl.demo.assets import make_assets
from verl.tracking.run_folder import RunFolder

STALENESS = 2
SLOW_REWARDS = Path(__file__).parents[1] / "asynchronous" / "_uneven_rewards.py"
PLANTS = 20

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--kills", type=int)
    parser.add_argument(
        "--seed", type=int, help="of the moments; a new one each time, in the short form always the same"
    )
    options = parser.parse_args()
    kills = options.kills or (1 if options.short else 5)
    seed = options.seed if options.seed is not None else 3 if options.short else random.randrange(10**6)
    print(f"seed {seed}")
    chance, figures, passed = random.Random(seed), dict[str, Any](), True
    with tempfile.TemporaryDirectory(prefix="verl-audit-") as directory:
        folder = Path(directory)
        make_assets(folder)
        for name, staleness in (("synchronous", 0), ("asynchronous", STALENESS)):
            rewards = SLOW_REWARDS if staleness else REWARDS
            settings = [f"reward.custom_reward_function.path={rewards}"]
            run = KilledRun(
                folder / name,
                6 if options.short else 4 * kills,
                kills,
                chance,
                *settings,
                *(["trainer.local=true", "actor_rollout_ref.rollout.n=2"] if options.short else []),
                engine="hf" if options.short else "vllm",
                max_staleness=staleness,
                resumes_always=True,
            )
            code = run.play()
            audit = audit_run(run.folder)
            positions = [row[0] for record in read(run.folder) for row in record.get("trained", [])]
            is_proven = not audit.problems and sorted(positions) == list(range(run.steps * BATCH))
            compared = [audit.checkpoints, audit.metrics, audit.samples]
            missed = plant_all(run.folder, staleness, chance, 2 if options.short else PLANTS)
            passed &= code == 0 and is_proven and all(compared) and run.kills >= kills and not missed["missed"]
            passed &= audit.resumes >= 1 and (max(audit.staleness) > 0) == (staleness > 0)
            figures[name] = {
                "exit_code": code,
                "kills": run.kills,
                "resumes": audit.resumes,
                "steps": audit.steps,
                "trained": audit.trained,
                "proven": is_proven,
                "problems": audit.problems[:5],
                "staleness": dict(sorted(audit.staleness.items())),
                "compared": dict(zip(("checkpoints", "metrics", "samples"), compared, strict=True)),
                **missed,
            }
    finish("audit", passed, seed=seed, **figures)


def read(folder: Path) -> list[Record]:
    return [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]


def plant_all(folder: Path, staleness: int, chance: random.Random, count: int) -> dict[str, Any]:
    """Plant errors of every kind in copies of a folder; return how many the audit found, and those that it missed."""
    kinds: dict[str, Plant] = {
        "duplicate": plant_duplicate,
        "gap": plant_gap,
        "lost_step": plant_lost_step,
        "version_of_the_step": plant_version_of_the_step,
        "version_too_old": plant_version_too_old,
    }
    if staleness:
        kinds["version_in_bounds"] = plant_version_in_bounds
    found, missed = dict.fromkeys(kinds, 0), list[str]()
    for kind, plant in kinds.items():
        for _ in range(count):
            records = read(folder)
            name = plant(records, folder, chance)
            problems = audit_copy(folder, records)
            if any(name in problem for problem in problems):
                found[kind] += 1
            else:
                missed.append(f"{kind} of {name}: {problems[:2]}")
    return {"planted": count * len(kinds), "found": found, "missed": missed[:5]}


def audit_copy(folder: Path, records: list[Record]) -> list[str]:
    """Return what the audit finds in a copy of a folder with other records."""
    with tempfile.TemporaryDirectory(prefix="verl-planted-", dir=folder.parent) as directory:
        copy = Path(directory, "run")
        shutil.copytree(folder, copy, copy_function=os.link)
        (copy / "trained.jsonl").unlink()
        (copy / "trained.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return audit_run(copy).problems


Plant = Callable[[list[Record], Path, random.Random], str]
"""Changes the records of a folder; returns what the audit has to name."""


def choose_step(records: list[Record], chance: random.Random, first: int = 1) -> Record:
    return chance.choice([record for record in records if "trained" in record and record["step"] >= first])


def plant_duplicate(records: list[Record], folder: Path, chance: random.Random) -> str:
    """Train a position again that an earlier step has trained."""
    later = choose_step(records, chance, first=2)
    position = chance.choice(
        [row[0] for each in records if each["step"] < later["step"] for row in each.get("trained", [])]
    )
    later["trained"].append([position, later["version"], later["version"], 4])
    return f"position {position} "


def plant_gap(records: list[Record], folder: Path, chance: random.Random) -> str:
    """Do not train a position."""
    trained = choose_step(records, chance)["trained"]
    return f"position {trained.pop(chance.randrange(len(trained)))[0]}"


def plant_lost_step(records: list[Record], folder: Path, chance: random.Random) -> str:
    """Remove the record of a step, but not of the last one."""
    record = chance.choice([each for each in records[:-1] if "trained" in each])
    records.remove(record)
    return f"step {record['step'] + 1} "


def plant_version_of_the_step(records: list[Record], folder: Path, chance: random.Random) -> str:
    """Let a step train other weights, with responses that are as fresh as before."""
    record, change = choose_step(records, chance), chance.choice([-1, 1])
    record["version"] += change
    record["trained"] = [
        [position, oldest + change, newest + change, samples] for position, oldest, newest, samples in record["trained"]
    ]
    return f"step {record['step']} says"


def plant_version_too_old(records: list[Record], folder: Path, chance: random.Random) -> str:
    """Let a response be sampled by weights that are too old."""
    record = choose_step(records, chance)
    row = chance.choice(record["trained"])
    row[1] = record["version"] - record["max_staleness"] - 1
    return f"position {row[0]} "


def plant_version_in_bounds(records: list[Record], folder: Path, chance: random.Random) -> str:
    """Let recorded responses be sampled by other weights, which are not too old."""
    source = RunFolder(folder)
    files = {file.step: file for file in source.list_samples() if file.split == "train"}
    record = chance.choice(
        [each for each in records if "trained" in each and each["step"] in files and each["version"]]
    )
    groups = set(source.read_samples(files[record["step"]], ["group"]).column("group").to_pylist())
    row = chance.choice([row for row in record["trained"] if row[0] in groups])
    allowed = range(max(0, record["version"] - record["max_staleness"]), record["version"] + 1)
    others = [(first, last) for first in allowed for last in allowed if first <= last and [first, last] != row[1:3]]
    row[1:3] = chance.choice(others)
    return f"position {row[0]} "


if __name__ == "__main__":
    main()
