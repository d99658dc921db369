"""Bounds on the values of expressions, and their comparison at a point."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rewards.scorers.math_limits import MAX_BITS, count_bits, differ_at_a_point

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

X, Y, Z = sympy.symbols("x y z")


def power(base: object, exponent: object) -> sympy.Expr:
    return sympy.Pow(base, exponent, evaluate=False)


def expressions() -> st.SearchStrategy[sympy.Expr]:
    def grown(inner: st.SearchStrategy[sympy.Expr]) -> st.SearchStrategy[sympy.Expr]:
        pairs = st.tuples(inner, inner)
        return (
            pairs.map(lambda pair: sympy.Add(*pair, evaluate=False))
            | pairs.map(lambda pair: sympy.Mul(*pair, evaluate=False))
            | st.tuples(inner, st.integers(0, 5)).map(lambda pair: power(*pair))
            | st.integers(0, 12).map(lambda number: sympy.factorial(number, evaluate=False))
        )

    return st.recursive(st.integers(-1000, 1000).map(sympy.Integer), grown, max_leaves=5)


@settings(deadline=None, max_examples=30)
@given(expressions())
def test_no_value_has_more_bits_than_its_bound(expression: sympy.Expr) -> None:
    assert abs(int(expression.doit())).bit_length() <= count_bits(expression)


def test_towers_are_too_large_and_usual_answers_are_not() -> None:
    for large in (
        power(10, power(10, 10)),
        power(power(2, 1000), 1000),
        sympy.factorial(10**6, evaluate=False),
        sympy.exp(sympy.Integer(10) ** 9, evaluate=False),
        sympy.Product(X, (X, 1, 10**7)),
    ):
        assert count_bits(large) > MAX_BITS
    for modest in (power(2016, 2016), power(X + 1, 100), sympy.sqrt(sympy.sqrt(2) + 1), sympy.Float("1e30"), X / Y):
        assert count_bits(modest) <= MAX_BITS


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=4), st.integers(1, 5))
def test_equal_expressions_never_differ_at_a_point_and_a_shift_does(coefficients: list[int], shift: int) -> None:
    one = sum((c * (X + Y) ** n for n, c in enumerate(coefficients)), start=X**7 * Y)
    assert not differ_at_a_point(one, sympy.expand(one))
    assert differ_at_a_point(one, one + shift)


def test_only_numbers_can_differ_at_a_point() -> None:
    assert differ_at_a_point(sympy.Integer(41), sympy.Integer(42))
    assert not differ_at_a_point(sympy.Float("0.3333"), sympy.Rational(1, 3))
    assert differ_at_a_point(X + 1, Y + 1)
    assert not differ_at_a_point(X + 1, sympy.Symbol("x", real=True) + 1)
    assert not differ_at_a_point(sympy.Symbol("xy"), X * Y)
    assert not differ_at_a_point(sympy.Function("f")(X), X)
    assert not differ_at_a_point(sympy.nan, sympy.Integer(1))
    assert not differ_at_a_point(sympy.oo, sympy.Integer(1))
    assert not differ_at_a_point(power(10, 1000), sympy.Integer(1))
    assert not differ_at_a_point(sympy.FiniteSet(1), sympy.FiniteSet(2))


def test_relations_differ_by_their_symbols_and_their_kind() -> None:
    assert differ_at_a_point(sympy.Eq(X, 1), sympy.Eq(Y, 1))
    assert differ_at_a_point(sympy.Eq(X, 1), sympy.Lt(X, 1))
    assert not differ_at_a_point(sympy.Eq(X, 1), sympy.Eq(2 * X, 3))
    assert not differ_at_a_point(sympy.Eq(Y, 2 * X + 1), sympy.Eq(X, (Y - 1) / 2))
    assert not differ_at_a_point(sympy.Lt(X, 1), sympy.Gt(1, X))
    assert not differ_at_a_point(sympy.Eq(X, 1), sympy.Integer(1))
