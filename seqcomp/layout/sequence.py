"""Sequence layouts: which global token positions each rank holds.

Ranks are nested: rank = ring_rank * inner + inner_rank, where ``inner`` is the product of the
axes that split a ring rank's tokens evenly (ulysses, tensor). The ring degree alone decides how
the sequence is dealt out:

* contiguous: ring rank i owns the i-th of r equal chunks;
* zigzag: the sequence is cut in 2r chunks, ring rank i owns chunks i and 2r-1-i, so that every
  ring rank has the same causal work (Zhu, ring-flash-attention, 2024);
* striped: token j lives on ring rank j mod r (Brandon et al., Striped Attention, 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["contiguous", "zigzag", "striped"]


@dataclass(frozen=True)
class SequenceLayout:
    """A layout for ``ring`` x ``inner`` ranks; lengths are in tokens.

    Methods that take a length raise ValueError when it is not a positive multiple of ``factor``
    (plans are checked before, so this is a bug of the caller), and IndexError for a rank that
    does not exist.
    """

    kind: Layout
    ring: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("contiguous", "zigzag", "striped"):
            raise ValueError(f"unknown layout {self.kind!r}")
        if self.ring < 1 or self.inner < 1:
            raise ValueError(f"degrees must be >= 1, found ring={self.ring}, inner={self.inner}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ring * self.inner

    @property
    def factor(self) -> int:
        """Every legal length is a multiple of this."""
        return self.ring * (math.lcm(2, self.inner) if self.kind == "zigzag" else self.inner)

    @property
    def is_identity(self) -> bool:
        """True when the concatenation over the ranks is the sequence in its own order."""
        return self.kind == "contiguous" or self.ring == 1

    def nearest(self, length: int) -> tuple[int, int]:
        """The nearest legal lengths <= and >= ``length``; the lower is 0 where there is none."""
        below = length // self.factor * self.factor
        return below, max(self.factor, below if below == length else below + self.factor)

    def padded(self, length: int) -> int:
        """The smallest legal length that holds ``length`` tokens; the rest stands at the end."""
        return self.nearest(length)[1]

    def ring_ranges(self, length: int, ring_rank: int) -> tuple[range, ...]:
        """Global positions of all tokens of a ring rank, ascending, in as few ranges as possible.

        The concatenation of its inner ranks' tokens: what attention sees after the Ulysses
        exchange.
        """
        self._check(length)
        if not 0 <= ring_rank < self.ring:
            raise IndexError(f"ring rank {ring_rank} of {self.ring}")
        if self.kind == "striped":
            return (range(ring_rank, length, self.ring),)
        if self.kind == "contiguous":
            chunk = length // self.ring
            return (range(ring_rank * chunk, (ring_rank + 1) * chunk),)
        chunk = length // (2 * self.ring)
        late = 2 * self.ring - 1 - ring_rank
        return merge_adjacent(
            (
                range(ring_rank * chunk, (ring_rank + 1) * chunk),
                range(late * chunk, (late + 1) * chunk),
            )
        )

    def ranges(self, length: int, rank: int) -> tuple[range, ...]:
        """Global positions held by the nested ``rank``, in local order (striped: step = ring)."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} of {self.size}")
        ring_rank, inner_rank = divmod(rank, self.inner)
        owned = self.ring_ranges(length, ring_rank)
        local = length // self.size
        return slice_ranges(owned, inner_rank * local, (inner_rank + 1) * local)

    def token_index(self, length: int, rank: int) -> list[int]:
        """The positions of ``ranges`` one by one; ``length / size`` of them."""
        return [position for part in self.ranges(length, rank) for position in part]

    def permutation(self, length: int) -> list[int]:
        """Global position of every token in the concatenation over all ranks."""
        return [p for r in range(self.ring) for part in self.ring_ranges(length, r) for p in part]

    def inverse(self, length: int) -> list[int]:
        """Where each global position sits in the concatenation over all ranks."""
        inverse = [0] * length
        for place, position in enumerate(self.permutation(length)):
            inverse[position] = place
        return inverse

    def _check(self, length: int) -> None:
        if length < 1 or length % self.factor:
            raise ValueError(f"length {length} is not a positive multiple of {self.factor}")


def slice_ranges(ranges: Sequence[range], start: int, stop: int) -> tuple[range, ...]:
    """Elements [start, stop) of the concatenation of ``ranges``, as non-empty ranges."""
    parts: list[range] = []
    offset = 0
    for part in ranges:
        piece = part[max(start - offset, 0) : max(stop - offset, 0)]
        if len(piece):
            parts.append(piece)
        offset += len(part)
    return tuple(parts)


def merge_adjacent(ranges: Sequence[range]) -> tuple[range, ...]:
    """Join each range with the one it continues (same step); empty ranges vanish."""
    merged: list[range] = []
    for part in ranges:
        if not len(part):
            continue
        last = merged[-1] if merged else None
        if last is not None and last.step == part.step and last[-1] + last.step == part.start:
            merged[-1] = range(last.start, part.stop, last.step)
        else:
            merged.append(part)
    return tuple(merged)
