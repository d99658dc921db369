"""The command `verl`: finds the subcommand, runs it, and reports its errors.

Subcommands are imported when they run, so that help and settings are printed without loading torch or Ray.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import verl
from verl.commands.arguments import COMMANDS, MODULES
from verl.errors import VerlError
from verl.redaction import redact, remember_arguments

FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
SLOW_IMPORTS = ("generate", "eval", "data")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    User errors (`VerlError`) are printed without a traceback and exit with code 2. Secrets are redacted from messages,
    tracebacks, and `sys.argv`, which metric loggers may record.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    remember_arguments(arguments)
    sys.argv[1:] = map(redact, sys.argv[1:])
    try:
        return _dispatch(arguments)
    except VerlError as error:
        lines = [str(error), *getattr(error, "__notes__", ())]
        sys.stderr.write(redact("\n".join(lines) + "\n"))
        return USAGE_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `verl config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # noqa: BLE001 - the process boundary; Python would print the traceback with its secrets
        sys.stderr.write(redact(traceback.format_exc()))
        return FAILED


def _dispatch(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0
    if name in ("-V", "--version", "version"):
        sys.stdout.write(f"verl {verl.__version__}\n")
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise VerlError(f"verl: unknown command {name!r}.{suggestion} Commands: {', '.join(COMMANDS)}.")
    with _show_import() if name in SLOW_IMPORTS else nullcontext():
        command = importlib.import_module(f"verl.commands.{MODULES.get(name, name)}")
    if any(argument in ("-h", "--help") for argument in rest):
        sys.stdout.write(command.HELP)
        return 0
    return int(command.main(rest))


def _show_import() -> AbstractContextManager[None]:
    from verl.tracking.console import Console

    return Console().stage("importing libraries", is_logged=False)


def _overview() -> str:
    rows = "\n".join(f"  {name:<13}{summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: verl COMMAND [settings]\n\n{verl.__doc__}\n\ncommands:\n{rows}\n\n"
        "Run `verl COMMAND --help` for details.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
