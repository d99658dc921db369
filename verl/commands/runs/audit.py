"""`verl audit`: prove from the folder of a run that every prompt was trained on exactly once, and in time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import MANIFEST, PREFIX, CheckpointDir, find_corruption
from verl.commands.arguments import ArgumentParser
from verl.errors import VerlError, list_some
from verl.tracking.run_folder import RunFolder, is_run_folder

HELP = """\
usage: verl audit RUN [--json]

Check what a run has trained on, from the files in its folder: `trained.jsonl`, which says for each step the positions
in the data and the versions of the weights that sampled the responses, is checked against itself, the checkpoints,
`metrics.jsonl`, and the versions of every token in `samples/`. The run may still be going on, or have been killed and
resumed any number of times.

Each step comes once, and trains the weights that the step before has left; each position of the data was trained on
once, or rejected by dynamic sampling, or dropped as too long, and none was skipped; no response was older than
trainer.max_staleness; and every checkpoint continues with exactly the positions that were not done. A run that was
resumed in another folder is checked from there on.

options:
  RUN     folder of the run (trainer.default_local_dir)
  --json  print the result as one line of JSON

example:
  verl audit checkpoints/verl/default
"""


@dataclass
class Audit:
    """What the records of a run say, and what is wrong with them."""

    steps: int = 0
    trained: int = 0
    unscored: int = 0  # trained ones without a response that had a score
    rejected: int = 0
    dropped: int = 0
    open: int = 0  # positions before the last one that is done, which are not done yet
    staleness: dict[int, int] = field(default_factory=dict)  # groups by the age of their oldest token
    resumes: int = 0
    checkpoints: int = 0  # compared ones; so are the next two
    metrics: int = 0  # steps of metrics.jsonl
    samples: int = 0  # groups in samples/
    position: int = 0  # the first one that was not done after the last step
    problems: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Print the result; return 1 if something is wrong."""
    parser = ArgumentParser("verl audit")
    parser.add_argument("run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    result = audit_run(Path(options.run))
    if options.json:
        sys.stdout.write(f"{json.dumps(vars(result))}\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in describe(result)))
    return int(bool(result.problems))


def audit_run(folder: Path) -> Audit:
    """Check the records of a run against themselves and against its checkpoints."""
    result, done = Audit(), dict[int, int]()  # position -> the step that has used it
    records = list(_read_records(folder))
    resumes = [each for each in records if "resumed" in each]
    states, metrics = dict(_read_checkpoints(folder, resumes)), _read_metrics(folder)
    recorded = _read_versions(folder, resumes)
    for record in records:
        if "resumed" in record:
            _check_resume(result, record, done)
            continue
        if record["step"] != result.steps + 1:
            result.problems.append(f"step {record['step']} follows step {result.steps}")
        result.steps = record["step"]
        _check_step(result, record, done)
        _check_metrics(result, record, metrics.get(result.steps, {}))
        _check_samples(result, record, recorded.get(result.steps, {}))
        if (state := states.get(result.steps)) is not None:
            result.checkpoints += 1
            _check_checkpoint(result, state, done)
    if done:
        result.open = sum(position not in done for position in range(result.position, max(done)))
    return result


def describe(result: Audit) -> Iterator[str]:
    """Yield lines for people."""
    yield (
        f"{result.steps:,} steps, {result.trained:,} prompts trained on, each once"
        if not result.problems
        else (f"{result.steps:,} steps, {result.trained:,} prompts trained on; {len(result.problems):,} problems")
    )
    if result.rejected or result.dropped:
        yield f"{result.rejected:,} rejected by dynamic sampling, {result.dropped:,} dropped as too long"
    if result.unscored:
        yield f"{result.unscored:,} of them without a response, since all failed or were discarded"
    if result.open:
        yield f"{result.open:,} earlier prompts are not done yet; they come in the next steps"
    ages = sorted(result.staleness.items())
    yield "versions that responses lag behind: " + ", ".join(f"{age}: {count:,}" for age, count in ages)
    yield (
        f"compared with {result.checkpoints:,} checkpoints, {result.metrics:,} steps of metrics.jsonl and "
        f"{result.samples:,} groups in samples/; resumes: {result.resumes:,}"
    )
    yield from result.problems


def _read_records(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / "trained.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise VerlError(
            f"verl audit: {path} cannot be read: {error.strerror}. Give the folder of an RL run "
            "(trainer.default_local_dir)"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):  # the last one may be being written
                raise VerlError(f"verl audit: {path}: line {number} is not JSON: {error}") from error


def _read_checkpoints(folder: Path, resumes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the steps of complete checkpoints, and the state of their data.

    A checkpoint that was written before the run went back to an earlier step belongs to steps that were replaced.
    """
    source = CheckpointDir(folder)
    for path in folder.glob(f"{PREFIX}*"):
        if find_corruption(path, checksums=False):
            continue
        step, written = int(path.name.removeprefix(PREFIX)), (path / MANIFEST).stat().st_mtime
        if not any(resume["step"] < step and written < resume["time"] for resume in resumes):
            yield step, source.read_trainer_state(step)["data"]


def _read_metrics(folder: Path) -> dict[int, Mapping[str, float]]:
    if not is_run_folder(folder):
        return {}
    return {each.step: each.values for each in RunFolder(folder).read_metrics()}


def _read_versions(folder: Path, resumes: Sequence[Mapping[str, Any]]) -> dict[int, dict[int, tuple[int, int]]]:
    """Return by step and position the first and the last version that sampled a token, of whole groups in samples/.

    Samples that a run recorded before it went back to an earlier step belong to steps that were replaced.
    """
    found: dict[int, dict[int, tuple[int, int]]] = {}
    source = RunFolder(folder) if is_run_folder(folder) else None
    for file in source.list_samples() if source else ():
        if file.split != "train":
            continue
        assert source is not None
        rows = source.read_samples(file, ("group", "versions", "scored")).to_pylist()
        written = max((row["scored"] for row in rows), default=0.0)
        if any(resume["step"] < file.step and written < resume["time"] for resume in resumes):
            continue
        for row in rows:
            for version in row["versions"]:
                if version >= 0:  # other tokens were not generated
                    groups = found.setdefault(file.step, {})
                    first, last = groups.get(row["group"], (version, version))
                    groups[row["group"]] = min(first, version), max(last, version)
    return found


def _check_resume(result: Audit, record: Mapping[str, Any], done: dict[int, int]) -> None:
    """Check that a resume continues where the records end. The first record may be a resume from another folder."""
    result.resumes += 1
    if result.steps == 0:
        result.steps, result.position = record["step"], record["position"]
        done.update(dict.fromkeys(_list_done(record), 0))
    elif record["step"] != result.steps:
        result.problems.append(
            f"the run resumed after step {record['step']}, but the last record is step {result.steps}"
        )
    elif wrong := set(_list_done(record)) ^ done.keys():
        result.problems.append(f"the resume after step {result.steps} is wrong about {_name(wrong)}")


def _list_done(state: Mapping[str, Any]) -> list[int]:
    return [*range(state["position"]), *state.get("consumed", ())]


def _name(positions: Iterable[int]) -> str:
    return list_some([f"position {each}" for each in sorted(positions)])


def _check_step(result: Audit, record: Mapping[str, Any], done: dict[int, int]) -> None:
    step, version = record["step"], record["version"]
    trained = [position for position, *_ in record["trained"]]
    for position in (*trained, *record["rejected"], *record["dropped"]):
        if position in done:
            result.problems.append(f"position {position} was used by step {done[position]} and again by step {step}")
        done[position] = step
    if version != step - 1:
        result.problems.append(f"step {step} says that it trained version {version} of the weights, not {step - 1}")
    for position, oldest, newest, samples in record["trained"]:
        age = version - oldest
        result.unscored += samples == 0
        result.staleness[age] = result.staleness.get(age, 0) + 1
        if not 0 <= version - newest <= age <= record["max_staleness"]:
            result.problems.append(
                f"step {step} trained position {position} at version {version} of the weights, with tokens of versions "
                f"{oldest} to {newest}; at most {record['max_staleness']} versions behind are allowed"
            )
    skipped = [position for position in range(result.position, record["position"]) if position not in done]
    result.position = record["position"]
    if skipped:
        result.problems.append(f"step {step} skipped {_name(skipped)}")
    result.trained += len(trained)
    result.rejected += len(record["rejected"])
    result.dropped += len(record["dropped"])


def _check_metrics(result: Audit, record: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Compare a record with what the metrics of its step say."""
    ages = [record["version"] - oldest for _, oldest, _, samples in record["trained"] if samples]
    expected = {
        "data/position": record["position"],
        "weights/version": record["step"],
        "training/staleness": max(ages, default=0),
    }
    result.metrics += any(name in metrics for name in expected)
    result.problems += [
        f"step {record['step']}: metrics.jsonl has {name}={metrics[name]:g}, but trained.jsonl means {value}"
        for name, value in expected.items()
        if name in metrics and metrics[name] != value
    ]


def _check_samples(result: Audit, record: Mapping[str, Any], recorded: Mapping[int, tuple[int, int]]) -> None:
    """Compare the versions of trained groups with those of the tokens in samples/."""
    step, trained = record["step"], {position: (first, last) for position, first, last, _ in record["trained"]}
    for position, (first, last) in recorded.items():
        result.samples += 1
        if position not in trained:
            result.problems.append(f"step {step}: samples/ has position {position}, but trained.jsonl does not")
        elif (claimed := trained[position]) != (first, last):
            result.problems.append(
                f"step {step}: the tokens of position {position} in samples/ are of versions {first} to {last}, but "
                f"trained.jsonl says {claimed[0]} to {claimed[1]}"
            )


def _check_checkpoint(result: Audit, state: Mapping[str, Any], done: Mapping[int, int]) -> None:
    """Compare the positions that a checkpoint calls done with those of the records so far."""
    if wrong := set(_list_done(state)) ^ done.keys():
        result.problems.append(f"the checkpoint of step {result.steps} is wrong about {_name(wrong)}")
