"""Code with tests: the forms of tests, which solutions pass, and that only plain values leave the sandbox."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rotation import rotate_rest

from verl.errors import RewardError
from verl.rewards.pool.pool import RewardPool
from verl.rewards.result import Scored
from verl.rewards.sandbox.sandbox import Limits
from verl.rewards.scorers import code
from verl.rewards.scorers.code import compute_score, extract_code, read_tests
from verl.rewards.scorers.code_guest import decode, encode
from verl.rewards.settings import RewardFunctionSettings

pytestmark = [pytest.mark.contract, pytest.mark.timeout(60)]

LIMITS = Limits(seconds=30)


def passed(answer: str, truth: Any) -> float:
    result = compute_score("code", answer, truth, limits=LIMITS)
    assert result["score"] == float(result["passed"] == 1.0)
    return result["passed"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("print(1)", "print(1)"),
        ("a\n```python\nx = 1\n```\nb\n```py\ny = 2\n```\nc", "y = 2\n"),
        ("```python\nx = 1\n```\nIt prints:\n```text\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```java\nint x;\n```", "int x;\n"),
        ("so\n```python\nx = 1  # cut off", "x = 1  # cut off"),
    ],
)
def test_the_last_block_of_python_is_the_answer(answer: str, expected: str) -> None:
    assert extract_code(answer) == expected


def test_a_program_is_judged_by_what_it_prints() -> None:
    truth = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7\n"]}
    assert passed("import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')", truth) == 1.0
    assert passed("print(3)", truth) == 0.5
    assert passed("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(1)", truth) == 0.0


def test_inputs_after_a_timeout_are_not_run() -> None:
    truth = {"inputs": ["0", "1", "1"], "outputs": ["", "", ""]}
    answer = "import time\ntime.sleep(60 * int(input()))"
    result = compute_score("code", answer, truth, limits=Limits(seconds=3), partial=True)
    assert result["score"] == result["passed"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("0.3334", "0.3333", False),
        ("3.0", "3", False),
        ("nan", "1.0", False),
        ("", "", True),
        ("x", "", False),
        ("1\n\n2", "1\n2", False),
        ("0", "0.00000041", False),
        ("0.0000001", "0.0", True),
        ("2.6525285981219103e+32", "265252859812191058636308480000000", False),
    ],
)
def test_trailing_whitespace_is_ignored_and_floats_have_a_tolerance(actual: str, expected: str, same: bool) -> None:
    assert code._is_same_text(actual, expected) is same


def test_a_function_is_judged_by_its_values() -> None:
    truth = {"inputs": [[2], [3]], "outputs": [[4], 9], "fn_name": "square"}
    assert passed("def square(n):\n    print('noise', flush=True)\n    return n * n", truth) == 1.0
    assert passed("class Solution:\n    def square(self, n: int) -> List[int]:\n        return n * n", truth) == 1.0
    assert passed("def square(n):\n    if n > 2: raise ValueError\n    return 4", truth) == 0.5
    assert passed("def square(n):\n    if n > 2: import os; os._exit(0)\n    return 4", truth) == 0.5
    assert passed("def cube(n): return 4", truth) == 0.0


def test_a_number_too_large_for_a_float_is_wrong() -> None:
    assert passed("def f(n): return 10**400", {"inputs": [[1]], "outputs": [2.5], "fn_name": "f"}) == 0.0


def test_arguments_may_be_lines_of_json_and_arrays_of_parquet() -> None:
    truth = {"inputs": ['[1, 2]\n"x"'], "outputs": ['{"x": [1, 2]}'], "fn_name": "f"}
    assert passed("def f(numbers, key): return {key: tuple(numbers)}", truth) == 1.0
    truth = {"inputs": np.array([[1], [2]]), "outputs": np.array([2, 3]), "fn_name": "f"}
    assert passed("def f(n): return n + 1", truth) == 1.0


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a"}, {"2": "a"}, False),
        ([], {}, False),
        (0.1 + 0.2, 0.3, True),
        (3.0, 3, True),
        (3.0000001, 3, False),
        (1e17, 10**17 + 1, False),
        (10**17 + 1, 1e17, True),
        (0, 4.1e-7, False),
        (1e-9, 0.0, True),
        ({1, 2}, [1, 2], False),
        ("3", 3, False),
        (3, "3", False),
        ("ab", ["a", "b"], False),
        (None, [], False),
        (float("nan"), 1.0, False),
        (None, None, True),
    ],
)
def test_values_are_compared_as_json(result: Any, expected: Any, same: bool) -> None:
    assert code._is_same(result, expected) is same


ASSERTS = {"assert_case": ["assert add(1, 2) == 3", "assert add('a', b='b') == 'ab'", "assert add((), (1,)) == (1,)"]}


def test_assertions_are_judged_in_a_sandbox_of_their_own() -> None:
    assert passed("def add(a, b): return a + b", ASSERTS) == 1.0
    assert passed("def add(a, b): return 3", ASSERTS) == pytest.approx(1 / 3)
    assert passed("class E:\n    __eq__ = lambda *_: True\ndef add(a, b): return E()", ASSERTS) == 0.0
    assert passed("import os; os._exit(0)", ASSERTS) == 0.0


def test_tests_may_use_setup_objects_errors_and_functions_of_the_answer() -> None:
    answer = """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def pop(self):
        if not self.items: raise IndexError('empty')
        return self.items.pop()
def apply(function, items): return map(function, items)
def square(n): return n * n
"""
    truth = {
        "setup": "import math\ndef close(a, b): return math.isclose(a, b)",
        "test_list": [
            "s = Stack(1, 2)\nassert s.pop() == 2 and s.items == [1]",
            "try:\n    Stack().pop()\n    assert False\nexcept IndexError as error:\n    assert 'empty' in str(error)",
            "assert close(square(0.1), 0.01)",
            "assert list(apply(square, [1, 2, 3])) == [1, 4, 9]",
        ],
    }
    assert passed(answer, truth) == 1.0


def test_a_check_function_is_given_the_answer() -> None:
    truth = {
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9",
        "entry_point": "f",
    }
    assert passed("def f(n): return n * n", truth) == 1.0
    assert passed("def f(n): return 4", truth) == 0.0


@pytest.mark.parametrize(
    "raised",
    rotate_rest(3, ["StopIteration", "AssertionError", "SystemExit", "KeyboardInterrupt", "GeneratorExit"]),
)
def test_an_exception_of_the_answer_passes_no_test(raised: str) -> None:
    assert passed(f"def f(n): raise {raised}", ["assert all(map(f, [1, 2]))"]) == 0.0


def test_a_test_that_cannot_run_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardError, match=r"f\(lambda.*a function is not a plain value"):
        passed("def f(g): return g()", ["assert f(lambda: 1) == 1"])


def test_an_answer_cannot_make_a_test_invalid() -> None:
    assert passed("def f(x): return object()\ndef g(x): return x", ["assert g(f(1)) == 1"]) == 0.0


def test_an_answer_without_code_is_wrong_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code.sandbox, "run", lambda *_, **__: pytest.fail("ran"))
    assert passed("```python\n```", {"inputs": [""], "outputs": [""]}) == 0.0


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ("no json", "not JSON"),
        ({}, "0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ([], "not a list of assertions"),
        (3, "not a list of assertions"),
        ({"assert_case": ["assert ("]}, "not Python"),
    ],
)
def test_rows_without_tests_are_refused_with_what_was_found(truth: Any, words: str) -> None:
    with pytest.raises(RewardError, match=words) as caught:
        read_tests(truth, "my/source")
    assert "my/source" in str(caught.value)
    assert "assert_case" in str(caught.value)


def test_ground_truth_may_be_json() -> None:
    truth = {"inputs": ["1"], "outputs": ["2"]}
    assert read_tests(json.dumps(truth), "c") == read_tests(truth, "c")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_values_travel_unchanged(value: Any) -> None:
    encoded = json.loads(json.dumps(encode(value, lambda _: pytest.fail("not plain"))))
    back = decode(encoded)
    assert back == value
    assert type(back) is type(value)


def test_subclasses_travel_as_the_plain_values_below_them() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __int__(self) -> int:
            return 7

        __hash__ = int.__hash__

    class Text(str):
        def __str__(self) -> str:
            return "lie"

    def refuse(value: object) -> int:
        raise AssertionError(value)

    encoded = encode([Liar(3), Text("a"), np.int64(4), np.arange(2), iter((1, 2))], refuse)
    liar, text, number, array, items = decode(json.loads(json.dumps(encoded)))
    assert (type(liar), liar, type(text), text, number, array) == (int, 3, str, "a", 4, [0, 1])
    assert list(items) == [1, 2]


kinds = st.sampled_from(["list", "tuple", "set", "dict", "bytes", "iterator", "object", "other"])
leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
shapes = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(kinds, inner, max_size=1), max_leaves=4
)


@settings(max_examples=50)
@given(shapes)
def test_whatever_an_answer_writes_becomes_a_plain_value_or_an_error(encoded: Any) -> None:
    assert code._is_expected_reply(json.dumps(encoded), [], object()) is False
    assert code._is_expected_reply(json.dumps({"value": encoded}), [], object()) is False


async def test_settings_reach_the_scorer_in_its_process() -> None:
    kwargs = {"verl.rewards.scorers.code": {"limits": LIMITS, "partial": True}}
    with RewardPool(RewardFunctionSettings(builtin_kwargs=kwargs)) as pool:
        await pool.start()
        outcome = await pool.score("code", "print(3)", {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})
    assert outcome == Scored(0.5, {"passed": 0.5})


async def test_a_run_does_not_start_without_the_required_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # neither bwrap nor unshare exists
    kwargs = {"verl.rewards.scorers.code": {"require": "namespaces"}}
    with (
        RewardPool(RewardFunctionSettings(builtin_kwargs=kwargs)) as pool,
        pytest.raises(RewardError, match="install the package `bubblewrap`"),
    ):
        await pool.start()
