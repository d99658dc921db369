"""Code with tests: the program of a response runs in the sandbox, and its results are compared outside of it.

The ground truth is a dict, or a dict as JSON, in one of these forms:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                              a program: standard input, standard output
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}                  a function, or a method of class Solution
    {"assert_case": ["assert add(1, 2) == 3"], "setup": "import math"}      assertions; also as "test_list", or a list
    {"test": "def check(candidate): ...", "entry_point": "add"}             a function that checks another

A program cannot pass a test by changing its own process: expected outputs and assertions never enter its sandbox, and
only plain values leave it (`code_guest`). Arguments are copied, so a test cannot see changes to them. A test is only as
strong as its condition: `assert f(3)` is passed by `return True`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import math
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import RewardError
from verl.rewards.sandbox import sandbox, sandbox_fusion
from verl.rewards.sandbox.sandbox import Limits, ProgramResult
from verl.rewards.scorers.code_guest import decode, format_request

_FENCED = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")

Run = Callable[..., ProgramResult]


@dataclass(frozen=True, slots=True)
class Tests:
    """Either inputs and outputs (of a program, or of the function `name`), or assertions with their setup code."""

    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    name: str | None = None
    asserts: tuple[str, ...] = ()
    setup: str = ""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    limits: Limits | None = None,
    sandbox_url: str | None = None,
    require: str = "namespaces",
    partial: bool = False,
) -> dict[str, float]:
    """Return `score` 1.0 if every test passes, else 0.0 (with `partial`: the fraction that passes, which is `passed`).

    `limits` apply to each input of a program, and to all calls of a function together. After a timeout, the remaining
    inputs count as failed. `sandbox_url` runs programs in a remote sandbox (SandboxFusion) instead of on this machine,
    whose isolation must be at least `require`.
    """
    tests = read_tests(ground_truth, data_source)
    code = extract_code(solution_str)
    limits = limits or Limits()
    run: Run = functools.partial(sandbox_fusion.run, url=sandbox_url) if sandbox_url else sandbox.run
    check_requirements(sandbox_url=sandbox_url, require=require)
    if not code.strip():
        passed = 0
    elif tests.asserts:
        if sandbox_url:
            raise RewardError(
                f"data_source {data_source!r}: assertions need two connected sandboxes, which the remote one at "
                f"{sandbox_url} does not support; run them on this machine (reward.sandbox.url=null), or use inputs "
                "and outputs with fn_name"
            )
        passed = _count_passed_asserts(code, tests, limits, data_source)
    elif tests.name:
        passed = _count_passed_calls(code, tests, limits, run)
    else:
        passed = _count_passed_programs(code, tests, limits, run)
    fraction = passed / (len(tests.asserts) or len(tests.inputs))
    return {"score": fraction if partial else float(fraction == 1.0), "passed": fraction}


def check_requirements(*, sandbox_url: str | None = None, require: str = "namespaces", **_: Any) -> None:
    """Raise a RewardError if programs would run on this machine with less isolation than `require`."""
    if sandbox_url is None and require != "limits":
        sandbox.require_isolation(require)


def extract_code(response: str) -> str:
    """Return the last fenced block of Python, or of any language if there is none, or else the whole response."""
    blocks = _FENCED.findall(response)
    chosen = [code for language, code in blocks if language.lower() in _PYTHON] or [code for _, code in blocks]
    return chosen[-1] if chosen else response


def read_tests(ground_truth: Any, data_source: str) -> Tests:
    """Return the tests of a row, in any of the forms above; raise a RewardError for other forms."""

    def error(problem: str) -> RewardError:
        return RewardError(
            f"data_source {data_source!r}: reward_model.ground_truth {problem}; use inputs and outputs of equal length "
            f"(with fn_name for a function), assert_case, or test and entry_point; it is {str(ground_truth)[:200]!r}"
        )

    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            raise error("is text that is not JSON") from None
    if not isinstance(truth, dict):
        truth = {"assert_case": truth}
    asserts: list[Any] | None = None
    for key in ("assert_case", "asserts", "test_list"):
        asserts = _to_list(truth[key]) if truth.get(key) is not None else asserts
    setup = truth.get("setup") or truth.get("test_setup_code") or ""
    if "test" in truth and "entry_point" in truth:
        asserts = [f"{truth['test']}\ncheck({truth['entry_point']})"]
    if asserts is not None:
        if not asserts or not all(isinstance(test, str) for test in asserts):
            raise error("is not a list of assertions as text")
        for test in asserts:
            try:
                ast.parse(f"{setup}\n{test}")
            except SyntaxError as syntax:
                raise error(f"has a test that is not Python ({syntax.msg}: {test[:80]!r})") from None
        return Tests(asserts=tuple(asserts), setup=setup)
    inputs, outputs = _to_list(truth.get("inputs")), _to_list(truth.get("outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise error(f"has {len(inputs)} inputs and {len(outputs)} outputs")
    return Tests(inputs=tuple(inputs), outputs=tuple(outputs), name=truth.get("fn_name"))


def _to_list(value: Any) -> list[Any]:
    """Parquet gives arrays where JSON gives lists."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else []


def _count_passed_programs(code: str, tests: Tests, limits: Limits, run: Run) -> int:
    passed = 0
    for stdin, expected in zip(tests.inputs, tests.outputs, strict=True):
        result = run(code, stdin=_to_text(stdin), limits=limits)
        passed += result.status == "ok" and _is_same_text(result.stdout, _to_text(expected))
        if result.status == "timeout":
            break
    return passed


def _to_text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


def _is_same_text(actual: str, expected: str) -> bool:
    """Ignores spaces at the ends of lines and empty lines at the end; numbers with a point may differ by 1e-6."""
    ours, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (actual, expected))
    return len(ours) == len(theirs) and all(
        len(mine) == len(yours) and all(map(_is_same_word, mine, yours))
        for mine, yours in zip(ours, theirs, strict=True)
    )


def _is_same_word(actual: str, expected: str) -> bool:
    try:
        return actual == expected or ("." in expected and _is_close(float(actual), float(expected)))
    except ValueError:
        return False


def _is_close(actual: float, expected: float) -> bool:
    """Up to a relative error of 1e-6. A zero may be a little off, but is not close to a small number."""
    return math.isclose(actual, expected, rel_tol=1e-6, abs_tol=1e-12 if expected else 1e-6)


def _count_passed_calls(code: str, tests: Tests, limits: Limits, run: Run) -> int:
    """Run all calls in one process, and compare the replies that it wrote before its end."""
    assert tests.name is not None
    calls = [format_request(tests.name, None, tuple(_read_arguments(given)), {}) for given in tests.inputs]
    stdin = "".join(f"{call}\n" for call in calls)
    result = run(_guest_source("serve"), stdin=stdin, files={"solution.py": code}, limits=limits)
    return sum(map(_is_expected_reply, result.stdout.splitlines(), tests.inputs, tests.outputs))


def _read_arguments(given: Any) -> list[Any]:
    """Return a list of arguments, given as such or as text with one JSON value per line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    return _to_list(given)


def _is_expected_reply(reply: str, given: Any, expected: Any) -> bool:
    """Some data sets wrap the expected value in a list, or write it as JSON."""
    try:
        result = decode(json.loads(reply)["value"])
        expected = json.loads(expected) if isinstance(given, str) and isinstance(expected, str) else expected
        expected = expected.tolist() if hasattr(expected, "tolist") else expected
        is_wrapped = isinstance(expected, list) and len(expected) == 1 and _is_same(result, expected[0])
        return is_wrapped or _is_same(result, expected)
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return False


def _is_same(result: Any, expected: Any) -> bool:
    """Compare values as JSON does: sequences are lists, keys are text. Only an expected float may differ by 1e-6."""
    if isinstance(expected, dict):
        if not isinstance(result, dict):
            return False
        mine, yours = ({str(key): item for key, item in side.items()} for side in (result, expected))
        return mine.keys() == yours.keys() and all(_is_same(mine[key], yours[key]) for key in yours)
    if isinstance(expected, list | tuple):
        # The order of a set of small numbers looks sorted, but is not the program's work.
        if isinstance(result, str | dict | set | frozenset) or not hasattr(result, "__iter__"):
            return False
        items = list(result)
        return len(items) == len(expected) and all(map(_is_same, items, expected))
    if isinstance(expected, float):
        return isinstance(result, int | float) and _is_close(result, expected)
    return bool(result == expected)


def _count_passed_asserts(code: str, tests: Tests, limits: Limits, data_source: str) -> int:
    """Run the program in one sandbox and the tests in another, connected by two pipes: requests out, values back."""
    sandbox.best_isolation()  # once, before there are two threads
    task = {"setup": tests.setup, "tests": tests.asserts, "names": _find_undefined_names(tests)}
    run = functools.partial(sandbox.run, limits=limits)
    requests_in, requests_out = os.pipe()
    replies_in, replies_out = os.pipe()
    with ThreadPoolExecutor(1) as executor:
        solution = {"solution.py": code}
        served = executor.submit(run, _guest_source("serve"), stdin=requests_in, stdout=replies_out, files=solution)
        test_files = {"tests.json": json.dumps(task)}
        judged = run(_guest_source("judge"), stdin=replies_in, stdout=requests_out, files=test_files)
        served.result()
    verdicts = judged.stderr.splitlines()
    for verdict, test in zip(verdicts, tests.asserts, strict=False):
        if verdict.startswith("invalid"):
            raise RewardError(
                f"data_source {data_source!r}: the test {test[:200]!r} cannot be run ({verdict.split(': ')[-1]}); "
                "arguments must be numbers, text, lists, tuples, sets or dicts: rewrite or remove this row"
            )
    return verdicts.count("pass")


def _find_undefined_names(tests: Tests) -> list[str]:
    """Return the names that the tests use and do not define: those of the program."""
    used: set[str] = set()
    bound = set(dir(builtins))
    for test in tests.asserts:
        for node in ast.walk(ast.parse(f"{tests.setup}\n{test}")):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    bound.add(name)
                case ast.alias(name=name, asname=alias):
                    bound.add(alias or name.split(".")[0])
                case ast.ExceptHandler(name=str(name)):
                    bound.add(name)
    return sorted(used - bound)


@functools.cache
def _guest_source(role: str) -> str:
    """Return a program that calls `serve` or `judge`."""
    return Path(__file__).with_name("code_guest.py").read_text() + f"\n{role}()\n"
