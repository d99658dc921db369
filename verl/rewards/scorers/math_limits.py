"""What can be told of sympy expressions cheaply: how large one would become, and whether two differ at a point.

Asked before anything is computed, simplified or solved, because 10^10^10 never ends, and neither does the search for a
simplification that is not there.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["bits", "is_immense", "nodes", "plainly_differ", "terms"]

MOST_BITS = 50_000  # 15,000 digits
MOST_TERMS = 2_000
MOST_NODES = 1_000
_LARGE = 1e18  # beyond every limit, and its products are still floats


def is_immense(expression: Any) -> bool:
    """Whether computing or multiplying it out could take longer than any honest answer deserves."""
    return nodes(expression) > MOST_NODES or bits(expression) > MOST_BITS or terms(expression) > MOST_TERMS


def nodes(expression: Any) -> int:
    """The number of nodes of the tree."""
    return 1 + sum(map(nodes, _children(expression)))


def bits(expression: Any) -> float:
    """An upper bound, up to 1e18, on the bits of the values on the way; a symbol counts as one bit.

    >>> bits(sympy.Pow(10, sympy.Pow(10, 10, evaluate=False), evaluate=False)) > 1e9
    True
    """
    if getattr(expression, "is_Rational", False):
        return float(max(1, abs(expression.p).bit_length()) + expression.q.bit_length() - 1)
    if getattr(expression, "is_Float", False):
        return abs(math.frexp(expression)[1]) if abs(expression) < 1e300 and abs(expression) > 1e-300 else _LARGE
    inner = [bits(child) for child in _children(expression)]
    if not inner:
        return 1.0
    match type(expression).__name__:
        case "Add":
            size = max(inner) + len(inner)
        case "Mul":
            size = sum(inner)
        case "Pow":
            size = inner[0] * max(1.0, _value(expression.exp, inner[1]))
        case "exp":
            size = 2 * _value(expression.args[0], inner[0])
        case "factorial" | "factorial2" | "gamma" | "binomial":
            size = inner[0] * max(1.0, _value(expression.args[0], inner[0]))
        case "Product":
            size = inner[0] * _value(None, max(inner[1:]))
        case _:
            size = max(inner) + 1
    return min(size, _LARGE)


def terms(expression: Any) -> float:
    """The number of terms, up to 1e18, after everything is multiplied out.

    >>> terms((x + 1) ** 3 * (y + 1))
    8
    """
    inner = [terms(child) for child in _children(expression)]
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


def plainly_differ(one: Any, other: Any) -> bool:
    """Whether the values of two expressions at one point differ by more than rounding explains.

    Left out are a single symbol, which may be a word, and what has no value: sets and matrices. Relations differ
    plainly if they are in other symbols, or if one is an equation and the other not.

    >>> plainly_differ(sympy.sin(x) ** 2, 1 - sympy.cos(x) ** 2), plainly_differ(x + 1, x + 2)
    (False, True)
    """
    if getattr(one, "is_Relational", False) and getattr(other, "is_Relational", False):
        return _names(one) != _names(other) or (one.rel_op == "==") != (other.rel_op == "==")
    if not all(getattr(each, "is_scalar", False) and not each.is_Symbol for each in (one, other)):
        return False
    symbols = one.free_symbols | other.free_symbols
    names = sorted(_names(one) | _names(other))
    point = {symbol: 0.7390851 + 0.1234567 * names.index(symbol.name) for symbol in symbols}
    try:
        here, there = (complex(each.evalf(15, subs=point)) for each in (one, other))
        return abs(here - there) > 1e-3 * max(abs(here), abs(there))
    except (ArithmeticError, TypeError, ValueError, AttributeError, RecursionError):  # no number, or beyond all floats
        return False


def _names(expression: Any) -> set[str]:
    return {symbol.name for symbol in expression.free_symbols}


def _children(expression: Any) -> tuple[Any, ...]:
    return getattr(expression, "args", ()) or ()


def _value(expression: Any, size: float) -> float:
    """An upper bound on an absolute value: exact for a number, else by its bits."""
    if getattr(expression, "is_Rational", False) and size < 64:
        return abs(float(expression))
    return 2.0 ** min(size, 60)
