"""The data of a run, read and checked once by the controller; episode workers are told which rows survived."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.needs import uses_reward_function
from verl.config.schema.root import Config
from verl.data.dataset import PromptDataset, require_prompts
from verl.errors import ConfigError, RewardError
from verl.rewards.score import no_scorer, scorer_of
from verl.workers.episodes import DatasetSettings

__all__ = ["RunData", "check_files", "read_data"]


@dataclass(frozen=True, slots=True)
class RunData:
    """What the controller keeps of the data: numbers. The prompts are read again where the episodes run."""

    datasets: dict[str, DatasetSettings]
    train_rows: int
    val_sources: list[str]
    reports: list[str]
    stop_token_ids: tuple[int, ...]
    vocabulary: int

    @property
    def has_validation(self) -> bool:
        return bool(self.val_sources)


def check_files(config: Config) -> None:
    """In a blink: model and data are there, and the data can be read and has the prompt's column."""
    models = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if config.reward.reward_model.enable:
        models["reward.reward_model.model_path"] = config.reward.reward_model.model_path or ""
    for key, model in models.items():
        if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
            raise ConfigError([f"{key}={model}: there is no such directory"])
    for files in (config.data.train_files, config.data.val_files):
        if files:
            require_prompts(files, config.data.prompt_key)


def read_data(config: Config) -> RunData:
    """Tokenise every prompt once, to know which are too long; `DataError` says what is wrong with a file."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    model = config.actor_rollout_ref.model
    trust = model.trust_remote_code
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_path or model.path, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ConfigError([f"actor_rollout_ref.model.path={model.path}: no tokenizer found: {error}"]) from error
    datasets: dict[str, DatasetSettings] = {}
    reports, val_sources = [], []
    for split, files, limit in (
        ("train", config.data.train_files, config.data.train_max_samples),
        ("val", config.data.val_files, config.data.val_max_samples),
    ):
        if not files:
            continue
        arguments: dict[str, Any] = {
            "prompt_key": config.data.prompt_key,
            "max_prompt_length": config.data.max_prompt_length,
            "filter_overlong": config.data.filter_overlong_prompts,
            "truncation": config.data.truncation,
            "chat_template_kwargs": config.data.apply_chat_template_kwargs,
            "max_samples": limit,
            "keep_raw": config.data.return_raw_input_ids,
        }
        names = [files] if isinstance(files, str) else list(files)
        dataset = PromptDataset(names, tokenizer, **arguments)
        datasets[split] = DatasetSettings(names, arguments, dataset.kept)
        reports.append(str(dataset.report))
        sources = dataset.sources()
        if split == "val":
            val_sources = sources
        unknown = sorted(source for source in set(sources) if not _is_scored(config, source))
        if unknown:
            others = f". The same holds for {', '.join(map(repr, unknown[1:6]))}" if len(unknown) > 1 else ""
            raise RewardError(f"{dataset.report.name}: {no_scorer(unknown[0])}{others}")
    try:
        ends = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError:  # the model brings none: the tokenizer's end token is all there is
        ends = None
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    vocabulary = AutoConfig.from_pretrained(model.path, trust_remote_code=trust).get_text_config().vocab_size
    train_rows = len(datasets["train"].kept)
    return RunData(datasets, train_rows, val_sources, reports, tuple(sorted(stops)), vocabulary)


def _is_scored(config: Config, source: str) -> bool:
    if not uses_reward_function(config):
        return True
    function = config.reward.custom_reward_function
    return scorer_of(source, function.path, function.name, config.reward.functions) is not None
