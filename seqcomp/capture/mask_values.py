"""The little algebra that mask subgraphs are read into: affine functions and conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy


@dataclass(frozen=True)
class Affine:
    """value[i0, i1, ...] = const + sum(coeffs[d] * i_d)."""

    coeffs: tuple[int, ...]
    const: sympy.Expr = sympy.S.Zero


@dataclass(frozen=True)
class AtLeastZero:
    """True where the affine function is >= 0."""

    form: Affine


@dataclass(frozen=True)
class Truth:
    """A conjunction of conditions; an empty one is true everywhere, `never` nowhere."""

    terms: frozenset[AtLeastZero] = frozenset()
    never: bool = False


@dataclass(frozen=True)
class Choice:
    """`yes` where the condition holds, `no` elsewhere: a floating, additive mask."""

    condition: Truth
    yes: float
    no: float


Value = Affine | Truth | Choice


def map_coeffs(value: Value | None, change: Callable[[Any], tuple[int, ...]]) -> Value | None:
    if isinstance(value, Affine):
        return replace(value, coeffs=change(value.coeffs))
    if isinstance(value, Truth):
        terms = (AtLeastZero(replace(t.form, coeffs=change(t.form.coeffs))) for t in value.terms)
        return Truth(frozenset(terms), value.never)
    if isinstance(value, Choice):
        inner = map_coeffs(value.condition, change)
        assert isinstance(inner, Truth)
        return replace(value, condition=inner)
    return None


def shift(value: Value | None, dim: int, start: sympy.Expr) -> Value | None:
    def move(form: Affine) -> Affine:
        return replace(form, const=sympy.expand(form.const + form.coeffs[dim] * start))

    if isinstance(value, Affine):
        return move(value)
    if isinstance(value, Truth):
        return Truth(frozenset(AtLeastZero(move(t.form)) for t in value.terms), value.never)
    if isinstance(value, Choice):
        inner = shift(value.condition, dim, start)
        assert isinstance(inner, Truth)
        return replace(value, condition=inner)
    return None


def without(coeffs: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return tuple(0 if i == dim else c for i, c in enumerate(coeffs))


def combine(left: Affine, right: Affine, sign: int) -> Affine:
    return Affine(
        tuple(a + sign * b for a, b in zip(left.coeffs, right.coeffs, strict=True)),
        sympy.expand(left.const + sign * right.const),
    )


def scale(form: Affine, factor: int) -> Affine:
    return Affine(tuple(c * factor for c in form.coeffs), sympy.expand(form.const * factor))


def minus(form: Affine, gap: int) -> Affine:
    negative = scale(form, -1)
    return replace(negative, const=negative.const - gap)


def add_choices(left: Choice, right: Choice) -> Choice | None:
    if left.yes == left.no:
        return replace(right, yes=right.yes + left.yes, no=right.no + left.yes)
    if right.yes == right.no:
        return add_choices(right, left)
    return None


def negate(value: Truth) -> Truth | None:
    if value.never:
        return Truth()
    if not value.terms:
        return Truth(never=True)
    if len(value.terms) == 1:
        form = next(iter(value.terms)).form
        return Truth(frozenset({AtLeastZero(minus(form, 1))}))
    return None


def nonzero(value: Value) -> Value | None:
    if isinstance(value, Truth):
        return value
    if isinstance(value, Choice):
        yes, no = bool(value.yes), bool(value.no)
        if yes and not no:
            return value.condition
        if no and not yes:
            return negate(value.condition)
        return Truth(never=not yes)
    return None
