"""From the command to the first optimizer step of the demo's RL part: <= 60 s on 2 cores.

Runs `verl demo --steps 1` as a user would and reads the times from its metrics. The parts of the breakdown overlap,
since they start concurrently. `--short` (CI) runs the same without a time limit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import Stopwatch, finish, metrics_of

ALLOWED_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verl-start-") as directory:
        folder = Path(directory, "demo")
        command = [sys.executable, "-m", "verl", "demo", "--dir", str(folder), "--steps", "1"]
        start, watch = time.time(), Stopwatch()
        code = subprocess.run([*command, "trainer.val_before_train=False", *options.overrides], timeout=600).returncode
        if code != 0:
            finish("start", False, exit_code=code)
        stolen = watch.stolen()
        lines = metrics_of(folder / "run")
    first = next(line for line in lines if "timing_s/update" in line)
    first_step_s = first["time"] - first["timing_s/sync"] - first["timing_s/probe"] - start
    parts = {key.removeprefix("timing_s/start_"): v for line in lines for key, v in line.items() if "/start_" in key}
    finish(
        "start",
        options.short or first_step_s * (1 - stolen) <= ALLOWED_S,
        seconds_to_first_optimizer_step=round(first_step_s * (1 - stolen), 1),
        allowed=ALLOWED_S,
        stolen_by_the_host=round(stolen, 3),
        first_step={name: round(first[f"timing_s/{name}"], 1) for name in ("gen", "prepare", "update")},
        side_by_side={name: round(seconds, 1) for name, seconds in parts.items()},
    )


if __name__ == "__main__":
    main()
