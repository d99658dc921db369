"""The data of an RL run, read and checked once by the controller; episode workers read only the rows that were kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl.config.batch_sizes import get_max_sequence_tokens
from verl.config.features import data_splits, may_score_code, uses_reward_function, uses_task_rewards
from verl.config.schema.actor import ModelConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.root import Config
from verl.config.schema.sft import SftConfig
from verl.data.adaptive import AdaptiveSampler, load_sampler, takes_scores
from verl.data.chat import (
    chat_template_hint,
    describe_vocabulary_gap,
    load_tokenizer,
    teacher_template_hint,
)
from verl.data.dataset import DatasetSettings, PromptDataset, PromptOptions, extract_reward_fields
from verl.data.files import CACHED_BYTES, suggest_path
from verl.data.samplers import (
    BufferedShuffleSampler,
    CurriculumSampler,
    CustomSampler,
    Sampler,
    SequentialSampler,
    ShuffledSampler,
    WeightedSampler,
)
from verl.data.validate import MOST_SHOWN, find_data_warnings
from verl.errors import ConfigError, DataError, RewardError
from verl.models.model_support import family_note, packing_length_problem
from verl.models.stop_tokens import find_stop_tokens
from verl.rewards.reward_function import explain_no_scorer, find_builtin, resolve_scorer
from verl.rewards.scorers import code

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from verl.agents.agent_episode import AgentEpisode


@dataclass(frozen=True, slots=True)
class RunData:
    """What the controller keeps of the data. The prompts themselves are read where the episodes run."""

    datasets: dict[str, DatasetSettings]
    order: Sampler
    val_sources: list[str]
    reports: list[str]
    stop_token_ids: tuple[int, ...]
    vocabulary: int


def open_agents(config: Config, tokenizer: PreTrainedTokenizerBase) -> AgentEpisode:
    """Return the episode of several turns; check its tools, its agents and the chat template."""
    from verl.agents.agent_episode import AgentEpisode  # only runs of several turns need them
    from verl.agents.rendering import check_template

    rollout, template_kwargs = config.actor_rollout_ref.rollout, config.data.apply_chat_template_kwargs
    episode = AgentEpisode(config, tokenizer)
    if rollout.multi_turn.tokenization_sanity_check_mode == "strict":
        branches = rollout.multi_turn.use_inference_chat_template
        schemas, only_tools = episode.list_schemas(), episode.has_only_tools
        check_template(tokenizer, schemas, template_kwargs, branches=branches, only_tools=only_tools)
    return episode


class FieldRows(Protocol):
    """Rows of data files, such as a `PromptDataset`."""

    def iter_fields(self, names: Sequence[str]) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """Yield the number, the prompt and other columns of every row."""
        ...

    def location(self, row: int) -> str: ...


def check_rows(datasets: Iterable[FieldRows], episode: AgentEpisode) -> None:
    """Raise a `DataError` that lists the rows which cannot be played: unknown agents or tools, prompts of text.

    Raise a `ConfigError` if the first prompt with tools does not show them to the model.
    """
    names = ("agent_name", "tools", "tool_selection", "extra_info", "reward_model")
    problems = []
    for dataset in datasets:
        is_checked = False
        for row, raw, fields in dataset.iter_fields(names):
            try:
                extra_info = extract_reward_fields(fields)["extra_info"]
                problem = episode.find_problem(raw, extra_info)
                if problem is None and not is_checked and episode.get_agent_name(extra_info) == "tool_agent":
                    is_checked = True
                    episode.check_tools_are_shown(raw, extra_info)
            except DataError as error:
                problem = str(error)
            if problem is not None:
                problems.append(f"{dataset.location(row)}: {problem}")
    if problems:
        shown, more = problems[:MOST_SHOWN], len(problems) - MOST_SHOWN
        raise DataError("\n".join([*shown, *([f"... and {more:,} more rows"] if more > 0 else [])]))


def prompt_options(data: DataConfig, *, is_training: bool = True) -> PromptOptions:
    """Return how the rows of training or validation files become prompts."""
    return PromptOptions(
        data.max_prompt_length,
        prompt_key=data.prompt_key,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        max_samples=data.train_max_samples if is_training else data.val_max_samples,
    )


def add_tools(options: PromptOptions, tools: Sequence[Mapping[str, Any]]) -> PromptOptions:
    """Return the options for prompts that also have the descriptions of tools."""
    return replace(options, chat_template_kwargs={**options.chat_template_kwargs, "tools": tools}) if tools else options


def read_data(config: Config) -> RunData:
    """Read and tokenize all prompts (of streamed data a few), to find those that are too long or cannot be scored."""
    model = config.actor_rollout_ref.model
    tokenizer = open_tokenizer(model, "actor_rollout_ref.model")
    datasets: dict[str, DatasetSettings] = {}
    reports: list[str] = []
    val_sources: list[str] = []
    agents = open_agents(config, tokenizer) if config.actor_rollout_ref.rollout.multi_turn.enable else None
    tools = [] if agents is None else agents.list_schemas()
    opened: list[PromptDataset] = []
    teacher, teacher_notes = _open_teacher(config, tokenizer) if config.distillation.enable else (None, [])
    for split, files in data_splits(config).items():
        options = add_tools(prompt_options(config.data, is_training=split == "train"), tools)
        if split == "train":
            options = replace(options, streaming=_should_stream(config))
        has_own_template = (
            split == "train" and teacher is not None and config.distillation.teacher.use_own_chat_template
        )
        dataset = PromptDataset(
            files,
            tokenizer,
            options,
            num_workers=config.data.num_workers,
            cache_dir=length_cache_dir(config),
            teacher=teacher if has_own_template else None,
        )
        options = replace(options, streaming=dataset.report.streamed)
        teacher_path = config.distillation.teacher.path if has_own_template else None
        datasets[split] = DatasetSettings(files, options, dataset.kept, teacher_path)
        opened.append(dataset)
        reports += [str(dataset.report), *find_data_warnings(dataset.files)]
        if dataset.report.streamed:
            sources = [prompt.data_source for prompt in dataset.sample() if prompt is not None]
            reports += _streaming_warnings(config, dataset)
        else:
            sources = dataset.sources()
        if split == "train":
            reports += _template_hints(config, dataset.row(0)[config.data.prompt_key], tokenizer, teacher)
            order = build_sampler(config, dataset, files)
            if order.is_adaptive and config.trainer.max_staleness > 0:
                raise ConfigError(
                    [
                        f"data.sampler={config.data.sampler} chooses prompts by scores, whose order would depend on "
                        "time; set trainer.max_staleness=0"
                    ]
                )
        else:
            val_sources = sources
        unknown = sorted(source for source in set(sources) if resolve_scorer(config, source) is None)
        if unknown and uses_reward_function(config) and (split != "train" or uses_task_rewards(config)):
            others = f". The same holds for {', '.join(map(repr, unknown[1:6]))}" if len(unknown) > 1 else ""
            raise RewardError(f"{dataset.report.name}: {explain_no_scorer(unknown[0])}{others}")
        if may_score_code(config) and any(find_builtin(source) == code.__name__ for source in sources):
            sandbox = config.reward.sandbox
            code.check_requirements(sandbox_url=sandbox.url, require=sandbox.require)
    if agents is not None:
        check_rows(opened, agents)
    longest = get_max_sequence_tokens(config)
    loaded, notes = check_model(model, longest, "data.max_prompt_length + data.max_response_length")
    reports += [*notes, *teacher_notes]
    stops = find_stop_tokens(model.path, tokenizer.eos_token_id)
    return RunData(datasets, order, val_sources, reports, stops, loaded.get_text_config().vocab_size)


def check_model(
    model: ModelConfig, longest: int, settings: str, *, published: bool = True
) -> tuple[PretrainedConfig, list[str]]:
    """Return the configuration of a model, and notes for the user.

    Raises if it cannot be trained on packed sequences of `longest` tokens, which the `settings` allow.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    if problem := packing_length_problem(model.path, config.get_text_config().to_dict(), longest, settings):
        raise ConfigError([problem])
    note = family_note(model.path, config.model_type, published=published)
    return config, [note] if note else []


def _template_hints(
    config: Config, prompt: Any, tokenizer: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase | None
) -> list[str]:
    """Return hints about chat templates, from the first prompt of the training data."""
    kwargs, is_used = config.data.apply_chat_template_kwargs, config.distillation.teacher.use_own_chat_template
    hints = [chat_template_hint(tokenizer, prompt, kwargs)]
    if teacher is not None:
        hints.append(teacher_template_hint(tokenizer, teacher, prompt, kwargs, is_used=is_used))
    return [hint for hint in hints if hint]


def _open_teacher(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Check that a teacher knows the policy's tokens and can read its sequences; return its tokenizer, and notes."""
    student, path = config.actor_rollout_ref.model, config.distillation.teacher.path
    assert path is not None
    teacher = ModelConfig(path=path, trust_remote_code=student.trust_remote_code)
    other = open_tokenizer(teacher, "distillation.teacher")
    loaded, notes = check_model(
        teacher, get_max_sequence_tokens(config), "data.max_prompt_length + data.max_response_length", published=False
    )
    size = loaded.get_text_config().vocab_size
    if gap := describe_vocabulary_gap(tokenizer.get_vocab(), other.get_vocab(), size):
        raise ConfigError([f"distillation.teacher.path={path}: {gap}"])
    if config.distillation.teacher.use_own_chat_template and other.chat_template is None:
        key = "distillation.teacher.use_own_chat_template"
        raise ConfigError([f"{key}: true requires a chat template, but {path} has none; set {key}=false"])
    return other, notes


def open_tokenizer(model: ModelConfig, section: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the trained model; `section` is the name of its settings, for messages."""
    key, path = ("tokenizer_path", model.tokenizer_path) if model.tokenizer_path else ("path", model.path)
    try:
        return load_tokenizer(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{section}.{key}={path}: no tokenizer found: {error}{_suggest_folder(path)}"]) from error


def _suggest_folder(path: str) -> str:
    """Return a hint for a path that is not a local folder and was therefore looked for on the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return ""
    existing, near = suggest_path(folder)
    question = f"did you mean {near}? " if near is not None and near.is_dir() else ""
    return f"\n{question}{path} is not a local folder, and was taken for a name on the hub; {existing}"


def _should_stream(config: Config) -> bool | None:
    """Return data.streaming; its default None (by file size) becomes False if the order needs all rows."""
    data = config.data
    needs_all_rows = data.curriculum_key is not None or data.sampler is not None
    return False if data.streaming is None and needs_all_rows else data.streaming


def _streaming_warnings(config: Config, dataset: PromptDataset) -> list[str]:
    data, warnings = config.data, []
    if not data.filter_overlong_prompts and data.truncation == "error":
        warnings.append(
            f"a prompt longer than data.max_prompt_length={data.max_prompt_length} will stop the run when it is "
            "reached; set data.filter_overlong_prompts=True to drop such prompts"
        )
    if data.shuffle and dataset.bytes_per_row * data.shuffle_buffer_size > CACHED_BYTES:
        max_rows = int(CACHED_BYTES / dataset.bytes_per_row)
        warnings.append(
            f"data.shuffle_buffer_size={data.shuffle_buffer_size:,} rows do not fit into the {CACHED_BYTES >> 20} MiB "
            f"of data that are cached, so blocks are read several times; set data.shuffle_buffer_size={max_rows}"
        )
    return warnings


def length_cache_dir(config: Config | SftConfig) -> Path:
    """Return the folder in which prompt lengths are cached between runs."""
    return Path(config.data.cache_dir or "~/.cache/verl").expanduser() / "lengths"


def _build_custom_sampler(data: DataConfig, dataset: PromptDataset, seed: int) -> Sampler:
    """Return the sampler that data.sampler names."""
    assert data.sampler is not None
    sampler, kwargs = load_sampler(data), data.sampler_kwargs
    if not takes_scores(sampler):
        return CustomSampler(sampler, data.sampler, len(dataset), seed, dataset.column, kwargs)
    try:
        return AdaptiveSampler(sampler, data.sampler, len(dataset), seed, dataset.column, kwargs)
    except ValueError as error:
        raise ConfigError([f"data.sampler_kwargs: {error}"]) from error


def build_sampler(config: Config, dataset: PromptDataset, entries: list[str]) -> Sampler:
    """Return the sampler for a data set of these entries of data.train_files."""
    data = config.data
    seed = config.trainer.seed if data.seed is None else data.seed
    if data.sampler is not None:
        return _build_custom_sampler(data, dataset, seed)
    if data.train_weights is None:
        return _build_part(config, dataset, range(len(dataset)), seed, data.shuffle_buffer_size)
    starts = [0, *dataset.entry_ends[:-1]]
    parts = []
    for index, (start, stop) in enumerate(zip(starts, dataset.entry_ends, strict=True)):
        if start == stop:
            raise DataError(
                f"{entries[index]}: no rows are left of it, but it has a weight in data.train_weights; "
                "remove both, or check data.train_max_samples and data.max_prompt_length"
            )
        buffer = max(1, data.shuffle_buffer_size // len(starts))
        parts.append(_build_part(config, dataset, range(start, stop), seed + index, buffer))
    return WeightedSampler(parts, data.train_weights, seed)


def _build_part(config: Config, dataset: PromptDataset, rows: range, seed: int, buffer: int) -> Sampler:
    data = config.data
    if data.curriculum_key is not None:
        numbers = dataset.numbers(data.curriculum_key)[rows.start : rows.stop]
        return CurriculumSampler(numbers, data.curriculum_key, seed if data.shuffle else None)
    if not data.shuffle:
        return SequentialSampler(len(rows))
    if not dataset.report.streamed:
        return ShuffledSampler(len(rows), seed)
    ends = dataset.block_ends()
    return BufferedShuffleSampler(ends[(ends > rows.start) & (ends <= rows.stop)] - rows.start, buffer, seed)
