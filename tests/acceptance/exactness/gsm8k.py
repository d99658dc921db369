"""On GSM8K's 1,319 test problems every reference solution scores 1, and every shifted answer 0.

make show-gsm8k [ARGS="[FOLDER] [--short]"]

The folder holds test.jsonl as it is published ("question" and "answer" in each line); it is the argument, or GSM8K, or
../shared/data/gsm8k next to this checkout. The same final answers go through the scorer for MATH, in a box, as they are
and as a fraction of their doubles, from the main thread and from another. `--short` grades every tenth problem, and is
skipped where the file is missing.
"""

import argparse
import json
import os
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

from _common import ROOT, Stopwatch, finish

from verl.rewards.scorers import gsm8k, math

SHIFTS: dict[str, Callable[[Decimal], Decimal]] = {
    "+1": lambda number: number + 1,
    "-1": lambda number: number - 1,
    "+0.01": lambda number: number + Decimal("0.01"),
    "x10": lambda number: number * 10 if number else Decimal(10),
    "negated": lambda number: -number if number else Decimal(-1),
    "digit": lambda number: Decimal(f"{number}0") + 7,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=os.environ.get("GSM8K", ROOT.parent / "shared/data/gsm8k"))
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    file = Path(options.folder, "test.jsonl")
    if not file.is_file():
        if options.short:
            finish("gsm8k", True, skipped=f"{file} does not exist")
        print(f"{file} does not exist: give the folder of GSM8K's test.jsonl as an argument, or as GSM8K=...")
        finish("gsm8k", False, problems=0, missing="test.jsonl")
    solutions = [json.loads(line)["answer"] for line in file.read_text().splitlines()]
    complete = len(solutions) == 1319
    solutions = solutions[:: 10 if options.short else 1]
    watch = Stopwatch()
    results = {"gsm8k": graded(solutions, in_gsm8k), "math": graded(solutions, in_math)}
    thread = threading.Thread(target=lambda: results.update(math_in_a_thread=graded(solutions, as_fraction)))
    thread.start()
    thread.join()
    passed = [figures["right"] == figures["of"] and not figures["unearned"] for figures in results.values()]
    finish(
        "gsm8k",
        complete and len(passed) == 3 and all(passed),
        problems=len(solutions),
        **results,
        shifts=list(SHIFTS),
        seconds=round(watch.seconds(), 1),
    )


def graded(solutions: list[str], score: Callable[[str, Decimal | None], float]) -> dict[str, int]:
    """How many references are right, and how many shifted answers are, which should be none."""
    right = unearned = 0
    for solution in solutions:
        number = gsm8k.final_number(solution)
        assert number is not None, f"no final number in {solution!r}"
        right += score(solution, None) == 1.0
        for name, shift in SHIFTS.items():
            if score(solution, shift(number)) != 0.0:
                print(f"{name}: {shift(number)} was taken for {number}")
                unearned += 1
    return {"right": right, "of": len(solutions), "shifted": len(solutions) * len(SHIFTS), "unearned": unearned}


def in_gsm8k(solution: str, instead: Decimal | None) -> float:
    """The reference solution itself, or with another number at its end, against the reference."""
    work, _, _ = solution.rpartition("####")
    answer = solution if instead is None else f"{work}#### {instead:,f}"
    return gsm8k.compute_score("openai/gsm8k", answer, solution)


def in_math(solution: str, instead: Decimal | None) -> float:
    """The final answer in a box, thousands set apart as LaTeX does, against the plain number."""
    final = solution.rpartition("####")[2].strip()
    written = final if instead is None else f"{instead:,f}"
    return boxed(written.replace(",", "{,}"), final)


def as_fraction(solution: str, instead: Decimal | None) -> float:
    """The final answer as half of its double, so that the text alone cannot decide."""
    final = solution.rpartition("####")[2].strip()
    number = Decimal(final.replace(",", "")) if instead is None else instead
    return boxed(f"\\frac{{{2 * number:f}}}{{2}}", final)


def boxed(answer: str, truth: str) -> float:
    return math.compute_score("math", f"The answer is $\\boxed{{{answer}}}$.", truth.replace(",", ""))["score"]


if __name__ == "__main__":
    main()
