"""`verl migrate`: turn a launch script into a command of verl."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from verl.commands.arguments import ArgumentParser
from verl.config.legacy.launch_script import read_launch_file
from verl.config.legacy.migration import migrate, render
from verl.redaction import redact

HELP = """\
usage: verl migrate FILE

Read a launch script (shell) or a YAML file of settings and print the command of verl that does the same, and what
became of each changed key and why, as comments: the output is a shell script. Nothing of the file is executed:
variables, arrays, defaults (${X:-1}) and whole-number arithmetic are read from the text.

exit codes:
  0  the command has everything that the file asks for
  1  some settings are refused; they are listed, and not in the command
  2  the file cannot be read, or starts nothing that verl can do

example:
  verl migrate run_grpo.sh > run_verl.sh
"""


def main(argv: Sequence[str]) -> int:
    """Print the command for every launch command of a file; return the exit code."""
    parser = ArgumentParser("verl migrate")
    parser.add_argument("file", type=Path)
    results = [migrate(command) for command in read_launch_file(parser.parse_args(list(argv)).file)]
    sys.stdout.write(redact("\n".join(map(render, results))))
    return 0 if all(result.is_complete for result in results) else 1
