"""`verl show`: read the recorded samples of a run in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import rich.console
from rich.text import Text

from verl.commands.arguments import ArgumentParser
from verl.errors import VerlError
from verl.redaction import show_controls
from verl.tracking.run_folder import RunFolder, SampleFile

HELP = """\
usage: verl show RUN [--step N] [--split train|val] [filters] [--worst N | --best N | --group G]
       verl show RUN --compare A B [--split train|val]

Read the responses that a run has recorded in its folder (trainer.samples): one line per group, or whole conversations.
The run may still be going on.

options:
  RUN                 folder of the run (trainer.default_local_dir)
  --step N            a step; by default the last one with samples
  --split SPLIT       train or val; by default train, if there are samples of it
  --group G           all responses of a group, as conversations
  --worst N, --best N the N responses with the lowest or highest scores, as conversations
  --find TEXT         only samples whose prompt or response has this text
  --score MIN:MAX     only samples with such scores; either bound may be missing
  --compare A B       what changed between two steps: prompts that both recorded (usually of validation), with the
                      mean scores and one response of each

examples:
  verl show checkpoints/verl/default --worst 3
  verl show checkpoints/verl/default --split val --compare 0 40
"""
COLUMNS = (
    *("group", "index", "branch", "data_source", "ground_truth", "prompt", "response", "score", "metrics"),
    *("finish_reason", "pieces", "mask", "advantages"),
)

Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser("verl show")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--split", choices=["train", "val"])
    parser.add_argument("--find")
    parser.add_argument("--score", type=_parse_range, metavar="MIN:MAX")
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--group", type=int)
    selection.add_argument("--worst", type=int)
    selection.add_argument("--best", type=int)
    selection.add_argument("--compare", type=int, nargs=2, metavar=("A", "B"))
    options = parser.parse_args(argv)
    folder, out = RunFolder(options.run), rich.console.Console(highlight=False)
    if options.compare is not None:
        before, after = (find_file(folder, step, options.split or "val") for step in options.compare)
        for line in compare(_read(folder, before), _read(folder, after), *options.compare):
            _print(out, line)
        return 0
    file = find_file(folder, options.step, options.split)
    rows = [row for row in _read(folder, file) if matches(row, options.find, options.score)]
    _print(out, Text(f"{file.split} step {file.step}: {len(rows)} recorded samples\n", style="bold"))
    count = options.worst or options.best
    if options.group is not None:
        rows = [row for row in rows if row["group"] == options.group]
        if not rows:
            raise VerlError(f"--group {options.group}: step {file.step} has no such sample")
    elif count is not None:
        rows = sorted(rows, key=lambda row: row["score"], reverse=options.worst is None)[:count]
    lines = describe_groups(rows) if options.group is count is None else map(describe_sample, rows)
    for line in lines:
        _print(out, line)
    return 0


def find_file(folder: RunFolder, step: int | None, split: str | None) -> SampleFile:
    """Return the file of a step, or the last one."""
    files = [file for file in folder.list_samples() if split in (None, file.split)]
    if not files:
        raise VerlError(f"{folder.path}/samples: has no {split or 'recorded'} samples (trainer.samples.per_step)")
    if step is None:
        return max(files, key=lambda file: (file.split == "train", file.step))
    found = [file for file in files if file.step == step]
    if not found:
        steps = sorted({file.step for file in files})
        near = ", ".join(map(str, sorted(sorted(steps, key=lambda each: abs(each - step))[:5])))
        raise VerlError(f"step {step} has no samples; near it: {near}")
    return max(found, key=lambda file: file.split == "train")


def matches(row: Row, text: str | None, scores: tuple[float, float] | None) -> bool:
    """Return whether a sample has a text and a score between two bounds."""
    low, high = scores or (float("-inf"), float("inf"))
    return low <= row["score"] <= high and (text is None or text in row["prompt"] or text in row["response"])


def describe_groups(rows: Iterable[Row]) -> Iterator[Text]:
    """Yield a line for each group: its scores and the end of its prompt."""
    for group, members in groupby(rows, key=lambda row: row["group"]):
        samples = list(members)
        line = Text(f"group {group:>6}  ", style="bold").append(f"mean {_mean(samples):6.3f}  ", style="green")
        line.append(" ".join(f"{sample['score']:.3g}" for sample in samples), style="cyan")
        yield line.append(f"  {_shorten(samples[0]['prompt'], 60)}", style="dim")


def describe_sample(row: Row) -> Text:
    """Return a conversation with its score; the text that the model generated stands out."""
    branch = f", branch {row['branch']}" if row["branch"] else ""
    line = Text(f"── group {row['group']}, response {row['index']}{branch} ", style="bold")
    line.append(f"score {row['score']:g}", style="bold green")
    numbers = [*row["metrics"], *([] if (advantage := _get_advantage(row)) is None else [("advantage", advantage)])]
    line.append("".join(f"  {name} {value:.4g}" for name, value in numbers), style="dim")
    line.append(
        f"  {row['finish_reason']}  {row['data_source']}  truth {_shorten(row['ground_truth'], 60)}\n", style="dim"
    )
    for is_generated, text in _split_turns(row):
        line.append(text, style="" if is_generated else "cyan")
    return line.append("\n")


def compare(before: Sequence[Row], after: Sequence[Row], first: int, second: int) -> Iterator[Text]:
    """Yield the groups that both steps have, those whose mean score has changed most first."""
    groups = [_by_group(rows) for rows in (before, after)]
    common = [group for group in groups[0] if group in groups[1]]
    if not common:
        raise VerlError(f"steps {first} and {second} have no prompt in common; compare validations (--split val)")
    change = {group: _mean(groups[1][group]) - _mean(groups[0][group]) for group in common}
    up, down = (sum(each * sign > 0 for each in change.values()) for sign in (1, -1))
    yield Text(f"{len(common)} prompts: {up} better, {down} worse, {len(common) - up - down} the same\n", style="bold")
    for group in sorted(common, key=lambda group: -abs(change[group])):
        old, new = groups[0][group], groups[1][group]
        style = "green" if change[group] > 0 else "red" if change[group] < 0 else "dim"
        line = Text(f"group {group}  {_mean(old):.3f} → {_mean(new):.3f}", style=f"bold {style}")
        line.append(f"  {_shorten(old[0]['prompt'], 100)}\n", style="dim")
        for step, samples in ((first, old), (second, new)):
            line.append(f"  step {step:>6}  ", style="dim").append(f"{_shorten(samples[0]['response'], 200)}\n")
        yield line


def _split_turns(row: Row) -> Iterator[tuple[bool, str]]:
    """Yield the texts that the model generated and those in between."""
    turns = [(is_generated, len(list(tokens))) for is_generated, tokens in groupby(row["mask"])]
    if len(turns) == 2:  # decoded as a whole: a character may be in several tokens
        yield from ((False, row["prompt"]), (True, row["response"]))
        return
    position = 0
    for is_generated, length in turns:
        yield is_generated, "".join(row["pieces"][position : position + length])
        position += length


def _read(folder: RunFolder, file: SampleFile) -> list[Row]:
    rows: list[Row] = folder.read_samples(file, COLUMNS).to_pylist()
    return rows


def _by_group(rows: Iterable[Row]) -> Mapping[int, list[Row]]:
    return {group: list(members) for group, members in groupby(rows, key=lambda row: row["group"])}


def _mean(rows: Sequence[Row]) -> float:
    return sum(row["score"] for row in rows) / len(rows)


def _get_advantage(row: Row) -> float | None:
    """Return the mean advantage of the generated tokens."""
    values = [each for each, is_generated in zip(row["advantages"] or [], row["mask"], strict=False) if is_generated]
    return sum(values) / len(values) if values else None


def _shorten(text: str, width: int) -> str:
    """Return a text in one line: the end of a long one, where prompts have their question."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"...{line[-width:]}"


def _parse_range(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    return float(low or "-inf"), float(high or "inf")


def _print(out: rich.console.Console, line: Text) -> None:
    line.plain = show_controls(line.plain)
    out.print(line, soft_wrap=True)
