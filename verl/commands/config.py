"""`verl config`: print the settings of a run or their JSON schema, explain single settings, or search them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from verl.commands.arguments import SETTINGS_HELP
from verl.config.batch_sizes import render_sizes
from verl.config.command_line import split_arguments
from verl.config.json_schema import build_schema
from verl.config.load import SFT, TRAIN, AnyLoaded, AnyRunType, load, load_sft
from verl.config.render import describe, render, render_json
from verl.errors import VerlError
from verl.redaction import redact

HELP = f"""\
usage: verl config [--sft] [--changed] [--origin] [--json] [settings]
       verl config [--sft] KEY...
       verl config [--sft] WORD...
       verl config [--sft] --schema

Print all settings as YAML, with documentation; explain single settings; or search names and descriptions for a word.

options:
  --sft                   settings of `verl sft`
  --changed               only settings that differ from their defaults; the output is a file for --config-name
  --origin                where each value comes from: default, a YAML file (with its defaults list), the command line
  --json                  as JSON: one object, or one per line and run of a sweep; with --origin by dotted key
  --schema                a JSON schema of all settings, with which editors complete and check YAML files

{SETTINGS_HELP}"""


def main(argv: Sequence[str]) -> int:
    """Print the settings of every run of a sweep, their schema, or the documentation of the keys in `argv`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--sft", "--changed", "--origin", "--json", "--schema"):
        parser.add_argument(flag, action="store_true")
    options, rest = parser.parse_known_args(list(argv))
    run_type: AnyRunType = SFT if options.sft else TRAIN
    if options.schema:
        if rest:
            raise VerlError(f"verl config: --schema is about all settings; remove {' '.join(rest)}")
        sys.stdout.write(json.dumps(build_schema(run_type), indent=2) + "\n")
        return 0
    keys, settings = split_arguments(rest)
    if keys and not settings:
        if options.changed or options.origin or options.json:
            raise VerlError(f"verl config: --changed, --origin and --json print settings; remove {' '.join(keys)}")
        sys.stdout.write("\n".join(describe(key, run_type) for key in keys))
        return 0
    runs: Sequence[AnyLoaded] = load_sft(rest, complete=False) if options.sft else load(rest, complete=False)
    for hint in dict.fromkeys(hint for run in runs for hint in run.hints):
        sys.stderr.write(redact(f"hint: {hint}\n"))
    for run in runs:
        sys.stdout.write(_format(run, options))
    sys.stdout.flush()
    return 0


def _format(run: AnyLoaded, options: argparse.Namespace) -> str:
    origins = run.origins if options.origin else None
    if options.json:
        tree = render_json(run.config, only_changed=options.changed, origins=origins)
        return json.dumps(tree, indent=None if run.sweep else 2) + "\n"
    head = f"---\n# {' '.join(run.sweep)}\n" if run.sweep else ""
    text = head + render(run.config, only_changed=options.changed, origins=origins)
    if options.changed or options.origin:
        return text
    sizes = render_sizes(run.config).replace("\n", "\n#   ")
    return f"{text}\n# Derived sizes:\n#   {sizes}\n"
