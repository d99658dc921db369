"""`verl eval` and `python -m verl.trainer.main_eval`: answers in a file are scored by any reward, and counted.

Scoring is that of training: in processes with limits, and a failure is never a 0; how many there were is said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.commands import SETTINGS_HELP
from verl.config.load import load_for_generation, split_arguments
from verl.config.schema.root import Config
from verl.errors import ConfigError, DataError, RewardError
from verl.tracking.console import Console

if TYPE_CHECKING:
    from verl.rewards.pool.pool import RewardClient
    from verl.rewards.result import RewardResult
    from verl.trainer.statistics import Estimate

__all__ = ["HELP", "main", "read_arguments"]

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

{SETTINGS_HELP}
example:
  verl eval answers.parquet reward.custom_reward_function.path=my_reward.py
"""


def read_arguments(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace, Config]:
    """The files, the command's own options, and the settings."""
    parser = argparse.ArgumentParser(prog="verl eval", add_help=False, allow_abbrev=False)
    parser.add_argument("--responses", default="responses")
    parser.add_argument("--k", type=_sizes)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--output")
    options, rest = parser.parse_known_args(list(argv))
    files, settings = split_arguments(rest)
    if not files:
        raise DataError("verl eval: name a file of answers, such as `verl eval answers.parquet` (see verl eval --help)")
    return files, options, load_for_generation(settings).config


def _sizes(text: str) -> list[int]:
    sizes = [int(one) for one in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return sizes


def main(argv: Sequence[str]) -> int:
    """Score and count; the exit code."""
    from verl.trainer.statistics import summary

    files, options, config = read_arguments(argv)
    console = Console()
    if config.reward.reward_model.enable:
        raise ConfigError(
            [
                "reward.reward_model.enable=true: verl eval scores by functions alone; set it to false, and name "
                "one (reward.custom_reward_function.path), or leave it to the shipped scorers"
            ]
        )
    rows = list(_rows(files, options.responses, config.data.prompt_key))
    if not any(isinstance(text, str) for row in rows for text in row["texts"]):
        raise DataError(
            f"{', '.join(files)}: there is not one answer in column {options.responses!r} of {len(rows):,} rows; write "
            "them with verl generate, or name another column: --responses NAME"
        )
    outcomes = asyncio.run(_scored(config, rows))
    by_source, failed = _sorted(rows, outcomes)
    _check(config, failed, sum(len(row["texts"]) for row in rows), console)
    figures = {
        source: summary(answers, threshold=options.threshold, ks=options.k, draws=options.draws)
        for source, answers in sorted(by_source.items())
    }
    for k in options.k or ():
        if not any(f"pass@{k}" in own for own in figures.values()):
            console.advice(f"--k {k}: no prompt has {k} scored answers; generate more (actor_rollout_ref.rollout.n)")
    console.banner(_table(figures), title=f"{len(rows):,} prompts")
    if options.output:
        found = {source: {name: asdict(one) for name, one in own.items()} for source, own in figures.items()}
        text = json.dumps({"data_sources": found, "failures": len(failed)}, indent=2)
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    return 0


def _rows(files: Sequence[str], column: str, prompt: str) -> Iterator[dict[str, Any]]:
    """What a reward is told of each row, and its answers as `texts`."""
    from verl.data.columns import extract_reward_fields
    from verl.data.files import find_files, open_rows

    for path in find_files(files):
        file = open_rows(path)
        for number in range(len(file)):
            fields = file.row(number)
            if column not in fields:
                there = ", ".join(fields)
                raise DataError(
                    f"{file.place(number)}: there is no column {column!r}; there are {there}: --responses NAME"
                )
            texts = fields.pop(column)
            fields["raw_prompt"] = fields.pop(prompt, None)
            listed = [texts] if isinstance(texts, str) else texts
            if listed is not None and not isinstance(listed, list):
                raise DataError(
                    f"{file.place(number)}, column {column!r}: holds a {type(listed).__name__}; answers are a text, or "
                    "a list of texts: --responses NAME"
                )
            yield extract_reward_fields(fields) | {
                "texts": listed or [None],
                "place": f"{file.place(number)}, column {column!r}",
            }


async def _scored(config: Config, rows: Sequence[dict[str, Any]]) -> list[list[RewardResult]]:
    from verl.rewards.pool.pool import open_rewards
    from verl.rewards.resolve import resolve_scorer
    from verl.rewards.reward_function import explain_no_scorer
    from verl.trainer.worker_settings import reward_settings

    for source in sorted({row["data_source"] for row in rows}):
        if resolve_scorer(config, source) is None:
            raise RewardError(explain_no_scorer(source))
    with open_rewards(**reward_settings(config, 1, prompts=True)) as pool:
        await pool.start()
        return await asyncio.gather(
            *(asyncio.gather(*(_score(pool, row, text) for text in row["texts"])) for row in rows)
        )


async def _score(pool: RewardClient, row: dict[str, Any], text: Any) -> RewardResult:
    """What is no text is an answer that could not be scored, like one that a reward fails on."""
    from verl.types import Failed

    if not isinstance(text, str):
        held = "there is no answer" if text is None else f"an answer is a {type(text).__name__}, and no text"
        return Failed("invalid", f"{row['place']}: {held}")
    return await pool.score(row["data_source"], text, row["ground_truth"], row["extra_info"])


def _sorted(
    rows: Sequence[dict[str, Any]], outcomes: Sequence[Sequence[RewardResult]]
) -> tuple[dict[str, Any], list[str]]:
    """The scored answers by data source, and what was said of those that could not be scored."""
    from verl.trainer.statistics import Answers
    from verl.types import Scored

    by_source, failed = defaultdict(list), []
    for row, own in zip(rows, outcomes, strict=True):
        good = [(text, one.score) for text, one in zip(row["texts"], own, strict=True) if isinstance(one, Scored)]
        failed += [one.message for one in own if not isinstance(one, Scored)]
        by_source[row["data_source"]].append(Answers([text for text, _ in good], [score for _, score in good]))
    return by_source, failed


def _check(config: Config, failed: Sequence[str], answers: int, console: Console) -> None:
    if not failed:
        return
    share = len(failed) / answers
    what = f"{len(failed):,} of {answers:,} answers could not be scored, and are not counted. The first:\n{failed[0]}"
    if share > config.reward.max_failure_rate:
        raise RewardError(f"{what}\nmore than reward.max_failure_rate={config.reward.max_failure_rate:g} is too many")
    console.advice(what)


def _table(figures: dict[str, dict[str, Estimate]]) -> str:
    lines = []
    for source, own in figures.items():
        lines.append(source or "(no data source)")
        for name, one in own.items():
            lines.append(
                f"  {name:<10}{one.value:7.4f}   95 % in {one.low:.4f} to {one.high:.4f}   {one.prompts:,} prompts"
            )
    return "\n".join(lines)
