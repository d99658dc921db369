"""Attacks against agents: through rows, chat templates, tools and rewards. None may succeed.

make show-hostile-agents [ARGS="[--short] [NAME ...]"]

Each module in `MODULES` has `ATTACKS`: functions, coroutines or not, whose docstrings say what is attempted. An attack
has succeeded if its function raises, or takes longer than `LIMIT_S`. `--short` (CI) is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from _common import finish  # puts tests/ on the path

MODULES = ("_hostile_contents",)
LIMIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("names", nargs="*", help="these attacks alone")
    options = parser.parse_args()
    attacks = {each.__name__: each for name in MODULES for each in importlib.import_module(name).ATTACKS}
    succeeded, slowest = list[str](), 0.0
    for name, attack in attacks.items():
        if options.names and name not in options.names:
            continue
        start, problem = time.monotonic(), run(attack)
        seconds = time.monotonic() - start
        slowest = max(slowest, seconds)
        if problem is None and seconds > LIMIT_S:
            problem = f"took {seconds:.0f} s"
        print(f"{'FAILS' if problem is None else 'SUCCEEDS':9} {seconds:5.1f} s  {name}: {attack.__doc__}", flush=True)
        if problem is not None:
            print(problem)
            succeeded.append(name)
    count = len(options.names or attacks)
    finish("hostile_agents", not succeeded, attacks=count, succeeded=succeeded, slowest_s=round(slowest, 1))


def run(attack: Any) -> str | None:
    """Return the traceback of an attack that succeeds; None if it fails."""
    try:
        with tempfile.TemporaryDirectory(prefix="verl-hostile-") as folder:
            result = attack(Path(folder)) if inspect.signature(attack).parameters else attack()
            if inspect.isawaitable(result):
                asyncio.run(_wait(result))
    except BaseException:  # noqa: BLE001 - reported, and the other attacks are made
        return traceback.format_exc()
    return None


async def _wait(work: Any) -> None:
    await work


if __name__ == "__main__":
    main()
