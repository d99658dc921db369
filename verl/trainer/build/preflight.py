"""Checks before anything starts: models, data files, the reward function and the run's folder, reported together."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.checkpoint.locate import find_shards
from verl.cluster.nvidia_smi import query_gpus
from verl.config.checks import train_engine
from verl.config.checks.device_support import check_capability, find_cpu_conflicts
from verl.config.features import (
    data_splits,
    get_checkpoint_settings,
    get_model_settings,
    list_trained_models,
    saves_hf,
    scores_responses,
    uses_critic,
    uses_reward_function,
)
from verl.config.schema import SftConfig
from verl.config.schema.actor import FsdpConfig
from verl.config.schema.conditions import ACTOR, ROLLOUT
from verl.config.schema.root import Config
from verl.data.adaptive import load_sampler
from verl.data.files import suggest_path
from verl.data.validate import find_file_problems
from verl.errors import ConfigError, DataError, RewardError, VerlError
from verl.memory_plan.accelerators import GIB
from verl.models.model_folder import read_config
from verl.models.model_safety import model_problems
from verl.models.model_shape import ModelShape
from verl.models.model_support import expert_problem, family_problems, heads_problem
from verl.trainer.build.adapter_checks import find_adapter_problems

_NOT_TRAINED = (".tokenizer_path", ".reward_model.model_path")


async def check_rl_run(config: Config, reward: Callable[..., Any] | None = None) -> None:
    """Raise one error with everything that is wrong with the files, the reward function and the folder of a run."""
    problems = [*find_problems(config), *(ConfigError([problem]) for problem in find_folder_problems(config))]
    try:
        await check_reward(config, reward)
    except RewardError as error:
        problems.append(error)
    raise_problems(problems)


def check_files(config: Config) -> None:
    """Raise one error with everything that is wrong with models and data files, as far as a quick look can see."""
    raise_problems(find_problems(config))


def find_problems(config: Config) -> list[VerlError]:
    """Return what is wrong with models and data files."""
    problems: list[VerlError] = [ConfigError([problem]) for problem in find_all_model_problems(config)]
    if config.data.sampler is not None:
        try:
            load_sampler(config.data)
        except ConfigError as error:
            problems.append(error)
    for split in data_splits(config):
        problems += map(DataError, find_data_problems(config, split))
    return problems


def find_data_problems(config: Config, split: str) -> list[str]:
    """Return what is wrong with the files of a split: missing, unreadable, or without a column that is needed."""
    data, keys, weighted = config.data, {"prompt_key": config.data.prompt_key}, False
    if split == "train":
        keys |= {} if data.curriculum_key is None else {"curriculum_key": data.curriculum_key}
        weighted = data.train_weights is not None
    return find_file_problems(data_splits(config)[split], keys, weighted=weighted)


def find_folder_problems(config: Config | SftConfig) -> Iterator[str]:
    """Yield why a run could not save at its end: its folder cannot be written, or has no room for a checkpoint."""
    if config.trainer.save_freq == -1:
        return
    folder = config.trainer.checkpoint_dir.absolute()
    fix = "set trainer.default_local_dir to another folder, or trainer.save_freq=-1 to save nothing"
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        yield f"trainer.default_local_dir={folder}: cannot be written ({existing}: {error.strerror}); {fix}"
        return
    needed = estimate_checkpoint_bytes(config)
    if free < needed:
        yield (
            f"trainer.default_local_dir={folder}: its disk has {free / GIB:.1f} GiB free, and a checkpoint needs about "
            f"{needed / GIB:.1f} GiB; free space, or {fix}"
        )


def estimate_checkpoint_bytes(config: Config | SftConfig) -> int:
    """Return the bytes that a checkpoint of the policy needs; 0 for an adapter, or an unknown model."""
    (_, base), (_, checkpoint) = get_model_settings(config), get_checkpoint_settings(config)
    _, model, _, optim = list_trained_models(config)[0]
    content = read_config(base.path)
    if not content or model.peft.lora_rank:
        return 0
    size = 4 if model.fsdp_config.model_dtype == "float32" else 2
    moments = {"adamw": 2 * size, "adamw_8bit": 2, "muon": size}[optim.name]
    saved = {"model": size, "optimizer": moments}
    parameters = ModelShape.from_config(content, base.path).parameters
    exported = 2 if saves_hf(config) else 0  # an export that nobody asked for may fail
    return parameters * (exported + sum(saved.get(part, 0) for part in checkpoint.save_contents))


async def check_reward(config: Config, reward: Callable[..., Any] | None = None) -> None:
    """Load the reward function once in a process of its own, so that its import cannot affect this one."""
    if not uses_reward_function(config) or not scores_responses(config):
        return
    from verl.rewards.pool.pool import open_rewards
    from verl.trainer.build.reward_settings import reward_function_settings

    settings = reward_function_settings(config, function=reward)
    with open_rewards(replace(settings, workers=min(1, settings.workers))) as pool:
        await pool.start()


def memory_notes(config: Config, device: str) -> list[str]:
    """Return a note if the run does not fit on the accelerators of this machine, by the estimate of `verl plan`.

    It does not stop the run, because it is an estimate. Nothing is known on a machine without accelerators.
    """
    from verl.memory_plan.suggestions import memory_note
    from verl.trainer.build.worker_settings import train_settings  # imports Ray, after models and data were checked

    memory = None if device == "cpu" else read_device_memory()
    note = None if memory is None else memory_note(config, memory, train_settings)
    return [] if note is None else [note]


def advise_on_cores(ranks: int, device: str, cores: int) -> str | None:
    """Return advice if train ranks, of which there are 8 by default, have to share the cores of the machine."""
    if device != "cpu" or ranks <= cores:
        return None
    return (
        f"this machine has no GPU, and {ranks} train ranks share its {cores} CPU cores: the run will be slow; set "
        "trainer.n_gpus_per_node=1"
    )


def read_device_memory() -> int | None:
    """Return the bytes of this machine's smallest NVIDIA accelerator, without using it; None if there is none."""
    try:
        return min(int(line) for line in query_gpus("memory.total")) << 20
    except ValueError:
        return None


def check_determinism(config: Config, device: str) -> None:
    """Raise if a run is to be deterministic and the GPUs of this machine are too old; workers check theirs again."""
    if not config.trainer.deterministic or device == "cpu":
        return
    for line in query_gpus("compute_cap"):
        major, _, minor = line.partition(".")
        if major.isdigit() and minor.isdigit():
            check_capability((int(major), int(minor)))


def check_engine_layout(config: Config, device: str) -> None:
    """Raise if engines of the wanted sizes need accelerators, and this machine has none (trainer.device=auto)."""
    if device == "cpu" and (problems := [*find_cpu_conflicts(config), *train_engine.find_cpu_conflicts(config)]):
        raise ConfigError(problems)


def raise_problems(problems: Sequence[VerlError]) -> None:
    """Raise all problems as one error: of their own type if they share it, else as a `ConfigError`."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    if all(isinstance(problem, DataError) for problem in problems):
        lines = [f"{len(problems)} things are wrong with the data:", *(f"  - {problem}" for problem in problems)]
        raise DataError("\n".join(lines))
    raise ConfigError([text for problem in problems for text in (getattr(problem, "problems", None) or [str(problem)])])


def find_all_model_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the models that a run loads, as far as their files tell."""
    actor, reward = config.actor_rollout_ref.model, config.reward
    paths = {"actor_rollout_ref.model.path": actor.path, "actor_rollout_ref.model.tokenizer_path": actor.tokenizer_path}
    if uses_critic(config):
        paths["critic.model.path"] = config.critic.model.path
    if reward.prime.enable:
        paths["reward.prime.model_path"] = reward.prime.model_path
    if config.distillation.enable:
        paths["distillation.teacher.path"] = config.distillation.teacher.path
    if reward.reward_model.enable:
        paths["reward.reward_model.model_path"] = reward.reward_model.model_path
    trained = config.actor_rollout_ref.actor
    yield from find_model_problems(paths, trust_remote_code=actor.trust_remote_code)
    yield from find_heads_problems(ACTOR, trained.ulysses_sequence_parallel_size, paths)
    routing: list[tuple[str, object, object]] = [
        ("router_replay.mode", trained.router_replay.mode, "disabled"),
        ("router_aux_loss_coef", trained.router_aux_loss_coef, 0),
    ]
    for name, value, default in routing:
        if value != default and (problem := expert_problem(actor.path)):
            yield f"{ACTOR}.{name}: {value} has no routers to work on: {problem}; set {ACTOR}.{name}={default}"
    rollout = config.actor_rollout_ref.rollout
    for name in ("data_parallel_size", "expert_parallel_size"):
        key, size = f"{ROLLOUT}.{name}", getattr(rollout, name)
        if size > 1 and (problem := expert_problem(actor.path, size if name == "expert_parallel_size" else 1)):
            yield f"{key}: {size} is for MoE models: {problem}; set {key}=1"
    yield from find_expert_problems(f"{ACTOR}.fsdp_config", trained.fsdp_config, actor.path)
    if uses_critic(config):
        critic = config.critic
        yield from find_expert_problems("critic.fsdp_config", critic.fsdp_config, critic.model.path or actor.path)
    yield from find_adapter_problems(config)


def find_expert_problems(section: str, fsdp: FsdpConfig, path: str) -> Iterator[str]:
    """Yield why the experts of a model cannot be distributed."""
    key, size = f"{section}.expert_parallel_size", fsdp.expert_parallel_size
    if size > 1 and (problem := expert_problem(path, size)):
        yield f"{key}: {size} is not possible with this model: {problem}; set {key}=1"


def find_heads_problems(section: str, size: int, paths: Mapping[str, str | None]) -> Iterator[str]:
    """Yield which of the models cannot share sequences, because of their attention heads."""
    key = f"{section}.ulysses_sequence_parallel_size"
    for name, path in paths.items():
        if path is not None and not name.endswith(_NOT_TRAINED) and (problem := heads_problem(path, size)):
            yield f"{key}: {size} is not possible with {name}: {problem}"


def find_model_problems(paths: Mapping[str, str | None], *, trust_remote_code: bool) -> Iterator[str]:
    """Yield what is wrong with models, by the setting that names each: missing, unsafe, or of an unsupported kind."""
    for key, path in paths.items():
        if path is None:
            continue
        yield from (f"{key}: {problem}" for problem in model_problems(path, trust_remote_code=trust_remote_code))
        if not key.endswith(_NOT_TRAINED):
            yield from (f"{key}: {problem}" for problem in family_problems(path))
        folder = Path(path).expanduser()
        if find_shards(folder) is not None:
            fix = f"run `verl merge {path} --target_dir merged` and set {key}=merged"
            yield f"{key}={path}: is a checkpoint, not a Hugging Face model; {fix}"
        if folder.is_dir() or not _is_local(path):
            continue
        existing, near = suggest_path(folder)
        fix = f"set {key}={near}" if near and near.is_dir() else f"set {key} to a directory with a Hugging Face model"
        yield f"{key}={path}: there is no such directory; {existing}; {fix}"


def _is_local(path: str) -> bool:
    """Return whether a path cannot be a name on the hub, such as `org/model`, or its folder exists here."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or ("/" in path and Path(path).parent.is_dir())
