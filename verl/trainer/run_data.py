"""The data of a run, read and checked once by the controller; episode workers are told which rows survived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.batch_sizes import get_max_sequence_tokens
from verl.config.features import uses_critic
from verl.config.schema.actor import ModelConfig
from verl.config.schema.root import Config
from verl.config.schema.sft import SftConfig
from verl.data.chat import chat_template_hint, load_tokenizer
from verl.data.dataset import PromptDataset
from verl.data.files import CACHED_BYTES, suggest_path
from verl.data.samplers import Sampler
from verl.data.validate import find_data_warnings, find_file_problems
from verl.errors import ConfigError, DataError, RewardError
from verl.model_safety import model_problems
from verl.rewards.resolve import resolve_scorer
from verl.rewards.reward_function import explain_no_scorer
from verl.trainer.prompt_sampler import build_sampler, load_sampler
from verl.training.families import family_note, family_problems, packing_length_problem
from verl.workers.episodes import DatasetSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = [
    "RunData",
    "check_files",
    "check_length",
    "data_splits",
    "find_model_problems",
    "find_stop_tokens",
    "length_cache_dir",
    "open_tokenizer",
    "raise_data_problems",
    "read_data",
]


@dataclass(frozen=True, slots=True)
class RunData:
    """What the controller keeps of the data: numbers. The prompts are read again where the episodes run."""

    datasets: dict[str, DatasetSettings]
    order: Sampler
    val_sources: list[str]
    reports: list[str]
    stop_token_ids: tuple[int, ...]
    vocabulary: int

    @property
    def has_validation(self) -> bool:
        return bool(self.val_sources)


def check_files(config: Config) -> None:
    """In a blink: models and data are there, and the data can be read and has the columns that the settings name."""
    if wrong := [*_wrong_models(config)]:
        raise ConfigError(wrong)
    if config.data.sampler is not None:
        load_sampler(config.data.sampler)
    raise_data_problems([problem for split in data_splits(config) for problem in _inspect(config, split)])


def raise_data_problems(problems: list[str]) -> None:
    """What is wrong with the data, if anything is: all of it at once."""
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        lines = [f"{len(problems)} things are wrong with the data:", *(f"  - {problem}" for problem in problems)]
        raise DataError("\n".join(lines))


def _wrong_models(config: Config) -> Iterator[str]:
    """Of the models that this run will load, those of a local path where nothing is, or what must not be loaded."""
    actor, reward = config.actor_rollout_ref.model, config.reward
    paths = {"actor_rollout_ref.model.path": actor.path, "actor_rollout_ref.model.tokenizer_path": actor.tokenizer_path}
    if uses_critic(config):
        paths["critic.model.path"] = config.critic.model.path
    if reward.prime.enable:
        paths["reward.prime.model_path"] = reward.prime.model_path
    if reward.reward_model.enable:
        paths["reward.reward_model.model_path"] = reward.reward_model.model_path
    return find_model_problems(paths, trust_remote_code=actor.trust_remote_code)


def find_model_problems(paths: Mapping[str, str | None], *, trust_remote_code: bool) -> Iterator[str]:
    """The same of the paths that these settings name."""
    for key, path in paths.items():
        if path is None:
            continue
        problems = model_problems(path, trust_remote_code=trust_remote_code)
        yield from (f"{key}: {problem}" for problem in problems)
        if not key.endswith(_NOT_TRAINED):
            yield from (f"{key}: {problem}" for problem in family_problems(path))
        if not path.startswith((".", "/", "~")) or Path(path).expanduser().is_dir():
            continue
        there, near = suggest_path(Path(path).expanduser())
        mend = f"set {key}={near}" if near and near.is_dir() else f"set {key} to a directory with a Hugging Face model"
        yield f"{key}={path}: there is no such directory; {there}; {mend}"


_NOT_TRAINED = (".tokenizer_path", ".reward_model.model_path")


def read_data(config: Config) -> RunData:
    """Tokenise every prompt once, to know which are too long (streamed ones are only tried); `DataError` says what is
    wrong with a file."""
    from transformers import AutoConfig

    model = config.actor_rollout_ref.model
    tokenizer = open_tokenizer(model, "actor_rollout_ref.model")
    datasets: dict[str, DatasetSettings] = {}
    reports: list[str] = []
    val_sources: list[str] = []
    for split, files in data_splits(config).items():
        arguments: dict[str, Any] = {
            "prompt_key": config.data.prompt_key,
            "max_prompt_length": config.data.max_prompt_length,
            "filter_overlong": config.data.filter_overlong_prompts,
            "truncation": config.data.truncation,
            "chat_template_kwargs": config.data.apply_chat_template_kwargs,
            "max_samples": config.data.train_max_samples if split == "train" else config.data.val_max_samples,
        }
        dataset = PromptDataset(
            files,
            tokenizer,
            **arguments,
            streaming=split == "train" and _streams(config),
            num_workers=config.data.num_workers,
            cache_dir=length_cache_dir(config),
        )
        arguments["streaming"] = dataset.report.streamed
        datasets[split] = DatasetSettings(files, arguments, dataset.kept)
        reports += [str(dataset.report), *find_data_warnings(dataset.files)]
        if dataset.report.streamed:
            sources = [prompt.data_source for prompt in dataset.sample() if prompt is not None]
            reports += _cautions(config, dataset)
        else:
            sources = dataset.sources()
        if split == "train":
            first = dataset.row(0)[config.data.prompt_key]
            hint = chat_template_hint(tokenizer, first, config.data.apply_chat_template_kwargs)
            reports += [hint] if hint else []
            order = build_sampler(config, dataset, files)
        else:
            val_sources = sources
        unknown = sorted(source for source in set(sources) if resolve_scorer(config, source) is None)
        if unknown:
            others = f". The same holds for {', '.join(map(repr, unknown[1:6]))}" if len(unknown) > 1 else ""
            raise RewardError(f"{dataset.report.name}: {explain_no_scorer(unknown[0])}{others}")
    found = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    check_length(
        model.path, found, get_max_sequence_tokens(config), "data.max_prompt_length + data.max_response_length"
    )
    reports += [note] if (note := family_note(model.path, found.model_type)) else []
    stops = find_stop_tokens(model.path, tokenizer)
    return RunData(datasets, order, val_sources, reports, stops, found.get_text_config().vocab_size)


def check_length(path: str, found: PretrainedConfig, longest: int, settings: str) -> None:
    """Raises if a model cannot be trained on packed sequences as long as the settings allow."""
    if wrong := packing_length_problem(path, found.get_text_config().to_dict(), longest, settings):
        raise ConfigError([wrong])


def open_tokenizer(model: ModelConfig, section: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that is trained; `section` is where its settings stand."""
    key, path = ("tokenizer_path", model.tokenizer_path) if model.tokenizer_path else ("path", model.path)
    try:
        return load_tokenizer(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{section}.{key}={path}: no tokenizer found: {error}{_taken_for_a_name(path)}"]) from error


def _taken_for_a_name(path: str) -> str:
    """Of what is no folder here, and was looked for on the hub: what may have been meant."""
    folder = Path(path).expanduser()
    there, near = ("", None) if folder.is_dir() else suggest_path(folder)
    meant = f"did you mean {near}? " if near is not None and near.is_dir() else ""
    return f"\n{meant}{path} is no folder here, and was taken for a name on the hub; {there}" if there else ""


def find_stop_tokens(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end an answer of the model at `path`."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the model brings none: the tokenizer's end token is all there is
        ends = None
    return tuple(sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}))


def data_splits(config: Config | SftConfig) -> dict[str, list[str]]:
    """The entries of the data files that there are: paths and patterns."""
    given = {"train": config.data.train_files, "val": config.data.val_files}
    return {split: [files] if isinstance(files, str) else files for split, files in given.items() if files}


def _inspect(config: Config, split: str) -> list[str]:
    """What is wrong with the files of a split, as far as can be seen without reading rows."""
    keys = {"prompt_key": config.data.prompt_key}
    if split == "train" and config.data.curriculum_key is not None:
        keys["curriculum_key"] = config.data.curriculum_key
    weighted = split == "train" and config.data.train_weights is not None
    return find_file_problems(data_splits(config)[split], keys, weighted=weighted)


def _streams(config: Config) -> bool | None:
    """As it was asked for; None leaves it to the size of the files, unless the order needs all rows."""
    data = config.data
    needs_all = data.curriculum_key is not None or data.sampler is not None
    return False if data.streaming is None and needs_all else data.streaming


def _cautions(config: Config, dataset: PromptDataset) -> list[str]:
    """What one should know of a streamed data set before it is noticed."""
    data, found = config.data, []
    if not data.filter_overlong_prompts and data.truncation == "error":
        found.append(
            f"a prompt longer than data.max_prompt_length={data.max_prompt_length} will stop the run when its turn "
            "comes; data.filter_overlong_prompts=True leaves such prompts out"
        )
    if data.shuffle and dataset.bytes_a_row * data.shuffle_buffer_size > CACHED_BYTES:
        fitting = int(CACHED_BYTES / dataset.bytes_a_row)
        found.append(
            f"data.shuffle_buffer_size={data.shuffle_buffer_size:,} rows do not fit into the {CACHED_BYTES >> 20} MiB "
            f"that are kept of the data, so that blocks are read several times; try data.shuffle_buffer_size={fitting}"
        )
    return found


def length_cache_dir(config: Config | SftConfig) -> Path:
    """Where lengths are kept from one start to the next."""
    return Path(config.data.cache_dir or "~/.cache/verl").expanduser() / "lengths"
