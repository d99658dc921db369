"""The data of a run, read and checked once by the controller; episode workers are told which rows survived."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config.batch_sizes import get_max_sequence_tokens
from verl.config.schema.actor import ModelConfig
from verl.config.schema.root import Config
from verl.config.schema.sft import SftConfig
from verl.data.chat import chat_template_hint, load_tokenizer
from verl.data.dataset import PromptDataset
from verl.data.files import CACHED_BYTES, suggest_path
from verl.data.samplers import Sampler
from verl.data.validate import find_data_warnings
from verl.errors import ConfigError, RewardError
from verl.rewards.resolve import resolve_scorer
from verl.rewards.reward_function import explain_no_scorer
from verl.trainer.preflight import data_splits
from verl.trainer.prompt_sampler import build_sampler
from verl.training.families import family_note, packing_length_problem
from verl.workers.episodes import DatasetSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = [
    "RunData",
    "check_length",
    "find_stop_tokens",
    "length_cache_dir",
    "open_tokenizer",
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
        settings = DatasetSettings(
            files,
            prompt_key=config.data.prompt_key,
            max_prompt_length=config.data.max_prompt_length,
            filter_overlong=config.data.filter_overlong_prompts,
            truncation=config.data.truncation,
            chat_template_kwargs=config.data.apply_chat_template_kwargs,
            max_samples=config.data.train_max_samples if split == "train" else config.data.val_max_samples,
            streaming=split == "train" and _streams(config),
        )
        dataset = settings.open(tokenizer, num_workers=config.data.num_workers, cache_dir=length_cache_dir(config))
        datasets[split] = replace(settings, streaming=dataset.report.streamed, kept=dataset.kept)
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
