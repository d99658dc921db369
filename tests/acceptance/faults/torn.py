"""Damaged checkpoints: the newest complete one is always chosen, the damage is named, and nothing wrong is ever loaded.

Two real ranks train a small actor and a critic and save 4 steps. Then, 300 times, in a copy of them: a file of the
newest step, or of each of the two or three newest, is truncated, missing, or has one flipped bit; or a fifth save is
killed (SIGKILL) at a random byte or between two of its operations on files. A resumed run must choose the newest whole
step, say what is wrong with each that it passes over, and load exactly what was saved.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from _checkpoints import chosen, equal, loaded, save, states_of
from _common import finish
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from verl.algorithms.objective import PolicyObjective
from verl.checkpoint.background import BackgroundWriter
from verl.checkpoint.manifest import CheckpointDir
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

STEPS = 4
KINDS = ("truncated", "missing", "flipped", "killed")
MANIFEST = "ckpt_contents.json"
LATEST = "latest_checkpointed_iteration.txt"


def main() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="40 cases instead of 300")
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    cases, draw = (40 if options.short else 300), random.Random(options.seed)
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="verl-torn-") as directory:
        whole = Path(directory, "whole")
        make(whole)
        truth = {step: states_of(CheckpointDir(whole).step_dir(step)) for step in range(1, STEPS + 1)}
        truth[STEPS + 1] = grown(truth[STEPS])
        ticks = lifetime(Path(directory, "case"), whole, truth[STEPS + 1])
        print(f"a save has {ticks[0]:,} bytes and {ticks[1]} other operations on files", flush=True)
        for case in range(cases):
            kind, root = KINDS[case % len(KINDS)], Path(directory, "case")
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(whole, root)
            if kind == "killed":
                expected, named, what = killed(root, truth[STEPS + 1], ticks, draw)
            else:
                expected, named, what = harmed(root, kind, draw)
            wrong += [f"case {case}, {kind}, {what}: {problem}" for problem in judged(root, expected, named, truth)]
            counts[kind if kind != "killed" or expected == STEPS else "killed after the commit"] += 1
    for line in wrong[:20]:
        print(line)
    finish("torn", not wrong, cases=cases, by_kind=dict(counts), wrong=len(wrong), seed=options.seed)


def judged(root: Path, expected: int, named: list[str], truth: dict[int, Any]) -> list[str]:
    """What is wrong with the choice, the messages and the loaded state."""
    step, messages = chosen(root)
    problems = [] if step == expected else [f"{step} was chosen, {expected} is the newest whole one ({messages})"]
    problems += [f"{words!r} is not in {messages}" for words in named if not any(words in line for line in messages)]
    if step is not None and not equal(loaded(CheckpointDir(root).step_dir(step)), truth[step]):
        problems.append(f"what was loaded from step {step} is not what was saved")
    return problems


def harmed(root: Path, kind: str, draw: random.Random) -> tuple[int, list[str], str]:
    """Harm one file of each of the newest steps: (the newest whole one, what messages must contain)."""
    depth = draw.choice((1, 1, 2, 3))
    named, done = [], []
    for step in range(STEPS, STEPS - depth, -1):
        directory = CheckpointDir(root).step_dir(step)
        file = draw.choice(sorted(path for path in directory.rglob("*") if path.is_file()))
        data = bytearray(file.read_bytes())
        place = draw.randrange(len(data))
        if kind == "missing":
            file.unlink()
        elif kind == "truncated":
            file.write_bytes(data[:place])
        else:
            data[place] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
        inside = str(file.relative_to(directory))
        done.append(f"{inside} of step {step} at byte {place} of {len(data)}")
        named.append(f"global_step_{step}: {inside}")
    if draw.random() < 0.2 and kind != "flipped":  # a flipped digit may name another step, as a user may
        (root / LATEST).write_bytes(b"") if kind == "truncated" else (root / LATEST).unlink()
    return STEPS - depth, named, "; ".join(done)


def killed(
    root: Path, states: dict[str, Any], ticks: tuple[int, int], draw: random.Random
) -> tuple[int, list[str], str]:
    """Save a fifth step in a process that dies of SIGKILL at a random byte, or before or after another operation."""
    by_bytes = draw.random() < 0.5
    moment = draw.randrange(ticks[0]) if by_bytes else draw.randrange(2 * ticks[1])
    pid = os.fork()
    if pid == 0:
        die_at(bytes_left=moment if by_bytes else None, halves_left=None if by_bytes else moment)
        save(root, STEPS + 1, states, keep=3)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), "it lived"
    assert os.WTERMSIG(status) == signal.SIGKILL
    expected = int((root / LATEST).read_text())  # written last: what it names is complete
    left = (root / f"global_step_{STEPS + 1}").exists() and not (root / f"global_step_{STEPS + 1}" / MANIFEST).exists()
    named = [f"global_step_{STEPS + 1}: ", "the save did not finish"] if left else []
    return expected, named, f"after {moment} {'bytes' if by_bytes else 'half operations'}, with {expected} declared"


def lifetime(root: Path, whole: Path, states: dict[str, Any]) -> tuple[int, int]:
    """How many bytes a save writes, and how many other operations on files it has."""
    shutil.copytree(whole, root)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        counts = die_at(None, None)
        save(root, STEPS + 1, states, keep=3)
        os.write(writer, f"{counts['bytes']} {counts['others']}".encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    written, others = os.read(reader, 100).split()
    return int(written), int(others)


def die_at(bytes_left: int | None, halves_left: int | None) -> Counter[str]:
    """Let this process kill itself when it has written so many bytes, or at the given half (before, after) of an
    operation. Returns the counts so far."""
    counts: Counter[str] = Counter()
    real_write = os.write

    def write(descriptor: int, data: Any) -> int:
        room = len(data) if bytes_left is None else bytes_left - counts["bytes"]
        done = real_write(descriptor, data[:room])
        counts["bytes"] += done
        if bytes_left is not None and counts["bytes"] >= bytes_left:
            die()
        return done

    def watched(real: Any) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            counts["others"] += 1
            if halves_left == 2 * counts["others"] - 2:
                die()
            result = real(*args, **kwargs)
            if halves_left == 2 * counts["others"] - 1:
                die()
            return result

        return operation

    os.write = write
    for name in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, watched(getattr(os, name)))
    return counts


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("unreachable")


def grown(states: dict[str, Any]) -> dict[str, Any]:
    """The state of a step later: every number another one."""
    return {
        name: grown(value) if isinstance(value, dict) else value + value.new_ones(()) for name, value in states.items()
    }


def make(root: Path) -> None:
    """The real thing, by two ranks."""
    torch.manual_seed(0)
    config = tiny_qwen2(hidden_size=32, intermediate_size=48)
    Qwen2ForCausalLM(config).save_pretrained(root / "model")
    config.num_labels = 1
    Qwen2ForTokenClassification(config).save_pretrained(root / "value_model")
    run_ranks(train, 2, free_port(), root, deadline_s=600)
    shutil.rmtree(root / "model")
    shutil.rmtree(root / "value_model")


def train(rank: int, port: int, root: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    actor = FsdpEngine(FsdpSettings(str(root / "model"), schedule=Schedule(1e-2)))
    critic = FsdpEngine(FsdpSettings(str(root / "value_model"), head="value", role="critic"))
    tokens = torch.arange(rank, rank + 12) % 64
    ones = torch.ones(12)
    mask = torch.tensor([False] * 4 + [True] * 8)
    batch = FlatBatch(tokens, torch.tensor([0, 12]), mask, None, -4 * ones, -4 * ones, ones)
    writer, checkpoints = BackgroundWriter(), CheckpointDir(root)
    for step in range(1, STEPS + 1):
        actor.update([batch], PolicyObjective())
        if rank == 0:
            checkpoints.begin(step)
        dist.barrier()
        states = {"actor": actor.state(), "critic": critic.state()}
        writer.start(states, checkpoints.step_dir(step), {"data": {"position": 10 * step}})
        writer.poll(wait=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
