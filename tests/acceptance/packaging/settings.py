"""`verl config` prints all settings with their documentation in under 1.5 s, and imports neither torch nor Ray.

`--short` (CI, on machines that others use too) prints the time and holds only the imports.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from _common import finish

ALLOWED_S = 1.5
SPY = "import sys, verl.cli; verl.cli.main(['config']); sys.stderr.write(' '.join(sys.modules))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "verl", "config"], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
    modules = subprocess.run([sys.executable, "-c", SPY], capture_output=True, text=True, check=True).stderr.split()
    heavy = [name for name in ("torch", "ray", "transformers", "vllm") if name in modules]
    finish(
        "settings",
        not heavy and (short or statistics.median(seconds) < ALLOWED_S),
        seconds=round(statistics.median(seconds), 2),
        slowest=round(max(seconds), 2),
        allowed=ALLOWED_S,
        lines=len(done.stdout.splitlines()),
        heavy_imports=heavy,
    )


if __name__ == "__main__":
    main()
