"""`verl config`: print the settings of a run, or explain single ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.commands.arguments import SETTINGS_HELP
from verl.config.batch_sizes import render_sizes
from verl.config.command_line import split_arguments
from verl.config.load import SFT, TRAIN, load, load_sft
from verl.config.render import describe, render
from verl.redaction import redact

HELP = f"""\
usage: verl config [--sft] [settings]
       verl config [--sft] KEY...

Print all settings as YAML, with documentation, or explain single settings.

options:
  --sft                   settings of `verl sft`

{SETTINGS_HELP}"""


def main(argv: Sequence[str]) -> int:
    """Print the settings of every run of a sweep, or the documentation of the keys in `argv`."""
    is_sft = "--sft" in argv
    argv = [argument for argument in argv if argument != "--sft"]
    keys, settings = split_arguments(argv)
    if keys and not settings:
        sys.stdout.write("\n".join(describe(key, SFT if is_sft else TRAIN) for key in keys))
        return 0
    runs = load_sft(argv, complete=False) if is_sft else load(argv, complete=False)
    for hint in dict.fromkeys(hint for run in runs for hint in run.hints):
        sys.stderr.write(redact(f"hint: {hint}\n"))
    for run in runs:
        if run.sweep:
            sys.stdout.write(f"---\n# {' '.join(run.sweep)}\n")
        sizes = render_sizes(run.config).replace("\n", "\n#   ")
        sys.stdout.write(f"{render(run.config)}\n# Derived sizes:\n#   {sizes}\n")
    sys.stdout.flush()
    return 0
