"""Tasks of the package `reasoning-gym` as data: `reasoning_gym://TASK?size=1000&seed=1&difficulty=2`.

Each row holds what the task's verifier needs; `verl.rewards.scorers.reasoning_gym` calls it.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from verl.errors import DataError
from verl.installation import format_install_hint
from verl.private_files import make_folder

SCHEME = "reasoning_gym://"
INSTRUCTION = "Give the final answer between <answer> and </answer>."
UNEARNED = {"coin_flip", "game_of_life_halting"}  # their verifiers give 1 for "0" and for any text (0.1.25)
_FIX = f"Write {SCHEME}TASK?size=1000&seed=1&difficulty=2, and other options of the task the same way"


def generate_file(address: str, cache: Path) -> Path:
    """Return the file of a task's rows, written by the first process that needs it.

    Args:
        address: The task and its options: `size` and `seed` of the rows, `difficulty` (a level of the task's
            curriculum, from 0), and fields of the task's configuration.
        cache: Folder of the files; the same address and version of the package give the same file.
    """
    task, _, query = address.removeprefix(SCHEME).partition("?")
    options = {"size": 1000, "seed": 0} | {key: _parse(value) for key, value in parse_qsl(query)}
    try:
        dataset = load_task(task, options)
    except ImportError as error:
        hint = format_install_hint("reasoning-gym")
        raise DataError(f"{address} needs the package reasoning-gym ({error}). Run {hint}") from error
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{address}: {error}. {_FIX}") from error
    version = hashlib.sha256(f"{address} {metadata.version('reasoning-gym')}".encode()).hexdigest()[:16]
    target = cache / version / f"{task}.jsonl"
    if not target.is_file():
        make_folder(target.parent)
        descriptor, draft = tempfile.mkstemp(prefix=".", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                for index, entry in enumerate(dataset):
                    file.write(json.dumps(make_row(task, options, index, entry)) + "\n")
            os.replace(draft, target)
        finally:
            Path(draft).unlink(missing_ok=True)
    return target


def make_row(task: str, options: dict[str, Any], index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTION}"}],
        "reward_model": {"ground_truth": entry["answer"] or ""},
        "extra_info": {"index": index, "options": json.dumps(options), "entry": json.dumps(entry, default=str)},
    }


def load_task(task: str, options: Mapping[str, Any]) -> Any:
    """Return a task with these options: its entries by index, and `score_answer`, their verifier.

    Raises:
        ImportError: The package is not installed.
        ValueError, TypeError, AssertionError: The task or its options are wrong.
    """
    gym = importlib.import_module("reasoning_gym")
    tasks, curricula = gym.factory.DATASETS, gym.factory.CURRICULA
    if task not in tasks or task in UNEARNED:
        usable = sorted(tasks.keys() - UNEARNED)
        near = difflib.get_close_matches(task, usable, n=3)
        problem = "gives 1 for wrong answers to the task" if task in tasks else "has no task"
        raise ValueError(f"reasoning-gym {problem} {task!r}; it has {', '.join(near or usable)}")
    make_dataset, make_config = tasks[task]
    fields = dict(options)
    difficulty = fields.pop("difficulty", None)
    if difficulty is None:
        return make_dataset(config=make_config(**fields))
    if task not in curricula:
        raise ValueError(f"{task} has no levels of difficulty; set its own options instead")
    curriculum = gym.factory.create_curriculum(task)
    curriculum.set_global_level(int(difficulty))
    return make_dataset(config=dataclasses.replace(curriculum.generate_configuration(), **fields))


def _parse(value: str) -> Any:
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return value
