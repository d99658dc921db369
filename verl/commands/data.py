"""`verl data`: show data files as a run will read them: rows with their tokens, a histogram of lengths, scorers, and
problems with fixes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from verl.commands.arguments import SETTINGS_HELP, ArgumentParser
from verl.config.command_line import split_arguments
from verl.config.load import load, load_sft
from verl.config.schema import MISSING, SftConfig
from verl.config.schema.root import Config
from verl.data.files import Rows
from verl.data.inspection import DataInspector, InspectionReport, RowPreview
from verl.errors import ConfigError, DataError
from verl.redaction import show_controls

if TYPE_CHECKING:
    from verl.sft.examples import Example

HELP = f"""\
usage: verl data FILE... [--sft] [--row N] [--head N] [--limit N] [settings]

Show data files as a run will read them. With actor_rollout_ref.model.path=..., prompts are rendered with the model's
chat template and counted in tokens. Exits with code 1 if a run could not start or its rewards would fail.

options:
  --sft                   examples for `verl sft`, with the tokens that are trained; needs model.path=...
  --row N                 show all of row N; can be repeated
  --head N                show the first N rows (1)
  --limit N               read only the first N rows

{SETTINGS_HELP}
example:
  verl data train.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct data.max_prompt_length=256
"""

Lengths: TypeAlias = npt.NDArray[np.int64]

_WIDTH = 72
_BAR = 36
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST_BINS = 14
_MOST_VALUE = 400
_HEAD, _TAIL = 40, 12
"""Tokens shown of a long prompt, unless its row was requested with --row."""


def read_arguments(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace, Config | SftConfig]:
    """Return the files, the options, and the settings. Files may also come from the settings."""
    parser = ArgumentParser("verl data")
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--row", type=int, action="append", default=[])
    parser.add_argument("--head", type=int, default=1)
    parser.add_argument("--limit", type=int)
    options, rest = parser.parse_known_args(argv)
    files, settings = split_arguments(rest)
    if options.sft:
        settings += [f"data.train_files={json.dumps(files)}"] if files else []
        settings += ["data.val_files=null", "trainer.test_freq=-1"]
        settings += [f"data.train_max_samples={options.limit}"] if options.limit is not None else []
    config: Config | SftConfig = (load_sft if options.sft else load)(settings, complete=False)[0].config
    for entry in () if files else (config.data.train_files, config.data.val_files):
        if entry is not None and entry != MISSING:
            files += [entry] if isinstance(entry, str) else entry
    if not files:
        parser.error("name a file, such as `verl data train.parquet`")
    return files, options, config


def main(argv: Sequence[str]) -> int:
    """Show rows, lengths and problems; return 1 if a run could not start or its rewards would fail."""
    files, options, config = read_arguments(argv)
    return _show_prompts(files, options, config) if isinstance(config, Config) else _show_examples(options, config)


def _show_prompts(files: Sequence[str], options: argparse.Namespace, config: Config) -> int:
    from verl.rewards.reward_function import explain_no_scorer, resolve_scorer

    data, (tokenizer, tools) = config.data, _open_tokenizer(config)
    inspector = DataInspector(
        files,
        prompt_key=data.prompt_key,
        tokenizer=tokenizer,
        template_kwargs={**data.apply_chat_template_kwargs, **({"tools": tools} if tools else {})},
        describe_scorer=partial(resolve_scorer, config),
        explain_no_scorer=explain_no_scorer,
    )
    fate = "they are dropped" if data.filter_overlong_prompts else f"they are cut (data.truncation={data.truncation})"
    stop = data.truncation == "error" and not data.filter_overlong_prompts
    out = open_console()
    show_rows(inspector, out, options.row or range(min(options.head, inspector.total_rows)), whole=bool(options.row))
    report = inspector.inspect(max_prompt_length=data.max_prompt_length, is_overlong_fatal=stop, limit=options.limit)
    fate = "the run will not start" if stop else fate
    show_report(inspector, report, out, max_prompt_length=data.max_prompt_length, fate=fate)
    return int(any(problem.fatal for problem in report.problems))


def _show_examples(options: argparse.Namespace, config: SftConfig) -> int:
    """Print the files, some rows with their trained tokens, and the lengths of all."""
    from verl.sft.data import check_sft_files, read_sft_data

    if config.model.path == MISSING:
        raise ConfigError(["model.path: must be given; the chat template determines which tokens are trained"])
    check_sft_files(config)
    data = read_sft_data(config)
    examples, limit, out = data.train, config.data.max_length, open_console()
    for row in options.row:
        if not 0 <= row < len(examples):
            raise DataError(f"--row {row}: rows go from 0 to {len(examples) - 1:,}")
    _print_files(examples.files, out)
    for row in options.row or range(min(options.head, len(examples))):
        _print_rule(out, f"row {row}")
        _print_example(examples[row], examples.tokenizer, out, whole=bool(options.row))
    _print_rule(out, "lengths of the examples, in tokens")
    _print_histogram(examples.lengths, limit, "max_length", out)
    truncated = examples.report.truncated
    out.print(f"{truncated:,} are longer and get truncated" if truncated else f"all are within data.max_length={limit}")
    for note in data.notes:
        out.print(note, style="yellow")
    return 0


def _open_tokenizer(config: Config) -> tuple[Any, list[dict[str, Any]]]:
    """Return the tokenizer of the model, and the tools whose descriptions are a part of the prompts of several turns.

    Without a model, return None without importing transformers.
    """
    model = config.actor_rollout_ref.model
    if (model.tokenizer_path or model.path) == MISSING:
        return None, []
    from verl.trainer.build.data import open_agents, open_tokenizer

    tokenizer = open_tokenizer(model, "actor_rollout_ref.model")
    has_turns = config.actor_rollout_ref.rollout.multi_turn.enable
    return tokenizer, open_agents(config, tokenizer).list_schemas() if has_turns else []


class _DataConsole(Console):
    """Shows control characters, with which the contents of a file could change the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(_show_controls, objects), **options)


def _show_controls(content: str | Text) -> str | Text:
    if isinstance(content, str):
        return show_controls(content)
    content.plain = show_controls(content.plain)
    return content


def open_console(**options: Any) -> Console:
    """Return a console that prints text as it is: without markup, and lines of any length."""
    return _DataConsole(highlight=False, markup=False, emoji=False, soft_wrap=True, **options)


def show_rows(data: DataInspector, out: Console, rows: Sequence[int], *, whole: bool) -> None:
    """Print the files, their columns and some rows, shortened unless `whole`."""
    _print_files(data.files, out)
    _print_rule(out, "columns")
    _print_table(out, data.describe_columns().items())
    for row in rows:
        _print_rule(out, f"row {row}")
        _print_row(data, data.row(row), out, whole)


def show_report(
    data: DataInspector, report: InspectionReport, out: Console, *, max_prompt_length: int, fate: str
) -> None:
    """Print the report on all rows; `fate` describes what happens to prompts that are too long."""
    _print_rule(out, f"lengths of the prompts, in {data.unit}")
    _print_prompt_lengths(data, report.lengths, out, max_prompt_length, fate)
    _print_rule(out, "data sources")
    counts = {
        repr(name): f"{count:>9,} {'row ' if count == 1 else 'rows'}   {data.describe_scorer(name) or 'no scorer'}"
        for name, count in report.sources.most_common()
    }
    _print_table(out, counts.items())
    _print_rule(out, "problems")
    _print_problems(report, out)


def _print_example(example: Example, tokenizer: Any, out: Console, whole: bool) -> None:
    """Print the text with trained parts in green, those parts again (not every screen has color), and the tokens."""
    edges = [0, *(np.flatnonzero(np.diff(example.mask)) + 1).tolist(), len(example.tokens)]
    spans = [(start, tokenizer.decode(example.tokens[start:stop].tolist())) for start, stop in pairwise(edges)]
    text = Text()
    for start, words in spans:
        text.append(words, style="bold green" if example.mask[start] else "")
    _print_quote(text, out)
    trained = int(example.mask.sum())
    out.print(f"{len(example.tokens)} tokens, of which {trained} are trained:", style="dim")
    _print_table(out, [("", _format_value(words, whole)) for start, words in spans if example.mask[start]])
    _print_tokens(tokenizer, example.tokens.tolist(), out, whole)


def _print_files(files: Sequence[Rows], out: Console) -> None:
    for file in files:
        _print_rule(out, file.path.name)
        out.print(f"{len(file):,} rows, {decimal(file.path.stat().st_size)}, {file.path}")


def _print_row(data: DataInspector, row: RowPreview, out: Console, whole: bool) -> None:
    out.print(Text(row.location, style="dim"))
    if row.error:
        out.print(Text.assemble(("✗ ", "bold red"), row.error))
    else:
        text = Text(row.text)
        text.highlight_words(data.marks, style="bold magenta")
        _print_quote(text, out)
    if row.token_ids is not None:
        out.print(f"{len(row.token_ids)} tokens", style="dim")
        _print_tokens(data.tokenizer, row.token_ids, out, whole)
    fields = {"data_source": row.data_source, "ground_truth": row.ground_truth, "extra_info": row.extra_info}
    _print_table(out, [(name, _format_value(value, whole)) for name, value in fields.items()])


def _print_quote(text: Text, out: Console) -> None:
    for line in text.split("\n", allow_blank=True):
        for piece in line.wrap(out, max(20, out.width - 2)) or [line]:
            out.print(Text.assemble(("│ ", "dim"), piece))


def _print_tokens(tokenizer: Any, ids: Sequence[int], out: Console, whole: bool) -> None:
    """Print token texts above their ids, as many per line as fit; shortened unless `whole`."""
    is_cut = not whole and len(ids) > _HEAD + _TAIL + 8
    _print_token_lines(tokenizer, ids[:_HEAD] if is_cut else ids, out)
    if is_cut:
        out.print(f"  ... {len(ids) - _HEAD - _TAIL} more ...", style="dim")
        _print_token_lines(tokenizer, ids[-_TAIL:], out)


def _print_token_lines(tokenizer: Any, ids: Sequence[int], out: Console) -> None:
    special = set(tokenizer.get_added_vocab().values())
    above, below = Text("  "), Text("  ")
    for token in ids:
        text, token_id = _show_blanks(tokenizer, token), str(token)
        room = max(cell_len(text), len(token_id)) + 2
        if len(above) > 2 and above.cell_len + room > out.width:
            out.print(above, below, sep="\n")
            above, below = Text("  "), Text("  ")
        above.append(text, style="bold magenta" if token in special else "cyan")
        above.append(" " * (room - cell_len(text)))
        below.append(token_id.ljust(room), style="dim")
    out.print(above, below, sep="\n")


def _show_blanks(tokenizer: Any, token: int) -> str:
    """Return the text of a token with visible blanks; a part of a character as in the vocabulary."""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        text = str(tokenizer.convert_ids_to_tokens(token))
    return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


def _format_value(value: Any, whole: bool) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = repr(value)
    return text if whole or len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]} ... ({len(text):,} characters)"


def _print_prompt_lengths(data: DataInspector, lengths: Lengths, out: Console, limit: int, fate: str) -> None:
    if not len(lengths):
        out.print("no prompt can be measured")
        return
    _print_histogram(lengths, None if data.tokenizer is None else limit, "max_prompt_length", out)
    if data.tokenizer is None:
        out.print("set actor_rollout_ref.model.path=... for lengths in tokens", style="dim")
    elif long := int((lengths > limit).sum()):
        share = f"{long:,} of {len(lengths):,} ({long / len(lengths):.2%})"
        out.print(f"{share} exceed data.max_prompt_length={limit}: {fate}", style="yellow")
    else:
        out.print(f"all are within data.max_prompt_length={limit}", style="green")


def _print_histogram(lengths: Lengths, limit: int | None, name: str, out: Console) -> None:
    for line in draw_bars(lengths, limit, name):
        out.print(line)
    middle, most = (int(np.percentile(lengths, part)) for part in (50, 99))
    out.print(f"shortest {lengths.min():,}, median {middle:,}, 99% up to {most:,}, longest {lengths.max():,}")


def bin_lengths(lengths: Lengths) -> list[tuple[int, int | None, int]]:
    """Return (start, end, count) bins of equal width; a thin tail of long ones goes into the last, open-ended one.

    >>> bin_lengths(np.array([3, 4, 4, 5]))
    [(3, 4, 1), (4, 5, 2), (5, 6, 1)]
    """
    low, high = int(lengths.min()), int(lengths.max())
    usual = int(np.percentile(lengths, 99))
    top = high if high <= 2 * usual else usual
    steps = (base * 10**power for power in range(12) for base in (1, 2, 5))
    step = next(step for step in steps if top // step - low // step < _MOST_BINS)
    edges = [*range(low // step * step, top + 1, step)]
    spans: list[tuple[int, int | None]] = [(edge, edge + step) for edge in edges]
    if high >= edges[-1] + step:
        spans.append((edges[-1] + step, None))
    return [(a, b, int(((lengths >= a) & (lengths < (high + 1 if b is None else b))).sum())) for a, b in spans]


def draw_bars(lengths: Lengths, limit: int | None, name: str = "max_prompt_length") -> list[Text]:
    """Return a line per bin; bins beyond the limit are yellow, and the limit's bin is marked."""
    histogram = bin_lengths(lengths)
    most = max(count for *_, count in histogram)
    last = histogram[-1][1] or histogram[-1][0]
    labels = [
        f"{a:,} and more" if b is None else f"{a:,}" if b == a + 1 else f"{a:,} - {b - 1:,}" for a, b, _ in histogram
    ]
    width, digits = max(map(len, labels)), len(f"{most:,}")
    lines = []
    for label, (a, b, count) in zip(labels, histogram, strict=True):
        is_beyond = limit is not None and a > limit
        line = Text(f"{label:>{width}} ").append(_draw_bar(count / most), style="yellow" if is_beyond else "cyan")
        line.append(f" {count:>{digits},}")
        if limit is not None and a <= limit and (b is None or limit < b):
            line.append(f"  ◂ {name}={limit}", style="bold yellow")
        lines.append(line)
    if limit is not None and limit >= last and histogram[-1][1] is not None:
        lines.append(Text(f"{'':>{width}} {'':{_BAR}} {'':>{digits}}  ◂ {name}={limit}", style="dim"))
    return lines


def _draw_bar(share: float) -> str:
    """Return a bar of up to `_BAR` blocks, at least a sliver for any share above 0."""
    eighths = max(1, round(share * _BAR * 8)) if share else 0
    full, rest = divmod(eighths, 8)
    return (_EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")).ljust(_BAR)


def _print_problems(report: InspectionReport, out: Console) -> None:
    if not report.problems:
        out.print("✓ none found", style="green")
    for problem in sorted(report.problems, key=lambda problem: not problem.fatal):
        style = "red" if problem.fatal else "yellow"
        mark = ("✗ " if problem.fatal else "! ", f"bold {style}")
        out.print(Text.assemble(mark, problem.text))
        if problem.fix:
            out.print(f"  {problem.fix}", style=style)


def _print_table(out: Console, rows: Collection[tuple[str, str]]) -> None:
    width = max((cell_len(name) for name, _ in rows), default=0)
    for name, value in rows:
        out.print(Text.assemble((name.ljust(width + 2), "bold"), value))


def _print_rule(out: Console, title: str) -> None:
    start = f"── {title} "
    out.print(Text(start + "─" * max(0, _WIDTH - cell_len(start)), style="dim"))
