"""Cheap bounds on sympy expressions: how large one would become, and whether two differ at a point.

Checked before anything is evaluated, simplified or solved: 10^10^10 never ends, and neither does the search for a
simplification that does not exist. `limit_cpu_time` ends what these bounds do not catch.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

MAX_BITS = 50_000  # 15,000 digits
MAX_TERMS = 2_000
MAX_NODES = 1_000
# What evaluating an expression raises that has no value, or one that is too large.
_NOT_A_NUMBER = (ArithmeticError, TypeError, ValueError, AttributeError, RecursionError)
_LARGE = 1e18  # above every limit, and its products are still floats


class TooLongError(BaseException):
    """The time of `limit_cpu_time` is used up. Not an Exception, so that no library catches it."""


@contextlib.contextmanager
def limit_cpu_time(seconds: float) -> Iterator[None]:
    """Raise TooLongError inside the block once this thread has computed for `seconds`; works in every thread."""
    thread, done = threading.get_ident(), threading.Event()
    clock = time.pthread_getcpuclockid(thread)
    end = time.clock_gettime(clock) + seconds
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        while not done.wait(0.25):
            if time.clock_gettime(clock) > end:
                raise_in(ctypes.c_ulong(thread), ctypes.py_object(TooLongError))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        raise_in(ctypes.c_ulong(thread), None)  # clear an exception that is pending


def is_too_large(expression: Any) -> bool:
    """Return whether evaluating or expanding an expression could take longer than any reasonable answer needs."""
    return (
        count_nodes(expression) > MAX_NODES or count_bits(expression) > MAX_BITS or count_terms(expression) > MAX_TERMS
    )


def count_nodes(expression: Any) -> int:
    return 1 + sum(map(count_nodes, _children(expression)))


def count_bits(expression: Any) -> float:
    """Return an upper bound, up to 1e18, on the bits of its value and intermediate values; a symbol has one bit."""
    if getattr(expression, "is_Rational", False):
        return float(max(1, abs(expression.p).bit_length()) + expression.q.bit_length() - 1)
    if getattr(expression, "is_Float", False):
        return abs(math.frexp(expression)[1]) if abs(expression) < 1e300 and abs(expression) > 1e-300 else _LARGE
    inner = [count_bits(child) for child in _children(expression)]
    if not inner:
        return 1.0
    match type(expression).__name__:
        case "Add":
            size = max(inner) + len(inner)
        case "Mul":
            size = sum(inner)
        case "Pow":
            size = inner[0] * max(1.0, _bound_value(expression.exp, inner[1]))
        case "exp":
            size = 2 * _bound_value(expression.args[0], inner[0])
        case "factorial" | "factorial2" | "gamma" | "binomial":
            size = inner[0] * max(1.0, _bound_value(expression.args[0], inner[0]))
        case "Product":
            size = inner[0] * _bound_value(None, max(inner[1:]))
        case _:
            size = max(inner) + 1
    return min(size, _LARGE)


def count_terms(expression: Any) -> float:
    """Return the number of terms, up to 1e18, after expansion."""
    inner = [count_terms(child) for child in _children(expression)]
    match type(expression).__name__:
        case "Add":
            size = sum(inner)
        case "Mul":
            size = math.prod(inner)
        case "Pow" if inner[0] > 1 and expression.exp.is_Integer:
            power = min(abs(int(expression.exp)), 10_000)
            size = math.comb(int(min(inner[0], 1_000)) + power - 1, power)
        case _:
            size = max(inner, default=1)
    return min(size, _LARGE)


def differ_at_a_point(one: Any, other: Any) -> bool:
    """Return whether the values of two expressions at one point differ by more than rounding errors.

    An assignment like x = 5 counts as its value. Pairs and intervals differ if an element does. Relations
    differ if their symbols do, or if only one is an equation. False for a single symbol, which may be a word, and for
    sets and matrices.
    """
    if getattr(one, "is_Relational", False) and getattr(other, "is_Relational", False):
        return _symbol_names(one) != _symbol_names(other) or (one.rel_op == "==") != (other.rel_op == "==")
    one, other = _right_side(one), _right_side(other)
    if type(one) is type(other) and type(one).__name__ in ("Tuple", "Interval") and len(one.args) == len(other.args):
        return any(map(differ_at_a_point, one.args, other.args))
    if not all(getattr(each, "is_scalar", False) and not each.is_Symbol for each in (one, other)):
        return False
    try:
        first, second = (_evaluate(each, sorted(_symbol_names(one) | _symbol_names(other))) for each in (one, other))
        return abs(first - second) > 1e-3 * max(abs(first), abs(second))
    except _NOT_A_NUMBER:
        return False


def is_contradiction(expression: Any) -> bool:
    """Return whether it contains an equation that no value solves, such as 4 = 5 or x + 1 = x + 2."""
    if not getattr(expression, "is_Equality", False):
        return type(expression).__name__ == "And" and any(map(is_contradiction, _children(expression)))
    try:
        names = sorted(_symbol_names(expression))
        one, other = (_evaluate(expression.lhs, names, at) - _evaluate(expression.rhs, names, at) for at in (1.0, 2.7))
        return abs(one) > 1e-6 and abs(one - other) < 1e-9
    except _NOT_A_NUMBER:
        return False


def _right_side(expression: Any) -> Any:
    is_assignment = getattr(expression, "is_Equality", False) and expression.lhs.is_Symbol
    return expression.rhs if is_assignment else expression


def _evaluate(expression: Any, names: list[str], scale: float = 1.0) -> complex:
    """Return its value at a point where each symbol has another value, all of them multiplied by `scale`."""
    point = {symbol: scale * (0.7390851 + 0.1234567 * names.index(symbol.name)) for symbol in expression.free_symbols}
    return complex(expression.evalf(15, subs=point))


def _symbol_names(expression: Any) -> set[str]:
    return {symbol.name for symbol in expression.free_symbols}


def _children(expression: Any) -> tuple[Any, ...]:
    return getattr(expression, "args", ()) or ()


def _bound_value(expression: Any, size: float) -> float:
    """Return an upper bound on an absolute value: exact for a number, else from its bits."""
    if getattr(expression, "is_Rational", False) and size < 64:
        return abs(float(expression))
    return 2.0 ** min(size, 60)
