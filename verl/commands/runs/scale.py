"""`verl scale`: change the number of rollout engines of a run while it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.commands.arguments import ArgumentParser
from verl.errors import VerlError
from verl.rollout.scaling import REQUEST, read_status, write_json

HELP = """\
usage: verl scale RUN [--engines N] [--wait SECONDS]

Change the number of rollout engines of a run while it goes on, or print the state of its engines.

Engines that join start, get the current weights, are probed, and then take requests. With devices of their own
(actor_rollout_ref.hybrid_engine=False) they wait until the cluster has free ones. Engines that leave finish their
requests first. The steps of the run do not wait for either. The number lasts until the command of the run ends.

options:
  RUN             folder of the run (trainer.default_local_dir)
  --engines N     the number of engines from now on
  --wait SECONDS  how long to print changes until there are as many; by default 600

example:
  verl scale checkpoints/verl/default --engines 4
"""

REPLY_S = 15.0
_POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Print the engines, and after a request their changes; return 1 if there are not as many as wanted in time."""
    parser = ArgumentParser("verl scale")
    parser.add_argument("run")
    parser.add_argument("--engines", type=int)
    parser.add_argument("--wait", type=float, default=600.0)
    options = parser.parse_args(argv)
    folder = Path(options.run)
    status = read_status(folder)
    if status is None or not (options.engines or status["engines"]):
        raise VerlError(f"verl scale: no run with rollout engines is going on in {folder}")
    if options.engines is None:
        _show({}, status)
        return 0
    if options.engines < 1:
        raise VerlError(f"verl scale: --engines {options.engines}: a run needs at least one engine")
    _request(folder, options.engines)
    return _follow(folder, options.engines, time.monotonic() + options.wait)


def _request(folder: Path, engines: int) -> None:
    """Return when the run has read the request."""
    path, until = folder / REQUEST, time.monotonic() + REPLY_S
    write_json(path, {"engines": engines})
    while path.exists():
        if time.monotonic() > until:
            path.unlink(missing_ok=True)
            raise VerlError(f"verl scale: no run in {folder} has replied within {REPLY_S:.0f} s")
        time.sleep(_POLL_S)


def _follow(folder: Path, engines: int, until: float) -> int:
    """Print changes until the run has `engines` engines that are ready, and no others."""
    shown: Mapping[str, Any] = {}
    while True:
        status = read_status(folder) or {"engines": {}, "refusal": ""}
        if status["refusal"]:
            raise VerlError(f"verl scale: {status['refusal']}")
        _show(shown, status)
        shown = status["engines"]
        if list(shown.values()) == ["ready"] * engines:
            return 0
        if not shown or time.monotonic() > until:
            sys.stderr.write(f"{list(shown.values()).count('ready')} of {engines} engines are ready\n")
            return 1
        time.sleep(_POLL_S)


def _show(shown: Mapping[str, Any], status: Mapping[str, Any]) -> None:
    for engine_id, state in status["engines"].items():
        if shown.get(engine_id) != state:
            sys.stdout.write(f"rollout engine {engine_id}: {state}\n")
    for engine_id in shown.keys() - status["engines"].keys():
        sys.stdout.write(f"rollout engine {engine_id}: left\n")
    sys.stdout.flush()
