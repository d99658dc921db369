"""The files of a run: model folders, data files and their columns, and the folder that the run writes to."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from verl.checkpoint.locate import find_shards
from verl.config.batch_sizes import count_total_steps
from verl.config.features import data_splits, uses_critic
from verl.config.schema import Config
from verl.data.adaptive import load_sampler
from verl.data.files import find_files, open_rows, suggest_path
from verl.errors import ConfigError, VerlError, list_some
from verl.memory_plan.accelerators import GIB
from verl.models.model_folder import CONFIG, INDICES, read_config, read_header, read_json
from verl.preflight.finding import Finding, Severity
from verl.trainer.build.preflight import (
    estimate_checkpoint_bytes,
    find_all_model_problems,
    find_data_problems,
    find_folder_problems,
)


def find_model_findings(config: Config) -> Iterator[Finding]:
    """Yield what is wrong with the models, as far as their files tell."""
    yield from map(Finding.from_message, find_all_model_problems(config))
    paths = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if uses_critic(config) and config.critic.model.path is not None:
        paths["critic.model.path"] = config.critic.model.path
    for key, path in paths.items():
        if (folder := Path(path).expanduser()).is_dir() and find_shards(folder) is None:
            yield from _find_weight_problems(f"{key}={path}", folder)


def _find_weight_problems(place: str, folder: Path) -> Iterator[Finding]:
    """Yield which files of a Hugging Face model are missing or incomplete."""
    fix = "copy or download the whole folder again, such as with `hf download`"
    if not read_config(str(folder)):
        state = "cannot be read" if (folder / CONFIG).exists() else "is missing"
        yield Finding(Severity.ERROR, place, f"{CONFIG} {state}", fix)
        return
    wanted = {shard for name in INDICES if (folder / name).is_file() for shard in _list_shards(folder / name)}
    found = {file.name for file in folder.glob("*.safetensors")}
    if missing := sorted(wanted - {file.name for file in folder.iterdir()}):
        yield Finding(Severity.ERROR, place, f"the index of its weights names missing files: {list_some(missing)}", fix)
    elif not found and not list(folder.glob("*.bin")):
        yield Finding(Severity.ERROR, place, "has no weights (*.safetensors)", fix)
    for name in sorted(found):
        try:
            read_header(folder / name)
        except ValueError as error:
            yield Finding(Severity.ERROR, place, str(error), fix)


def _list_shards(index: Path) -> set[str]:
    try:
        content = read_json(index)
        return set(map(str, content["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # reported with the safety of the model
        return set()


def find_data_findings(config: Config) -> Iterator[Finding]:
    """Yield what is wrong with the data files, their columns and the sampler."""
    for split in data_splits(config):
        for problem in find_data_problems(config, split):
            yield Finding.from_message(problem, place=f"data.{split}_files")
    if config.data.sampler is not None:
        try:
            load_sampler(config.data)
        except ConfigError as error:
            yield from map(Finding.from_message, error.problems)


def describe_data(config: Config) -> str:
    """Return how many files and rows each split has."""
    parts = []
    for split, entries in data_splits(config).items():
        files = [open_rows(path) for path in find_files(entries)]
        parts.append(f"{split}: {sum(map(len, files)):,} rows in {len(files):,} file{'s' * (len(files) > 1)}")
    return ", ".join(parts)


def find_folder_findings(config: Config) -> Iterator[Finding]:
    """Yield why the folder of the run cannot be written, or has no room for the checkpoints that are kept."""
    problems = list(find_folder_problems(config))
    yield from map(Finding.from_message, problems)
    yield from _find_resume_problems(config)
    folder = config.trainer.checkpoint_dir.absolute()
    kept, needed = count_kept_checkpoints(config), estimate_checkpoint_bytes(config)
    if problems or not kept or not needed:
        return
    free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
    if kept * needed > free:
        yield Finding(
            Severity.WARNING,
            f"trainer.default_local_dir={folder}",
            f"the run keeps {kept:,} checkpoints of about {needed / GIB:.1f} GiB, and its disk has only "
            f"{free / GIB:.1f} GiB free",
            f"set trainer.max_ckpts_to_keep={max(1, free // needed - 1)}, or another folder",
        )


def _find_resume_problems(config: Config) -> Iterator[Finding]:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode == "path" and path is not None and not Path(path).expanduser().is_dir():
        existing, near = suggest_path(Path(path).expanduser())
        fix = f"set trainer.resume_from_path={near}" if near else "set it to a folder global_step_N of a run"
        yield Finding(Severity.ERROR, f"trainer.resume_from_path={path}", f"there is no such folder; {existing}", fix)


def count_kept_checkpoints(config: Config) -> int:
    """Return how many checkpoints the run leaves on its disk; 0 if that is not known or it saves none."""
    trainer = config.trainer
    if trainer.save_freq == -1:
        return 0
    try:
        rows = sum(len(open_rows(path)) for path in find_files(data_splits(config).get("train", [])))
    except VerlError:
        return 0
    saves = 1 if trainer.save_freq is None else math.ceil(count_total_steps(config, rows) / trainer.save_freq)
    return saves if trainer.max_ckpts_to_keep is None else min(saves, trainer.max_ckpts_to_keep)
