"""Builds the sampler that orders the training prompts."""

from __future__ import annotations

from verl.config.schema.root import Config
from verl.custom_functions import load_function
from verl.data.dataset import PromptDataset
from verl.data.samplers import (
    BufferedShuffleSampler,
    CurriculumSampler,
    CustomSampler,
    Sampler,
    SamplerFunction,
    SequentialSampler,
    ShuffledSampler,
    WeightedSampler,
)
from verl.errors import ConfigError, DataError


def load_sampler(name: str) -> SamplerFunction:
    """Load the function that data.sampler names."""
    known: dict[str, SamplerFunction] = {}
    try:
        return load_function(name, known, "data.sampler")
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def build_sampler(config: Config, dataset: PromptDataset, entries: list[str]) -> Sampler:
    """Return the sampler for a data set of these entries of data.train_files."""
    data = config.data
    seed = config.trainer.seed if data.seed is None else data.seed
    if data.sampler is not None:
        return CustomSampler(load_sampler(data.sampler), data.sampler, len(dataset), seed, dataset.column)
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
