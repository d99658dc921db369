"""`verl migrate`: turn a launch script into a command of verl."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verl.errors import VerlError
from verl.migration.capture import capture
from verl.migration.command import comment, migrate, render
from verl.migration.launches import find_launches, read_yaml
from verl.redaction import redact

HELP = """\
usage: verl migrate FILE [NAME=VALUE ...] [-- ARGUMENT ...]

Print the command of verl that does what a launch script (shell) or a YAML file of settings does, and what became of
each changed key and why, as comments: the output is a shell script.

The script is run by bash in a sandbox without network, with read-only files and an empty home. Python, torchrun, ray,
uv, srun and everything else that would do work are stand-ins that record their arguments; the command is made of
exactly these. What the script would have done besides is listed. Without a sandbox (bubblewrap or user namespaces)
nothing is executed.

  NAME=VALUE  an environment variable for the script; one that is not given stays in the command as ${NAME}
  ARGUMENT    an argument for the script

exit codes:
  0  the command has everything that the file asks for
  1  some settings are refused; they are listed, and not in the command
  2  the file cannot be read, starts nothing that verl can do, or there is no sandbox

examples:
  verl migrate run_grpo.sh > run_verl.sh
  verl migrate run_grpo.sh MODEL_PATH=Qwen/Qwen3-8B -- trainer.total_epochs=2
"""


class Arguments(NamedTuple):
    """The arguments of the command: the file, and the environment variables and arguments of a script."""

    file: Path
    variables: dict[str, str]
    script_arguments: list[str]


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Return the arguments of the command.

    Raises:
        VerlError: If an argument is wrong.
    """
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    if end == 0 or words[0].startswith("-"):
        raise VerlError("verl migrate: give the file of a launch script; see `verl migrate --help`")
    for word in words[1:end]:
        if not re.match(r"[A-Za-z_]\w*=", word):
            raise VerlError(f"verl migrate: {word} is not NAME=VALUE; give arguments of the script after --")
    variables = dict(word.split("=", 1) for word in words[1:end])
    return Arguments(Path(words[0]), variables, words[end + 1 :])


def main(argv: Sequence[str]) -> int:
    """Print the command for every run of a file; return the exit code."""
    file, variables, script_arguments = read_arguments(argv)
    if file.suffix in (".yaml", ".yml"):
        found = read_yaml(file)
    else:
        found = find_launches(file, capture(file, variables, script_arguments))
    results = [migrate(launch) for launch in found.launches]
    comments = [
        *comment("Besides, the script would run", [f"- {command}" for command in found.other_commands]),
        *comment("About the script", [f"- {note}" for note in found.notes]),
    ]
    sys.stdout.write(redact("\n".join([*map(render, results), *comments[1:], *([""] if comments else [])])))
    return 0 if all(result.is_complete for result in results) else 1
