"""Code with test cases: the answer's program runs in the sandbox, and what it says is judged outside of it.

The ground truth is a dict, or one as JSON, in one of these forms:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                              a program: standard input, standard output
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}                  a function, or a method of class Solution
    {"assert_case": ["assert add(1, 2) == 3"], "setup": "import math"}      assertions; also as "test_list", or a list
    {"test": "def check(candidate): ...", "entry_point": "add"}             a function that checks one

No test can be won by what a program does to its own process: expected outputs and assertions never enter its sandbox,
and only plain values leave it (`code_inside`). Arguments travel by value, so a test cannot see a list changed in place;
and a test is as strong as what it asks: `assert f(3)` alone is won by `return True`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import RewardError
from verl.rewards.sandbox import sandbox, sandbox_fusion
from verl.rewards.sandbox.sandbox import Limits, ProgramResult
from verl.rewards.scorers.code_guest import decode, request

__all__ = ["Tests", "check_requirements", "compute_score", "extract_code", "read_tests"]

_FENCED = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
_TOLERANCE = 1e-6

Run = Callable[..., ProgramResult]


@dataclass(frozen=True, slots=True)
class Tests:
    """Either inputs and outputs (of a program, or of the function `name`), or assertions with what they need first."""

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
    require: str = "limits",
    partial: bool = False,
) -> dict[str, float]:
    """`score` 1.0 when every test passes, else 0.0 (with `partial` the share that passes); `passed` is that share.

    `limits` holds for each input of a program, and for all calls of a function together. After a first timeout the
    rest is not tried. `sandbox_url` runs programs in a remote sandbox (SandboxFusion) instead of this machine's, whose
    walls must be at least those that `require` names.
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
                f"data_source {data_source!r}: tests by assertion need two sandboxes that talk, which a remote one "
                f"at {sandbox_url} cannot; run them here (reward.sandbox.url=null), or give inputs and outputs with "
                "fn_name"
            )
        passed = _passed_asserts(code, tests, limits, data_source)
    elif tests.name:
        passed = _passed_calls(code, tests, limits, run)
    else:
        passed = _passed_programs(code, tests, limits, run)
    share = passed / (len(tests.asserts) or len(tests.inputs))
    return {"score": share if partial else float(share == 1.0), "passed": share}


def check_requirements(*, sandbox_url: str | None = None, require: str = "limits", **_: Any) -> None:
    """A RewardError when this machine must run programs and has not the walls for it: known before the first answer."""
    if sandbox_url is None and require != "limits":
        sandbox.require_isolation(require)


def extract_code(answer: str) -> str:
    """The last block of Python between fences, or of any language if there is none, or else the whole answer.

    >>> extract_code("Think.\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = _FENCED.findall(answer)
    chosen = [code for language, code in blocks if language.lower() in _PYTHON] or [code for _, code in blocks]
    return chosen[-1] if chosen else answer


def read_tests(ground_truth: Any, data_source: str) -> Tests:
    """The tests of a row, in any of the forms above; a RewardError says what is wrong with others."""

    def wrong(what: str) -> RewardError:
        return RewardError(
            f"data_source {data_source!r}: reward_model.ground_truth {what}; give inputs and outputs of equal length "
            f"(with fn_name for a function), assert_case, or test and entry_point; found {str(ground_truth)[:200]!r}"
        )

    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            raise wrong("is text that is no JSON") from None
    if not isinstance(truth, dict):
        truth = {"assert_case": truth}
    asserts: Sequence[Any] | None = None
    for key in ("assert_case", "asserts", "test_list"):
        asserts = _listed(truth[key]) if truth.get(key) is not None else asserts
    setup = truth.get("setup") or truth.get("test_setup_code") or ""
    if "test" in truth and "entry_point" in truth:
        asserts = [f"{truth['test']}\ncheck({truth['entry_point']})"]
    if asserts is not None:
        if not asserts or not all(isinstance(test, str) for test in asserts):
            raise wrong("holds no list of assertions as text")
        for test in asserts:
            try:
                ast.parse(f"{setup}\n{test}")
            except SyntaxError as error:
                raise wrong(f"holds a test that is no Python ({error.msg}: {test[:80]!r})") from None
        return Tests(asserts=tuple(asserts), setup=setup)
    inputs, outputs = _listed(truth.get("inputs")), _listed(truth.get("outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise wrong(f"has {len(inputs)} inputs and {len(outputs)} outputs")
    return Tests(inputs=tuple(inputs), outputs=tuple(outputs), name=truth.get("fn_name"))


def _listed(value: Any) -> list[Any]:
    """Parquet gives arrays where JSON gives lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else []


def _passed_programs(code: str, tests: Tests, limits: Limits, run: Run) -> int:
    passed = 0
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        outcome = run(code, stdin=_text(given), limits=limits)
        passed += outcome.status == "ok" and _same_text(outcome.stdout, _text(expected))
        if outcome.status == "timeout":
            break
    return passed


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


def _same_text(said: str, expected: str) -> bool:
    """Equal but for blanks at the ends of lines and empty lines at the end; numbers with a point may differ by 1e-6."""
    ours, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (said, expected))
    return len(ours) == len(theirs) and all(
        len(mine) == len(yours) and all(map(_same_word, mine, yours)) for mine, yours in zip(ours, theirs, strict=True)
    )


def _same_word(said: str, expected: str) -> bool:
    if said == expected:
        return True
    try:
        return "." in expected and math.isclose(float(said), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


def _passed_calls(code: str, tests: Tests, limits: Limits, run: Run) -> int:
    """All calls in one process; its replies are compared here, as far as it came."""
    assert tests.name is not None
    calls = [request(tests.name, None, tuple(_arguments(given)), {}) for given in tests.inputs]
    stdin = "".join(f"{call}\n" for call in calls)
    outcome = run(_inside("serve"), stdin=stdin, files={"answer.py": code}, limits=limits)
    replies = outcome.stdout.splitlines()
    return sum(map(_same_reply, replies, tests.inputs, tests.outputs))


def _arguments(given: Any) -> list[Any]:
    """A list of arguments, or text with one argument as JSON on each line."""
    return (
        [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else _listed(given)
    )


def _same_reply(reply: str, given: Any, expected: Any) -> bool:
    """The result is the expected one; some data sets wrap it in a list of one, or write it as JSON."""
    try:
        result = decode(json.loads(reply)["value"])
        expected = json.loads(expected) if isinstance(given, str) and isinstance(expected, str) else expected
        expected = expected.tolist() if hasattr(expected, "tolist") else expected
        wrapped = isinstance(expected, list) and len(expected) == 1 and _same(result, expected[0])
        return wrapped or _same(result, expected)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _same(result: Any, expected: Any) -> bool:
    """Equality of plain values as JSON knows them: sequences are lists, keys are text, floats may differ by 1e-6."""
    if isinstance(expected, dict):
        mine, yours = ({str(key): item for key, item in side.items()} for side in (_as_dict(result), expected))
        return isinstance(result, dict) and mine.keys() == yours.keys() and all(_same(mine[k], yours[k]) for k in yours)
    if isinstance(expected, list | tuple):
        listed = list(result) if hasattr(result, "__iter__") and not isinstance(result, str | dict) else None
        return listed is not None and len(listed) == len(expected) and all(map(_same, listed, expected))
    if isinstance(expected, float) or (isinstance(result, float) and isinstance(expected, int)):
        return isinstance(result, int | float) and math.isclose(
            result, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE
        )
    return bool(result == expected)


def _as_dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _passed_asserts(code: str, tests: Tests, limits: Limits, data_source: str) -> int:
    """The answer in one sandbox, the tests in another, two pipes between them: questions there, plain values back."""
    sandbox.best_isolation()
    told = {"setup": tests.setup, "tests": tests.asserts, "names": _asked_names(tests)}
    asked, ask = os.pipe()
    heard, say = os.pipe()
    with ThreadPoolExecutor(1) as beside:
        answering = beside.submit(
            sandbox.run, _inside("serve"), stdin=asked, stdout=say, files={"answer.py": code}, limits=limits
        )
        judged = sandbox.run(
            _inside("judge"), stdin=heard, stdout=ask, files={"tests.json": json.dumps(told)}, limits=limits
        )
        answering.result()
    verdicts = judged.stderr.splitlines()
    for verdict, test in zip(verdicts, tests.asserts, strict=False):
        if verdict.startswith("cannot ask"):
            raise RewardError(
                f"data_source {data_source!r}: the test {test[:200]!r} cannot be asked ({verdict.split(': ')[-1]}); "
                "arguments must be numbers, text, lists, tuples, sets or dicts: rewrite or leave out this row"
            )
    return verdicts.count("pass")


def _asked_names(tests: Tests) -> list[str]:
    """Names that the tests use and do not define: the answer's."""
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
def _inside(role: str) -> str:
    """The source of `serve` or `judge`."""
    return Path(__file__).with_name("code_guest.py").read_text() + f"\n{role}()\n"
