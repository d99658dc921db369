"""The data of an SFT run: files of examples, read and checked once before training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from verl.config.features import data_splits
from verl.config.schema import SftConfig
from verl.data.chat import PromptError
from verl.data.dataset import DataReport
from verl.data.files import ColumnChunk, Files, FileSet, to_python
from verl.data.lengths import TokenCounter, measure_lengths
from verl.data.samplers import Sampler, SequentialSampler, ShuffledSampler
from verl.data.validate import describe_missing_column, find_data_warnings, find_file_problems
from verl.errors import ConfigError, DataError, VerlError
from verl.models.stop_tokens import find_stop_tokens
from verl.sft.examples import Example, ExampleReader, find_missing_header, list_columns
from verl.trainer.build.adapter_checks import find_adapter_problems
from verl.trainer.build.data import check_model, length_cache_dir, open_tokenizer
from verl.trainer.build.preflight import (
    find_expert_problems,
    find_folder_problems,
    find_heads_problems,
    find_model_problems,
    raise_problems,
)

MAX_CHECKED = 1000  # truncated examples that are checked for trained tokens


class ExampleDataset(FileSet):
    """The examples of one or several Parquet or JSONL files; `dataset[row]` is an `Example`.

    All are read once at start, so that a bad row is found before training. `lengths [N]` counts the tokens of each.
    Examples longer than `data.max_length` are an error or truncated, as `data.truncation` says.
    """

    def __init__(
        self,
        files: Files,
        reader: ExampleReader,
        *,
        max_samples: int = -1,
        cache_dir: Path | None = None,
    ) -> None:
        super().__init__(files)
        self._reader, data, columns = reader, reader.data, list_columns(reader.data)
        self._limit = max_length = data.max_length
        self.tokenizer = reader.tokenizer
        for file in self.files:
            for setting, column in columns.items():
                if problem := describe_missing_column(file, column, setting, columns):
                    raise DataError(problem)
        rows = self.count_rows(max_samples)
        lengths, from_cache = measure_lengths(
            self.files,
            rows,
            tuple(columns.values()),
            _ExampleLengths(reader),
            processes=data.num_workers,
            folder=cache_dir,
        )
        long = np.flatnonzero(lengths > max_length)
        if len(long) and data.truncation == "error":
            raise DataError(self._explain_too_long(int(long[0]), int(lengths[long[0]]), len(long), int(lengths.max())))
        self.lengths = np.minimum(lengths, max_length)
        self.report = DataReport(self.name, rows, 0, len(long), rows, max_length, from_cache)
        self._long = long

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Example:
        file, local = self.locate(row)
        try:
            return self._reader(file.row(local)).truncate(self._limit, self._reader.data.truncation)
        except DataError as error:
            raise DataError(f"{file.location(local)}: {error}") from None

    def truncation_warnings(self) -> list[str]:
        """Warn of truncated examples that have no trained token left."""
        checked = self._long[:MAX_CHECKED].tolist()
        empty = [row for row in checked if not self[row].mask.any()]
        if not empty:
            return []
        return [
            f"{self.name}: {len(empty):,} of {len(checked):,} truncated examples have no token left to train on "
            f"(the first: {self.location(empty[0])}): what precedes the response fills data.max_length={self._limit}. "
            "Increase it, set data.truncation=left, or remove such rows"
        ]

    def _explain_too_long(self, row: int, length: int, count: int, longest: int) -> str:
        others = f"; {count - 1} more are too long (the longest: {longest})" if count > 1 else ""
        return (
            f"{self.location(row)}: the example has {length} tokens, more than data.max_length={self._limit}"
            f"{others}. Set data.max_length={longest}, or data.truncation=right or left"
        )


@dataclass(frozen=True, slots=True)
class _ExampleLengths:
    """Counts the tokens of examples."""

    reader: ExampleReader

    def __call__(self, chunk: ColumnChunk) -> npt.NDArray[np.int32]:
        lengths = []
        for index, row in enumerate(to_python(chunk)):
            try:
                lengths.append(len(self.reader(row).tokens))
            except DataError as error:
                raise PromptError(index, str(error)) from None
        return np.array(lengths, np.int32)

    def fingerprint(self) -> str | None:
        reader = self.reader
        template = TokenCounter(reader.tokenizer, reader.data.apply_chat_template_kwargs).fingerprint()
        parts = f"{template} {reader.stops} {list_columns(reader.data)}"
        return None if template is None else hashlib.sha256(parts.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SFTData:
    """Training data, its order, validation data, and notes for the user."""

    train: ExampleDataset
    order: Sampler
    val: ExampleDataset | None
    notes: list[str]


def check_sft_run(config: SftConfig) -> None:
    """Raise one error with everything that is wrong with the files and the folder of a run."""
    check_sft_files(config, find_folder_problems(config))


def check_sft_files(config: SftConfig, others: Iterable[str] = ()) -> None:
    """Raise one error with everything that is wrong with the model and data files, as far as a quick look can see.

    `others` are problems to report with them.
    """
    model = config.model
    paths = {"model.path": model.path, "model.tokenizer_path": model.tokenizer_path}
    found = [
        *find_model_problems(paths, trust_remote_code=model.trust_remote_code),
        *find_heads_problems("model", model.ulysses_sequence_parallel_size, paths),
        *find_expert_problems("model.fsdp_config", model.fsdp_config, model.path),
        *find_adapter_problems(config),
        *others,
    ]
    problems: list[VerlError] = [ConfigError([problem]) for problem in found]
    for files in data_splits(config).values():
        problems += map(DataError, find_file_problems(files, list_columns(config.data)))
    raise_problems(problems)


def read_sft_data(config: SftConfig) -> SFTData:
    """Read and tokenize every example once, so that a bad row is found before training."""
    data = config.data
    tokenizer = open_tokenizer(config.model, "model")
    reader = ExampleReader(tokenizer, find_stop_tokens(config.model.path, tokenizer.eos_token_id), data)
    datasets: dict[str, ExampleDataset] = {}
    notes: list[str] = []
    for split, files in data_splits(config).items():
        dataset = datasets[split] = ExampleDataset(
            files,
            reader,
            max_samples=data.train_max_samples if split == "train" else data.val_max_samples,
            cache_dir=length_cache_dir(config),
        )
        notes += [str(dataset.report), *find_data_warnings(dataset.files), *dataset.truncation_warnings()]
    train = datasets["train"]
    first = next(file for file in train.files if len(file)).row(0).get(data.prompt_key)
    if data.messages_key is None and isinstance(first, str):
        warning = find_missing_header(tokenizer, first, data.apply_chat_template_kwargs)
        notes += [f"{train.report.name}: {warning}"] if warning else []
    notes += check_model(config.model, data.max_length, "data.max_length", published=False)[1]
    seed = config.trainer.seed if data.seed is None else data.seed
    order = ShuffledSampler(len(train), seed) if data.shuffle else SequentialSampler(len(train))
    return SFTData(train, order, datasets.get("val"), notes)
