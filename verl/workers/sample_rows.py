"""Samples as rows of text and numbers, for the files that people read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.private_files import make_folder
from verl.tracking.sample_files import write_samples
from verl.types import Prompt, Sample

MAX_CHARACTERS = 20_000
"""The characters that are kept of a ground truth, such as test cases of a programming task."""

Decode = Callable[[Sequence[int], bool], str]
"""(token ids, whether to keep special tokens) -> text."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What a train worker computed for the tokens of a sample."""

    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampleFile:
    """A file to be written: Parquet for reports, or JSON lines as launch scripts know them, by its suffix.

    Args:
        path: The file.
        split: train or val.
        step: The step that trains on the samples, or after which they validate.
        rows: The row in the data set of each group.
        parts: References to samples, each with a reference to their `TokenValues`, in the same order, or None.
    """

    path: Path
    split: str
    step: int
    rows: Mapping[int, int]
    parts: Sequence[tuple[Sequence[Any], Any]]


class SampleWriter:
    """Writes sample files. Decodes each token of the vocabulary once."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def write(self, file: SampleFile, samples: Sequence[tuple[Sample, Prompt, TokenValues | None]]) -> int:
        """Write samples with their prompts; return the size of the file in bytes."""
        if file.path.suffix == ".jsonl":
            make_folder(file.path.parent)
            lines = (
                json.dumps(self._describe(file, sample, prompt), ensure_ascii=False) for sample, prompt, _ in samples
            )
            file.path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        else:
            write_samples(file.path, list(self._list_rows(file, samples)))
        return file.path.stat().st_size

    def _describe(self, file: SampleFile, sample: Sample, prompt: Prompt) -> dict[str, Any]:
        """Return a sample by the names that `trainer.rollout_data_dir` has in launch scripts."""
        start = _count_prompt(sample)
        return {
            "input": self._decode(sample.tokens[:start].tolist(), False),
            "output": self._decode(sample.tokens[start:].tolist(), False),
            "gts": _format_truth(prompt.ground_truth),
            "score": sample.score,
            "step": file.step,
            "data_source": prompt.data_source,
            **sample.metrics,
        }

    def _list_rows(
        self, file: SampleFile, samples: Sequence[tuple[Sample, Prompt, TokenValues | None]]
    ) -> Iterator[dict[str, Any]]:
        branches = Counter[tuple[int, int]]()
        for sample, prompt, values in samples:
            start, episode = _count_prompt(sample), (sample.group, sample.index)
            started, generated, scored = sample.times
            yield {
                "step": file.step,
                "split": file.split,
                "group": sample.group,
                "index": sample.index,
                "branch": branches[episode],
                "row": prompt.row,
                "data_source": prompt.data_source,
                "ground_truth": _format_truth(prompt.ground_truth),
                "prompt": self._decode(sample.tokens[:start].tolist(), True),
                "response": self._decode(sample.tokens[start:].tolist(), True),
                "score": sample.score,
                "metrics": list(sample.metrics.items()),
                "finish_reason": sample.finish_reason,
                "engines": sorted(sample.engines),
                "started": started,
                "generated": generated,
                "scored": scored,
                "token_ids": sample.tokens,
                "pieces": [self._decode_token(token) for token in sample.tokens.tolist()],
                "mask": sample.mask,
                "versions": sample.versions,
                "rollout_logprobs": sample.logprobs,
                "logprobs": None if values is None else values.logprobs,
                "advantages": None if values is None else values.advantages,
            }
            branches[episode] += 1

    def _decode_token(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode([token], True)
        return self._pieces[token]


def _count_prompt(sample: Sample) -> int:
    """Return the number of tokens before the first generated one."""
    return int(sample.mask.argmax()) if sample.mask.any() else len(sample.tokens)


def _format_truth(truth: Any) -> str:
    if truth is None:
        return ""
    text = truth if isinstance(truth, str) else json.dumps(truth, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
