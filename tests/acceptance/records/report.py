"""Use the report of a run in headless Chromium, without a network: curves, timeline, samples, tokens, phone, dark mode.

make show-report [ARGS="[--short] [--keep DIR]"]

The run is synthetic: 100 steps and 20,000 samples, with HTML in prompts, responses and names of metrics, which must
stay text. Its page has to be at most 15 MB and drawn within 3 s, in the best of three loads; all loads are printed. The
same is looked at for a small run that was killed while it wrote. `--short` has 20 steps and 720 samples, and does not
check the time. `--keep` keeps the pages. Without Chromium the script is skipped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from _browser import find_chromium, run_program
from _common import Stopwatch, finish, skip
from synthetic_run import BEGAN, Size, write_run

from verl.report.html import build_page
from verl.tracking.run_folder import RunFolder

MAX_BYTES, MAX_SECONDS = 15_000_000, 3.0
SHORT = Size(steps=20, groups=4, validation=16, validation_every=4)
PROGRAM = Path(__file__).with_name("_report.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a small run, and no limit of the time")
    parser.add_argument("--keep", type=Path, help="keep the runs and their pages in this folder")
    options = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        skip("report", "Chromium is not installed")
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        samples = write_run(folder / "run", SHORT if options.short else Size(), is_hostile=True)
        write_run(folder / "killed", SHORT, is_hostile=True, is_killed=True)
        sizes, build_s = build(folder)
        pages = [f"/{name}.html" for name in sizes]
        program = PROGRAM.read_text(encoding="utf-8").replace("%PAGES%", json.dumps(pages))
        seen, requested = run_program(folder, program.replace("%LOADS%", "1" if options.short else "3"), chromium)
    loads = seen[pages[0]]["loads"]
    best = min(load["drawn"] for load in loads)
    faults = [*find_faults(seen), *sorted(f"requested {path}" for path in {*requested} - {*pages, "/look.html"})]
    for fault in faults:
        print(fault)
    finish(
        "report",
        not faults and max(sizes.values()) <= MAX_BYTES and (options.short or best <= MAX_SECONDS),
        samples=samples,
        megabytes={name: round(size / 1e6, 2) for name, size in sizes.items()},
        build_s=round(build_s, 1),
        drawn_s=[round(load["drawn"], 2) for load in loads],
        searchable_s=[round(load["complete"], 2) for load in loads],
        stolen=round(watch.stolen(), 2),
        checks=sum(value is True for page in seen.values() for value in page.values()),
        faults=len(faults),
        seconds=round(watch.seconds(), 1),
    )


def build(folder: Path) -> tuple[dict[str, int], float]:
    """Write the pages of both runs; returns their sizes, and the seconds of the first one."""
    sizes, seconds = {}, []
    for name in ("run", "killed"):
        start = time.monotonic()
        page = build_page(RunFolder(folder / name), BEGAN + 5_000)
        seconds.append(time.monotonic() - start)
        (folder / f"{name}.html").write_bytes(page)
        sizes[name] = len(page)
    return sizes, seconds[0]


def find_faults(seen: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{page}: {name}: {value}"
        for page, values in seen.items()
        for name, value in values.items()
        if name != "loads" and value is not True
    ]


if __name__ == "__main__":
    main()
