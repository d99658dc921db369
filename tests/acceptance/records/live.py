"""The live panel: a run is never silent on a terminal, nothing is too wide, and every label has an explanation.

make show-live [ARGS="[--short] [--results DIR]"]

Records `verl demo --steps 3` in terminals of 80 and 160 columns, and without a terminal, where no panel may appear.
`--short` (CI) trains in one process instead, without Ray and vLLM.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from _common import finish
from _terminal import Session, record
from first_contact import LOCAL, MAX_SILENCE_S, make_assets
from rich.cells import cell_len

COLUMNS = (80, 160)
STEPS = 3
ANIMATED = """
import asyncio
import sys

from verl.tracking.console import Console


class AnimatedConsole(Console):
    \"\"\"Shows the panel although the run is in one process, where a debugger may need the terminal.\"\"\"

    is_animated = property(lambda self: self._out.is_interactive, lambda self, value: None)


console = AnimatedConsole()
with console.stage("importing libraries", is_logged=False):
    import torch  # which the run needs, and imports outside of all stages

    from verl.config.load import load
    from verl.trainer.launcher import train

[loaded] = load(sys.argv[1:])
sys.exit(asyncio.run(train(loaded.config, console)))
"""
SPINNING = re.compile("[\u2800-\u28ff] ")
STEP = re.compile(rf"step +\d/{STEPS} ")
LABEL = re.compile(r"(?:^|  )([a-z][a-z/]*(?: [a-z]+)?) +(?:-?\d[^ ]*|nan|-)(?= |$)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a run in one process, without Ray and vLLM")
    parser.add_argument("--results", type=Path, default=Path("live-results"), help="folder of the sessions")
    options = parser.parse_args()
    results = options.results.absolute()
    results.mkdir(parents=True, exist_ok=True)
    folder = results / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    make_assets(folder / "assets")
    (folder / "animated.py").write_text(ANIMATED)
    command = local_command() if options.short else [sys.executable, "-m", "verl", "demo", "--steps", str(STEPS)]
    busy = 1.0
    problems, sessions = list[str](), list[Session]()
    for columns in COLUMNS:
        session = record(command, folder, log=results / f"{columns}.txt", columns=columns, timeout_s=900.0)
        busy = max(busy, os.getloadavg()[0] / (os.cpu_count() or 1))  # 1 on an idle machine
        sessions.append(session)
        problems += [f"{columns} columns: {problem}" for problem in find_problems(session, columns)]
    problems += [f"no terminal: {problem}" for problem in find_animation(command, folder)]
    for session in sessions:
        if max(session.longest_silence_s, session.first_output_s) > MAX_SILENCE_S * busy:
            after = f"{session.longest_silence_s:.1f} s after {session.silent_after!r}"
            problems.append(f"silent for {session.first_output_s:.1f} s at the start, and for {after}")
    for problem in problems:
        print(problem)
    silences = [round(session.longest_silence_s, 1) for session in sessions]
    starts = [round(session.first_output_s, 1) for session in sessions]
    figures = {"longest_silence_s": silences, "first_output_s": starts, "load_per_core": round(busy, 1)}
    finish("live", not problems, columns=COLUMNS, **figures, recorded=str(results))


def local_command() -> list[str]:
    """Return the command of a run in one process that validates after every step."""
    settings = [each for each in LOCAL if not each.startswith("trainer.total_training_steps")]
    settings += [f"trainer.total_training_steps={STEPS}", "trainer.test_freq=1", "trainer.save_freq=-1"]
    settings += ["data.val_files=assets/test.parquet", "data.val_max_samples=16", "trainer.resume_mode=disable"]
    return [sys.executable, "animated.py", *settings]


def find_problems(session: Session, columns: int) -> Iterator[str]:
    """Yield what is wrong with the panel and the lines of the steps."""
    lines = list(dict.fromkeys(session.text.splitlines()))
    steps = [line for line in lines if STEP.match(line)]
    cells = [line for line in lines if re.search("[▁-█]{2}", line)]
    spinning = [line for line in lines if SPINNING.match(line)]
    headers = [line for line in lines if line.startswith("── step ")]
    if session.code:
        yield f"exit code {session.code}"
    if len(steps) != STEPS:
        yield f"{len(steps)} lines of steps"
    if not (cells and headers and any("generating" in line and "━" in line for line in spinning)):
        yield "the panel is not complete"
    yield from (f"too wide: {line}" for line in [*steps, *cells, *spinning, *headers] if cell_len(line) > columns)
    yield from (f"{label!r} has no explanation" for label in find_unexplained([*steps, *cells]))


def find_unexplained(lines: list[str]) -> set[str]:
    from verl.tracking.explanations import find_explanations

    labels = {label for line in lines for label in LABEL.findall(line.replace("|", " "))}
    assert {"reward", "entropy", "grad norm", "tokens"} <= labels, labels
    return {label for label in labels if label != "step" and not find_explanations(label)}


def find_animation(command: list[str], folder: Path) -> Iterator[str]:
    """Yield what a run prints that is only for terminals."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode or len(STEP.findall(done.stdout)) != STEPS:
        yield f"exit code {done.returncode}, or not {STEPS} steps: {done.stdout[-500:]}"
    if "\x1b" in done.stdout or SPINNING.search(done.stdout) or "── step " in done.stdout:
        yield "the panel appears"


if __name__ == "__main__":
    main()
