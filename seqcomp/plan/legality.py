"""Which degrees and lengths are legal: integer formulas, one function each.

The rules use them to refuse and to say what would be legal; the strategies to state what
they need. h = query heads, kv = KV heads, both per tensor rank.
"""

from __future__ import annotations

import math


def heads_fit(degree: int, heads: int) -> bool:
    """Whole query heads per rank."""
    return heads % degree == 0


def kv_heads_fit(degree: int, kv_heads: int) -> bool:
    """Whole KV heads per rank, or every KV head on a whole number of ranks."""
    return kv_heads % degree == 0 or degree % kv_heads == 0


def head_degrees(heads: int, kv_heads: int) -> tuple[int, ...]:
    """All degrees by which attention can be split by heads, ascending.

    >>> head_degrees(32, 8)
    (1, 2, 4, 8, 16, 32)
    >>> head_degrees(12, 4)
    (1, 2, 4, 12)
    """
    return tuple(p for p in divisors(heads) if kv_heads_fit(p, kv_heads))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    high = [number // n for n in reversed(low) if n * n != number]
    return (*low, *high)


def length_factor(layout: str, ring: int, inner: int) -> int:
    """Legal lengths are the multiples of this; ``inner`` = ulysses * tensor.

    ring*inner, for zigzag ring*lcm(2, inner). With ring = 1 every layout is the same.
    """
    return ring * (math.lcm(2, inner) if layout == "zigzag" and ring > 1 else inner)


def nearest_lengths(length: int, factor: int) -> tuple[int, ...]:
    """The legal lengths next to ``length``, ascending (only the upper one below ``factor``)."""
    below = length // factor * factor
    candidates = (below,) if below == length else (below, below + factor)
    return tuple(value for value in candidates if value > 0)


def kv_copies(degree: int, kv_heads: int) -> int:
    """How many ranks hold each KV head when attention is split by heads."""
    return max(1, degree // kv_heads)
