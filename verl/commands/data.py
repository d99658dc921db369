"""`verl data`: files as a run will see them, before there is one. With `--sft`: as a supervised run will."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from verl.commands import SETTINGS_HELP
from verl.config.load import load, load_sft, split_arguments
from verl.config.schema import MISSING, SftConfig
from verl.config.schema.root import Config
from verl.errors import ConfigError, VerlError

__all__ = ["HELP", "main", "read_arguments"]

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
    """The files, the command's own options, and the settings. Files may also come from the settings."""
    parser = argparse.ArgumentParser(prog="verl data", add_help=False, allow_abbrev=False)
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--row", type=int, action="append", default=[])
    parser.add_argument("--head", type=int, default=1)
    parser.add_argument("--limit", type=int)
    options, rest = parser.parse_known_args(argv)
    files, settings = split_arguments(rest)
    if options.sft:
        settings += [f"data.train_files={json.dumps(files)}"] if files else []
        settings += ["data.val_files=null", "trainer.test_freq=-1"] + [f"data.train_max_samples={options.limit}"] * (
            options.limit is not None
        )
    config: Config | SftConfig = (load_sft if options.sft else load)(settings, complete=False)[0].config
    for given in () if files else (config.data.train_files, config.data.val_files):
        if given is not None and given != MISSING:
            files += [given] if isinstance(given, str) else given
    if not files:
        raise VerlError("verl data: name a file, such as `verl data train.parquet` (see `verl data --help`)")
    return files, options, config


def main(argv: Sequence[str]) -> int:
    """Show rows, lengths and problems; the exit code is 1 if something would stop a run or fail its rewards."""
    files, options, config = read_arguments(argv)
    return _prompts(files, options, config) if isinstance(config, Config) else _examples(options, config)


def _prompts(files: Sequence[str], options: argparse.Namespace, config: Config) -> int:
    import rich.console

    from verl.data.inspection import DataFiles
    from verl.data.inspection_render import show_report, show_rows
    from verl.rewards.resolve import resolve_scorer
    from verl.rewards.reward_function import explain_no_scorer

    data = config.data
    seen = DataFiles(
        files,
        prompt_key=data.prompt_key,
        tokenizer=_tokenizer(config),
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


def _examples(options: argparse.Namespace, config: SftConfig) -> int:
    """What would stop a run is raised, with its place and the mend."""
    import rich.console

    from verl.data.inspection_render import show_examples
    from verl.sft.data import check_sft_files, read_sft_data

    if config.model.path == MISSING:
        raise ConfigError(["model.path: must be given: which tokens are trained follows from its chat template"])
    check_sft_files(config)
    found = read_sft_data(config)
    out = rich.console.Console(highlight=False)
    rows = options.row or range(min(options.head, len(found.train)))
    show_examples(found.train, out, rows, max_length=config.data.max_length, whole=bool(options.row))
    for note in found.notes:
        out.print(note, style="yellow", soft_wrap=True)
    return 0


def _tokenizer(config: Config) -> Any:
    """The tokenizer of the model that was named; None if none was, and then nothing heavy is imported."""
    model = config.actor_rollout_ref.model
    if (model.tokenizer_path or model.path) == MISSING:
        return None
    from verl.trainer.run_data import open_tokenizer

    return open_tokenizer(model, "actor_rollout_ref.model")
