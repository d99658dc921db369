"""`verl eval`: score the responses in files with any reward function.

Scoring runs as in training: in processes with limits. Responses that cannot be scored are reported, never counted as 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint.locate import find_shards
from verl.commands.arguments import SETTINGS_HELP, ArgumentParser
from verl.config.command_line import split_arguments
from verl.config.load import load_for_generation
from verl.config.schema.root import Config
from verl.data.dataset import extract_reward_fields
from verl.data.files import find_files, open_rows
from verl.errors import ConfigError, DataError, RewardError
from verl.rewards.pool.pool import RewardClient, open_rewards
from verl.rewards.result import RewardResult
from verl.rewards.reward_function import explain_no_scorer, resolve_scorer
from verl.rewards.score_statistics import Estimate, ScoredResponses, summarize
from verl.tracking.console import Console
from verl.trainer.build.reward_settings import reward_function_settings
from verl.types import Failed, Scored

HELP = f"""\
usage: verl eval FILE... [options] [settings]

Score the responses in files, such as `verl generate` writes, with the reward of the settings (reward.*). Prints mean@n,
pass@k (unbiased) and maj@n of each data source, with 95 % confidence intervals (bootstrap over prompts).

options:
  --responses COLUMN      column of the responses: a text or a list of texts (responses)
  --k K,K                 the k of pass@k (1,2,4,... up to the number of responses)
  --threshold X           lowest score of a correct response (0.5)
  --draws N               bootstrap draws (1000)
  --output FILE           also write the results as JSON
  --scores FILE           JSON lines with the score and metrics of each response (RESPONSES.scores.jsonl)

{SETTINGS_HELP}
example:
  verl eval responses.parquet reward.custom_reward_function.path=my_reward.py
"""


_SCORES = ".scores.jsonl"
_LISTED_FAILURES = 5


@dataclass(frozen=True, slots=True)
class _Row:
    """One prompt: what its reward function gets, and its responses, which may be None or of a wrong type."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    responses: list[Any]
    location: str


def read_arguments(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace, Config]:
    parser = ArgumentParser("verl eval")
    parser.add_argument("--responses", default="responses")
    parser.add_argument("--k", type=_read_ks)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--output")
    parser.add_argument("--scores")
    options, rest = parser.parse_known_args(list(argv))
    files, settings = split_arguments(rest)
    if not files:
        parser.error("name a file with responses, such as `verl eval responses.parquet`")
    return files, options, load_for_generation(settings).config


def _read_ks(text: str) -> list[int]:
    ks = [int(k) for k in text.split(",")]
    if min(ks) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return ks


def main(argv: Sequence[str]) -> int:
    """Score the responses and print the results; return the exit code."""
    files, options, config = read_arguments(argv)
    console = Console()
    if config.reward.reward_model.enable:
        raise ConfigError(
            [
                "reward.reward_model.enable=true: verl eval only supports reward functions; set it to false, and name "
                "a function (reward.custom_reward_function.path), or use the built-in scorers"
            ]
        )
    for file in files:
        if find_shards(Path(file)) is not None:
            raise DataError(
                f"{file}: is a checkpoint, and verl eval scores responses; generate them first: verl generate "
                f"test.parquet --output responses.parquet model.path={file}, then run verl eval responses.parquet"
            )
    rows = list(_read_rows(files, options.responses, config.data.prompt_key))
    if not any(isinstance(response, str) for row in rows for response in row.responses):
        raise DataError(
            f"{', '.join(files)}: no responses in column {options.responses!r} of {len(rows):,} rows; generate them "
            "with verl generate, or name another column: --responses NAME"
        )
    with console.stage("scoring", is_logged=False):
        results = asyncio.run(_score_all(config, rows))
    by_source, failures = _group_by_source(rows, results)
    scores = Path(options.scores or _find_responses(files)[0].with_suffix(_SCORES))
    try:
        _write_scores(scores, rows, results)
        console.note(f"wrote {scores}: the score and metrics of each response")
    except OSError as error:
        console.advice(f"{scores}: cannot be written ({error.strerror}); name another file: --scores FILE")
    _check_failures(config, failures, sum(len(row.responses) for row in rows), console)
    estimates = {
        source: summarize(prompts, threshold=options.threshold, ks=options.k, draws=options.draws)
        for source, prompts in sorted(by_source.items())
    }
    for k in options.k or ():
        if not any(f"pass@{k}" in metrics for metrics in estimates.values()):
            console.advice(f"--k {k}: no prompt has {k} scored responses; generate more (actor_rollout_ref.rollout.n)")
    console.banner(_render(estimates), title=f"{len(rows):,} prompts")
    if options.output:
        by_name = {
            source: {name: asdict(estimate) for name, estimate in metrics.items()}
            for source, metrics in estimates.items()
        }
        text = json.dumps({"data_sources": by_name, "failures": len(failures)}, indent=2)
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    return 0


def _find_responses(files: Sequence[str]) -> list[Path]:
    """Return the files of responses; not the scores of an earlier evaluation, which a pattern may match, too."""
    found = find_files(files)
    return [file for file in found if not file.name.endswith(_SCORES)] or found


def _read_rows(files: Sequence[str], column: str, prompt_key: str) -> Iterator[_Row]:
    for path in _find_responses(files):
        file = open_rows(path)
        for index in range(len(file)):
            fields = file.row(index)
            if column not in fields:
                raise DataError(
                    f"{file.location(index)}: no column {column!r}; columns: {', '.join(fields)}. Name another: "
                    "--responses NAME"
                )
            value = fields.pop(column)
            responses = [value] if isinstance(value, str) else value
            if responses is not None and not isinstance(responses, list):
                raise DataError(
                    f"{file.location(index)}, column {column!r}: responses must be a text or a list of texts, not "
                    f"{type(responses).__name__}. Name another column: --responses NAME"
                )
            fields["raw_prompt"] = fields.pop(prompt_key, None)
            location = f"{file.location(index)}, column {column!r}"
            yield _Row(**extract_reward_fields(fields), responses=responses or [None], location=location)


async def _score_all(config: Config, rows: Sequence[_Row]) -> list[list[RewardResult]]:
    for source in sorted({row.data_source for row in rows}):
        if resolve_scorer(config, source) is None:
            raise RewardError(explain_no_scorer(source))
    with open_rewards(reward_function_settings(config)) as pool:
        await pool.start()
        return await asyncio.gather(
            *(asyncio.gather(*(_score(pool, row, response) for response in row.responses)) for row in rows)
        )


async def _score(pool: RewardClient, row: _Row, response: Any) -> RewardResult:
    if not isinstance(response, str):
        problem = "no response" if response is None else f"a response is {type(response).__name__}, not text"
        return Failed("invalid", f"{row.location}: {problem}")
    return await pool.score(row.data_source, response, row.ground_truth, row.extra_info)


def _group_by_source(
    rows: Sequence[_Row], results: Sequence[Sequence[RewardResult]]
) -> tuple[dict[str, list[ScoredResponses]], list[str]]:
    """Return the scored responses of each data source, and the messages of those that could not be scored."""
    by_source, failures = defaultdict(list), []
    for row, of_row in zip(rows, results, strict=True):
        scored = [(text, r.score) for text, r in zip(row.responses, of_row, strict=True) if isinstance(r, Scored)]
        failures += [result.message for result in of_row if not isinstance(result, Scored)]
        by_source[row.data_source].append(ScoredResponses([text for text, _ in scored], [score for _, score in scored]))
    return by_source, failures


def _write_scores(path: Path, rows: Sequence[_Row], results: Sequence[Sequence[RewardResult]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row, of_row in zip(rows, results, strict=True):
            for index, (response, result) in enumerate(zip(row.responses, of_row, strict=True)):
                said = {"location": row.location, "data_source": row.data_source, "index": index, "response": response}
                file.write(json.dumps(said | asdict(result), default=str) + "\n")


def _check_failures(config: Config, failures: Sequence[str], responses: int, console: Console) -> None:
    if not failures:
        return
    limit = config.reward.max_failure_rate
    kinds = Counter(failures)
    problem = f"{len(failures):,} of {responses:,} responses could not be scored and are not counted:"
    listed = "\n".join(f"{count:,} x {message}" for message, count in kinds.most_common(_LISTED_FAILURES))
    more = f"\n... and {len(kinds) - _LISTED_FAILURES:,} other messages" if len(kinds) > _LISTED_FAILURES else ""
    if len(failures) / responses > limit:
        raise RewardError(f"{problem}\n{listed}{more}\nThis is more than reward.max_failure_rate={limit:g} allows.")
    console.advice(f"{problem}\n{listed}{more}")


def _render(estimates: dict[str, dict[str, Estimate]]) -> str:
    lines = []
    for source, metrics in estimates.items():
        lines.append(source or "(no data source)")
        for name, e in metrics.items():
            lines.append(f"  {name:<10}{e.value:7.4f}   95 % CI {e.low:.4f} to {e.high:.4f}   {e.prompts:,} prompts")
    return "\n".join(lines)
