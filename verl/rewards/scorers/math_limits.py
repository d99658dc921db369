"""Limits on sympy expressions: the CPU time that is spent on one, the size of its value, and a quick comparison.

`limit_cpu_time` cannot interrupt arithmetic on large integers, which is C code, so 10^10^10 must not be evaluated.
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
_LARGE = 1e18  # above every limit, and its products are still floats
_NOT_A_NUMBER = (ArithmeticError, TypeError, ValueError, AttributeError, RecursionError)  # no value, or too large


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


def count_bits(expression: Any) -> float:
    """Return an upper bound, up to 1e18, on the bits of its value and intermediate values; a symbol has one bit."""
    if getattr(expression, "is_Rational", False):
        return float(max(1, abs(expression.p).bit_length()) + expression.q.bit_length() - 1)
    if getattr(expression, "is_Float", False):
        return abs(math.frexp(expression)[1]) if abs(expression) < 1e300 and abs(expression) > 1e-300 else _LARGE
    inner = [count_bits(child) for child in getattr(expression, "args", ())]
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


def differ_at_a_point(one: Any, other: Any) -> bool:
    """Return whether two expressions differ at one point, which is quicker than a search for a simplification.

    An assignment like x = 5 counts as its value. Pairs and intervals differ if an element does. Relations differ if
    their symbols do, or if only one is an equation. False for a single symbol, which may be a word, and for sets and
    matrices.
    """
    if getattr(one, "is_Relational", False) and getattr(other, "is_Relational", False):
        return _symbol_names(one) != _symbol_names(other) or (one.rel_op == "==") != (other.rel_op == "==")
    one, other = (each.rhs if _is_assignment(each) else each for each in (one, other))
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
        return type(expression).__name__ == "And" and any(map(is_contradiction, expression.args))
    try:
        names = sorted(_symbol_names(expression))
        one, other = (_evaluate(expression.lhs, names, at) - _evaluate(expression.rhs, names, at) for at in (1.0, 2.7))
        return abs(one) > 1e-6 and abs(one - other) < 1e-9
    except _NOT_A_NUMBER:
        return False


def _is_assignment(expression: Any) -> bool:
    return getattr(expression, "is_Equality", False) and expression.lhs.is_Symbol


def _evaluate(expression: Any, names: list[str], scale: float = 1.0) -> complex:
    """Return its value at a point where each symbol has another value, all of them multiplied by `scale`."""
    point = {symbol: scale * (0.7390851 + 0.1234567 * names.index(symbol.name)) for symbol in expression.free_symbols}
    return complex(expression.evalf(15, subs=point))


def _symbol_names(expression: Any) -> set[str]:
    return {symbol.name for symbol in expression.free_symbols}


def _bound_value(expression: Any, size: float) -> float:
    """Return an upper bound on an absolute value: exact for a number, else from its bits."""
    if getattr(expression, "is_Rational", False) and size < 64:
        return abs(float(expression))
    return 2.0 ** min(size, 60)
