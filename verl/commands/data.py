"""`verl data`: show data files as a run will read them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from verl.commands.arguments import SETTINGS_HELP, ArgumentParser
from verl.config.command_line import split_arguments
from verl.config.load import load, load_sft
from verl.config.schema import MISSING, SftConfig
from verl.config.schema.root import Config
from verl.errors import ConfigError

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
    import rich.console

    from verl.data.inspection import DataFiles
    from verl.data.inspection_render import show_report, show_rows
    from verl.rewards.resolve import resolve_scorer
    from verl.rewards.reward_function import explain_no_scorer

    data = config.data
    seen = DataFiles(
        files,
        prompt_key=data.prompt_key,
        tokenizer=_open_tokenizer(config),
        template_kwargs=data.apply_chat_template_kwargs,
        describe_scorer=partial(resolve_scorer, config),
        explain_no_scorer=explain_no_scorer,
    )
    fate = "they are left out" if data.filter_overlong_prompts else f"they are cut (data.truncation={data.truncation})"
    stop = data.truncation == "error" and not data.filter_overlong_prompts
    out = rich.console.Console(highlight=False)
    show_rows(seen, out, options.row or range(min(options.head, len(seen))), whole=bool(options.row))
    report = seen.inspect(max_prompt_length=data.max_prompt_length, long_ones_stop=stop, limit=options.limit)
    fate = "the run will not start" if stop else fate
    show_report(seen, report, out, max_prompt_length=data.max_prompt_length, fate=fate)
    return int(any(problem.fatal for problem in report.problems))


def _show_examples(options: argparse.Namespace, config: SftConfig) -> int:
    import rich.console

    from verl.data.inspection_render import show_examples
    from verl.sft.data import check_sft_files, read_sft_data

    if config.model.path == MISSING:
        raise ConfigError(["model.path: must be given; the chat template determines which tokens are trained"])
    check_sft_files(config)
    data = read_sft_data(config)
    out = rich.console.Console(highlight=False)
    rows = options.row or range(min(options.head, len(data.train)))
    show_examples(data.train, out, rows, max_length=config.data.max_length, whole=bool(options.row))
    for note in data.notes:
        out.print(note, style="yellow", soft_wrap=True)
    return 0


def _open_tokenizer(config: Config) -> Any:
    """Return the tokenizer of the model; None, without importing transformers, if no model is named."""
    model = config.actor_rollout_ref.model
    if (model.tokenizer_path or model.path) == MISSING:
        return None
    from verl.trainer.run_data import open_tokenizer

    return open_tokenizer(model, "actor_rollout_ref.model")
