"""The data of an SFT run: read and checked once, then loaded batch by batch, one step ahead of training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.config.schema import SftConfig
from verl.data.samplers import Sampler, SequentialSampler, ShuffledSampler
from verl.data.validate import find_data_warnings, find_file_problems
from verl.errors import ConfigError, DataError, VerlError
from verl.sft.batches import ExampleDataset, RankBatch
from verl.sft.examples import Example, ExampleReader, find_missing_header
from verl.trainer.preflight import find_model_problems, raise_problems
from verl.trainer.run_data import (
    check_length,
    data_splits,
    find_stop_tokens,
    length_cache_dir,
    open_tokenizer,
)
from verl.training.families import family_note

SplitBatch = Callable[[Sequence[Example]], list[RankBatch]]
"""A batch -> the part of every rank."""


class Examples(Protocol):
    """An `ExampleDataset`, or a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> Example: ...


@dataclass(frozen=True, slots=True)
class SFTData:
    """Training data, its order, validation data, and notes for the user."""

    train: ExampleDataset
    order: Sampler
    val: ExampleDataset | None
    notes: list[str]


def check_sft_files(config: SftConfig) -> None:
    """Raise one error with everything that is wrong with the model and data files, as far as a quick look can see."""
    model, data = config.model, config.data
    paths = {"model.path": model.path, "model.tokenizer_path": model.tokenizer_path}
    problems: list[VerlError] = [
        ConfigError([problem]) for problem in find_model_problems(paths, trust_remote_code=model.trust_remote_code)
    ]
    keys = {"prompt_key": data.prompt_key, "response_key": data.response_key}
    if data.messages_key is not None:
        keys = {"messages_key": data.messages_key}
    if data.tools_key is not None:
        keys["tools_key"] = data.tools_key
    for files in data_splits(config).values():
        problems += map(DataError, find_file_problems(files, keys))
    raise_problems(problems)


def read_sft_data(config: SftConfig) -> SFTData:
    """Read and tokenize every example once, so that a bad row is found before training."""
    from transformers import AutoConfig

    data = config.data
    tokenizer = open_tokenizer(config.model, "model")
    reader = ExampleReader(
        tokenizer,
        find_stop_tokens(config.model.path, tokenizer),
        data.prompt_key,
        data.response_key,
        data.messages_key,
        data.tools_key,
        data.apply_chat_template_kwargs,
    )
    datasets: dict[str, ExampleDataset] = {}
    notes: list[str] = []
    for split, files in data_splits(config).items():
        dataset = datasets[split] = ExampleDataset(
            files,
            reader,
            max_length=data.max_length,
            truncation=data.truncation,
            max_samples=data.train_max_samples if split == "train" else data.val_max_samples,
            num_workers=data.num_workers,
            cache_dir=length_cache_dir(config),
        )
        notes += [str(dataset.report), *find_data_warnings(dataset.files), *dataset.truncation_warnings()]
    train = datasets["train"]
    first = next(file for file in train.files if len(file)).row(0).get(data.prompt_key)
    if data.messages_key is None and isinstance(first, str):
        warning = find_missing_header(tokenizer, first, data.apply_chat_template_kwargs)
        notes += [f"{train.report.name}: {warning}"] if warning else []
    model = config.model
    loaded = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    check_length(model.path, loaded, data.max_length, "data.max_length")
    notes += [note] if (note := family_note(model.path, loaded.model_type, published=False)) else []
    seed = config.trainer.seed if data.seed is None else data.seed
    order = ShuffledSampler(len(train), seed) if data.shuffle else SequentialSampler(len(train))
    return SFTData(train, order, datasets.get("val"), notes)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batches of all ranks, and metrics of them."""

    rank_batches: list[RankBatch]
    metrics: dict[str, float]


class SFTDataLoader:
    """Loads the batch of each step, a function of the step alone; the next one is prepared during training.

    `start` is the position in the order at which the step after `version` begins.
    """

    def __init__(
        self, dataset: Examples, order: Sampler, batch: int, split: SplitBatch, *, start: int = 0, version: int = 0
    ) -> None:
        self._dataset, self._order, self._batch, self._split = dataset, order, batch, split
        self._start, self._version = start, version
        self._ahead: tuple[int, asyncio.Task[StepBatch]] | None = None

    def position(self, version: int) -> int:
        """Return the position in the order at which the step after `version` begins."""
        return self._start + (version - self._version) * self._batch

    def state(self, version: int) -> dict[str, Any]:
        """Return the position after `version` and the identity of the order, for a checkpoint."""
        return {"position": self.position(version), **self._order.identity()}

    async def take(self, version: int) -> StepBatch:
        """Return the batch of the step after `version` and start to prepare the next one."""
        ready = self._begin(version) if self._ahead is None or self._ahead[0] != version else self._ahead[1]
        batch = await ready
        self._ahead = version + 1, self._begin(version + 1)
        return batch

    def close(self) -> None:
        """Cancel the preparation of the next batch."""
        if self._ahead is not None:
            self._ahead[1].cancel()

    def _begin(self, version: int) -> asyncio.Task[StepBatch]:
        return asyncio.create_task(asyncio.to_thread(self._make, version))

    def _make(self, version: int) -> StepBatch:
        first = self.position(version)
        rows = [self._order.row(position) for position in range(first, first + self._batch)]
        rank_batches = self._split([self._dataset[row] for row in rows])
        tokens = [len(batch.tokens) for batch in rank_batches]
        metrics = {
            "plan/samples": len(rows),
            "plan/tokens": sum(tokens),
            "plan/trained_tokens": sum(int(batch.mask.sum()) for batch in rank_batches),
            "plan/imbalance": max(tokens) * len(tokens) / max(sum(tokens), 1),
            "plan/micro_batches": len(rank_batches[0].ends),
        }
        return StepBatch(rank_batches, {name: float(value) for name, value in metrics.items()})


class ValidationLoader:
    """Loads the validation examples batch by batch, always in the same order."""

    def __init__(self, dataset: Examples, batch: int, split: SplitBatch) -> None:
        self._dataset, self._batch, self._split = dataset, batch, split

    async def batches(self) -> AsyncIterator[list[RankBatch]]:
        for first in range(0, len(self._dataset), self._batch):
            yield await asyncio.to_thread(self._make, range(first, min(first + self._batch, len(self._dataset))))

    def _make(self, rows: range) -> list[RankBatch]:
        return self._split([self._dataset[row] for row in rows])
