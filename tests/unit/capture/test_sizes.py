"""Symbolic sizes: their algebra, and the graph nodes that compute them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Mod

from seqcomp.capture.sizes import (
    BATCH_SYMBOL,
    LENGTH_SYMBOL,
    Size,
    SizeEmitter,
    common,
    divide,
    evaluate,
    expression,
    product,
)

Bs, Ss = BATCH_SYMBOL, LENGTH_SYMBOL
number = st.integers(1, 12).map(sympy.Integer)
atom = st.one_of(number, st.just(Bs), st.just(Ss))
monomial = st.lists(atom, min_size=1, max_size=4).map(product)


def grown(parts: st.SearchStrategy[Size]) -> st.SearchStrategy[Size]:
    pair = st.tuples(parts, parts)
    return st.one_of(
        pair.map(lambda p: p[0] + p[1]),
        pair.map(lambda p: p[0] * p[1]),
        pair.map(lambda p: p[0] + p[1] - 1),
        st.tuples(parts, number).map(lambda p: FloorDiv(p[0], p[1])),
    )


size = st.recursive(atom, grown, max_leaves=6)
relaxed = settings(deadline=None, max_examples=60)
numbers = st.fixed_dictionaries({Bs: st.integers(1, 9), Ss: st.integers(1, 64)})


def emitted(sizes: list[Size]) -> tuple[Callable[[int, int], tuple[int, ...]], torch.fx.Graph]:
    graph = torch.fx.Graph()
    symbols = {Bs: graph.placeholder("b"), Ss: graph.placeholder("s")}
    output = graph.output(())
    emitter = SizeEmitter(graph, symbols)
    output.args = (tuple(emitter.emit(s, output) for s in sizes),)
    graph.lint()
    return torch.fx.GraphModule({}, graph), graph


@relaxed
@given(size, numbers)
def test_emitted_nodes_give_the_size(expr: Size, values: dict[sympy.Symbol, int]) -> None:
    module, _ = emitted([expr])
    assert module(values[Bs], values[Ss]) == (evaluate(expr, values),)


@relaxed
@given(st.lists(size, min_size=1, max_size=5))
def test_equal_sizes_share_their_nodes(sizes: list[Size]) -> None:
    _, once = emitted(sizes)
    _, twice = emitted(sizes + sizes[::-1])
    assert len(once.nodes) == len(twice.nodes)


def test_numbers_need_no_node() -> None:
    module, graph = emitted([sympy.Integer(7), Ss, 2 * Ss - 2 * Ss + 3])
    assert [n for n in graph.nodes if n.op == "call_function"] == []
    assert module(2, 5) == (7, 5, 3)


def test_remainders_and_differences() -> None:
    module, _ = emitted([Mod(Ss, 4), Ss**2 - Ss, (Ss - 1) * Bs, 3 * Bs * Ss])
    assert module(3, 10) == (2, 90, 27, 90)


def test_a_size_of_another_kind_is_named() -> None:
    with pytest.raises(NotImplementedError, match="exp"):
        emitted([sympy.exp(Ss)])


@relaxed
@given(monomial | st.builds(operator.sub, monomial, monomial), monomial, numbers)
def test_division_is_exact_for_every_value(
    total: Size, part: Size, values: dict[sympy.Symbol, int]
) -> None:
    quotient = divide(total, part)
    if quotient is not None:
        assert sympy.expand(quotient * part) == total
        assert evaluate(quotient, values) * evaluate(part, values) == evaluate(total, values)


@relaxed
@given(monomial, monomial)
def test_what_divides_is_found(total: Size, part: Size) -> None:
    whole = sympy.expand(total * part)
    assert divide(whole, part) == total
    assert divide(whole, whole) == 1


@pytest.mark.parametrize(
    ("total", "part"),
    [(Ss, sympy.Integer(2)), (sympy.Integer(6), sympy.Integer(4)), (Bs, Ss), (Ss - 1, Ss),
     (4 * Ss, sympy.Integer(8)), (FloorDiv(Ss, 2), sympy.Integer(2)), (Bs * Ss + 1, Bs),
     (Ss - 1, sympy.Integer(2)), (2 * Ss + 3, sympy.Integer(2))],
)  # fmt: skip
def test_what_divides_for_some_values_only_does_not(total: Size, part: Size) -> None:
    assert divide(sympy.sympify(total), sympy.sympify(part)) is None


@relaxed
@given(monomial, monomial, numbers)
def test_the_common_part_divides_both(
    left: Size, right: Size, values: dict[sympy.Symbol, int]
) -> None:
    shared = common(left, right)
    assert divide(left, shared) is not None
    assert divide(right, shared) is not None
    assert math.gcd(evaluate(left, values), evaluate(right, values)) % evaluate(shared, values) == 0


@relaxed
@given(st.lists(monomial, max_size=4), numbers)
def test_products(sizes: list[Size], values: dict[sympy.Symbol, int]) -> None:
    expected = math.prod(evaluate(s, values) for s in sizes)
    assert evaluate(product(sizes), values) == expected


def test_expressions_speak_of_b_and_s() -> None:
    assert expression(4, {}) == 4
    module = torch.nn.Identity()
    exported = torch.export.export(
        module, (torch.zeros(3, 7),), dynamic_shapes=({1: torch.export.Dim("n")},)
    )
    (node,) = [n for n in exported.graph.nodes if n.op == "placeholder"]
    symbolic = node.meta["val"].shape[1]
    assert expression(symbolic, {symbolic.node.expr: Ss}) == Ss
    assert expression(operator.mul(symbolic, 2) + 1, {symbolic.node.expr: Ss}) == 2 * Ss + 1
