"""Mistakes that users make: each is answered before an engine starts, with its place and a fix, in <= 5 s.

make show-mistakes [ARGS="[--short] [--folder DIR]"]

Each row of the tables in `_mistakes.py` and `_mistaken_files.py` is one mistake. Answers to wrong settings take at
most 1.5 s, and import neither torch nor Ray. The full form runs every row as a process, as a user would. `--short` (CI)
answers all rows in one process and some in processes of their own, and bounds the time of their processors, which does
not depend on other programs.

No suggestion changes what is trained: it sets what the user wrote wrongly, what the finding names, or settings of
speed, memory and place (`NEUTRAL`); and wrong settings are accepted once they are replaced by what is suggested.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import finish
from _mistaken_files import FILES, TEN_AT_ONCE
from _mistakes import SETTINGS, Mistake
from rotation import count_commits

ALLOWED_S, ALLOWED_SETTINGS_S = 5.0, 1.5
HEAVY = ("torch", "ray", "vllm")
SAMPLE, PARTS = 40, 5
"""Short form: every how many rows one is a process, and every how many files one is tried, by the number of commits."""
HERE = Path(__file__).parent
SPY = (
    "import sys, verl.cli; code = verl.cli.main(sys.argv[1:]); "
    f"sys.stderr.write('imported: ' + ' '.join(name for name in {HEAVY} if name in sys.modules)); sys.exit(code)"
)
NEUTRAL = re.compile(
    r"trainer\.(default_local_dir|max_ckpts_to_keep|save_freq|device|n_gpus_per_node|nnodes|logger|resume_from_path)"
    r"|ray_kwargs\..*|.*\.(param_offload|optimizer_offload|offload_policy|enable_gradient_checkpointing)"
    r"|.*\.(gpu_memory_utilization|tensor_model_parallel_size|free_cache_engine|reshard_after_forward|max_num_seqs)"
    r"|.*micro_batch_size_per_gpu|.*max_token_len_per_gpu|.*ulysses_sequence_parallel_size"
)
"""Settings that change the speed, the memory, or where things are, and not what is trained (docs/architecture.md)."""


_KEY = r"[a-z_]\w*(?:\.\w+)+"
_ASSIGNED = rf"({_KEY})=((?:\[[^\]]*\]|[^\s,;:?()])*)"


@dataclass(frozen=True, slots=True)
class Answer:
    """What verl says about a mistake, and what it took."""

    findings: list[dict[str, str]]
    seconds: float
    cpu_s: float
    imported: list[str]
    code: int
    text: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the mistaken files are written; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary) / "files").absolute()
        folder.mkdir(parents=True)
        code = "import sys, pathlib, _mistaken_files as files; files.write_files(pathlib.Path(sys.argv[1]))"
        here = Path(__file__).parent
        subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=_environment(), cwd=here)
        os.chdir(folder)
        check(short=options.short)


def check(*, short: bool) -> None:
    """Answer all mistakes in the current folder, and finish."""
    faults: list[str] = []
    answers: list[tuple[Mistake, Answer, bool]] = []
    part = count_commits() % PARTS
    for rows, is_settings in ((SETTINGS, True), (FILES, False)):
        for index, mistake in enumerate(rows):
            if short and (is_settings or index % PARTS == part):
                answers.append((mistake, answer_here(mistake), is_settings))
            if not short or index % SAMPLE == part:
                answers.append((mistake, answer_in_process(mistake), is_settings))
    for mistake, answer, is_settings in answers:
        faults += [f"{mistake.written}: {fault}" for fault in find_faults(mistake, answer, is_settings, short)]
    ten = answer_here(TEN_AT_ONCE) if short else answer_in_process(TEN_AT_ONCE)
    places = {finding["place"] for finding in ten.findings if finding["severity"] == "error" and finding["fix"]}
    if len(places) < 10:
        faults.append(f"ten mistakes at once gave {len(places)} findings: {sorted(places)}")
    good = answer_in_process(Mistake("trainer.seed=1", "", ""))
    if wrong := [finding for finding in good.findings if finding["severity"] != "note"]:
        faults.append(f"a run without mistakes: {wrong}")
    faults += [fault for mistake, answer, _ in answers for fault in find_changes(mistake, answer)]
    followed = [(mistake, suggestion) for mistake in SETTINGS if (suggestion := find_suggestion(mistake, answers))]
    faults += [fault for mistake, suggestion in followed for fault in follow(mistake, suggestion)]
    for fault in faults:
        print(f"FAULT {fault}")
    processes = [(answer, is_settings) for _, answer, is_settings in answers if answer.text]
    finish(
        "mistakes",
        not faults,
        mistakes=len(SETTINGS) + len(FILES),
        settings=len(SETTINGS),
        files=len(FILES),
        processes=len(processes),
        ten_at_once=len(places),
        suggestions_followed=len(followed),
        slowest_settings_s=max(round(answer.seconds, 2) for answer, is_settings in processes if is_settings),
        slowest_s=max(round(answer.seconds, 2) for answer, is_settings in processes if not is_settings),
        slowest_settings_cpu_s=max(round(answer.cpu_s, 2) for answer, is_settings in processes if is_settings),
        slowest_cpu_s=max(round(answer.cpu_s, 2) for answer, is_settings in processes if not is_settings),
        faults=len(faults),
    )


def answer_here(mistake: Mistake) -> Answer:
    """Return what `verl train --dry-run` says, in this process, whose imports are done once."""
    from verl.cli import main as verl

    out, errors, start = io.StringIO(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = verl(["train", "--dry-run", "--json", *mistake.arguments])
    findings = _read_findings(out.getvalue(), errors.getvalue())
    return Answer(findings, time.monotonic() - start, 0.0, [], code)


def answer_in_process(mistake: Mistake) -> Answer:
    """Return what `verl train --dry-run` says as a command, and the time that it took."""
    start, before = time.monotonic(), _children_cpu()
    command = [sys.executable, "-c", SPY, "train", "--dry-run", "--json", *mistake.arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    seconds, cpu_s = time.monotonic() - start, _children_cpu() - before
    imported = done.stderr.rpartition("imported: ")[2].split()
    findings = _read_findings(done.stdout, done.stderr)
    return Answer(findings, seconds, cpu_s, imported, done.returncode, done.stdout)


def find_faults(mistake: Mistake, answer: Answer, is_settings: bool, short: bool) -> list[str]:
    """Return how an answer falls short."""
    faults = []
    matching = [
        finding
        for finding in answer.findings
        if mistake.place in finding["place"] and mistake.fix.lower() in f"{finding['problem']} {finding['fix']}".lower()
    ]
    if not matching:
        faults.append(f"no finding names {mistake.place!r} and {mistake.fix!r}: {answer.findings}")
    elif not any(finding["fix"] and finding["place"] for finding in matching):
        faults.append(f"no place or fix: {matching}")
    elif mistake.stops != any(finding["severity"] == "error" for finding in matching):
        faults.append(f"stops a run: {mistake.stops}, but {matching[0]['severity']}")
    if (answer.code != 0) != any(finding["severity"] == "error" for finding in answer.findings):
        faults.append(f"exit code {answer.code}")
    if not answer.text:
        return faults
    allowed = ALLOWED_SETTINGS_S if is_settings and mistake.stops else ALLOWED_S
    if (taken := answer.cpu_s if short else answer.seconds) > allowed:
        faults.append(f"took {taken:.1f} s of {allowed:g}")
    if is_settings and mistake.stops and (heavy := [name for name in answer.imported if name != "vllm"]):
        faults.append(f"imported {' and '.join(heavy)}")
    return faults


def find_changes(mistake: Mistake, answer: Answer) -> list[str]:
    """Return the suggestions that could change what is trained by a setting that was not wrong.

    Where the run would not start, these are settings that the user has given rightly; else, all that are not `NEUTRAL`.
    """
    kept = {_canonical(word.partition("=")[0]) for word in mistake.arguments if word not in mistake.written.split()}
    asked = {_canonical(word.lstrip("+~-").partition("=")[0]) for word in mistake.written.split()}
    faults = []
    for finding in answer.findings:
        named = set(re.findall(_KEY, f"{finding['place']} {finding['problem']}"))
        is_corrected = "did you mean" in finding["fix"] or finding["problem"].startswith("is not an option")
        for key, _ in re.findall(_ASSIGNED, finding["fix"]):
            is_free = is_corrected or "remove it" in finding["fix"] or NEUTRAL.fullmatch(key)
            is_new = finding["severity"] == "error" and _canonical(key) not in kept  # no results yet
            if not (is_free or is_new or _canonical(key) in asked | named):
                faults.append(f"{mistake.written}: suggests {key}, which was not wrong: {finding['fix']}")
    return faults


def find_suggestion(mistake: Mistake, answers: Sequence[tuple[Mistake, Answer, bool]]) -> tuple[str, str] | None:
    """Return the setting that the answer to a wrong setting suggests first, and its value."""
    answer = next(answer for asked, answer, _ in answers if asked is mistake)
    fixes = [finding["fix"] for finding in answer.findings if finding["place"].startswith(mistake.place)]
    found = [pair for fix in fixes for pair in re.findall(_ASSIGNED, fix) if "-m to run each" not in fix]
    return found[0] if found and mistake.stops and not found[0][1].startswith((".", "DIR", "MODEL")) else None


def follow(mistake: Mistake, suggestion: tuple[str, str]) -> list[str]:
    """Return what is still wrong at the same place after the suggestion was followed."""
    from verl.config.load import TRAIN, inspect_run

    key, value = suggestion
    wrong = [word for word in mistake.written.split() if _is_unknown(word)]
    kept = [word for word in mistake.arguments if word not in wrong and _canonical(word.partition("=")[0]) != key]
    _, problems = inspect_run(TRAIN, [*kept, f"{key}={value}"])
    return [f"{mistake.written}: after {key}={value}: {problem}" for problem in problems if mistake.place in problem]


def _is_unknown(word: str) -> bool:
    """Whether an argument is not a setting, so that a suggestion replaces it instead of adding to it."""
    from verl.config.paths import find_setting

    return find_setting(tuple(_canonical(word.lstrip("+~").partition("=")[0]).split("."))) is None


def _canonical(key: str) -> str:
    from verl.config.load import TRAIN
    from verl.config.paths import join_path

    return join_path(TRAIN.legacy.resolve_alias(tuple(key.split("."))))


def _read_findings(out: str, errors: str) -> list[dict[str, str]]:
    try:
        content: dict[str, Any] = json.loads(out)
    except ValueError:
        return [{"severity": "error", "place": "", "problem": f"no JSON: {out[-500:]} {errors[-1500:]}", "fix": ""}]
    findings: list[dict[str, str]] = content["findings"]
    return findings


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
