"""Documents packed into one sequence: attention stays within each of them."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from seqcomp.layout.bands import PLAIN, BandCut
from seqcomp.layout.masks import Causal, Mask
from seqcomp.layout.tiles import TileTask

T = TypeVar("T")


@dataclass(frozen=True)
class Documents(Mask):
    """``rule`` between tokens of one document; documents of ``lengths`` follow each other."""

    lengths: tuple[int, ...]
    rule: Mask = field(default_factory=Causal)
    _known: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each begins, and where the last ends."""
        return tuple(itertools.accumulate(self.lengths, initial=0))

    @property
    def length(self) -> int:
        """Of all together."""
        return self.starts[-1]

    def number(self, position: int) -> int:
        """Of the document that a position is in."""
        return bisect_right(self.starts, position) - 1

    def visible(self, q: Any, k: Any) -> Any:
        same = sum((q >= start) * 1 for start in self.starts) == sum(
            (k >= start) * 1 for start in self.starts
        )
        return self.rule.visible(q, k) & same

    def split(self, q: range, k: range, cut: BandCut = PLAIN) -> list[TileTask]:
        return [
            task.moved(q_offset, k_offset)
            for (q_offset, own), (k_offset, keys) in self._shared(q, k)
            for task in self.rule.split(own, keys, cut)
        ]

    def shared(self, q: range, k: range) -> Iterator[tuple[range, range]]:
        """Queries and keys of each document that has some of both, ascending."""
        for (_, own), (_, keys) in self._shared(q, k):
            yield own, keys

    def under(self, rule: Mask) -> Documents:
        """The same documents under another rule; what is known of it is kept here."""
        if rule == self.rule:
            return self
        return self.once(("under", rule), lambda: replace(self, rule=rule, _known={}))

    def of_length(self, length: int) -> Documents:
        """The first tokens of it, or as much more of the last document."""
        if length == self.length:
            return self
        return self.once(("length", length), lambda: self._of_length(length))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gives for ``key``, made the first time: it takes long for many documents
        and is asked for again and again."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def __str__(self) -> str:
        """As `lengths_of` reads them."""
        runs = ((n, len(list(run))) for n, run in itertools.groupby(self.lengths))
        return ",".join(f"{n}x{count}" if count > 1 else f"{n}" for n, count in runs)

    def _shared(self, q: range, k: range) -> Iterator[tuple[tuple[int, range], tuple[int, range]]]:
        """With where each part begins in q and in k."""
        index = self.number(q.start) if len(q) else len(self.lengths)
        at = 0
        while at < len(q):
            start, stop = self.starts[index], self.starts[index + 1]
            end = _count_below(q, stop)
            first, last = _count_below(k, start), _count_below(k, stop)
            if end > at and last > first:
                yield (at, q[at:end]), (first, k[first:last])
            at, index = end, index + 1

    def _of_length(self, length: int) -> Documents:
        kept = min(self.number(length - 1) + 1, len(self.lengths))
        last = length - self.starts[kept - 1]
        return Documents((*self.lengths[: kept - 1], last), self.rule)


def _count_below(positions: range, limit: int) -> int:
    return min(len(positions), max(0, -(-(limit - positions.start) // positions.step)))


def counted(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """(length, how many documents have it)."""
    return sorted(Counter(lengths).items())


def lengths_of(text: str) -> tuple[int, ...]:
    """``4096,8192`` or, of many equal ones, ``4096x32``; ValueError for anything else."""
    found: list[int] = []
    for word in text.split(","):
        read = _WORD.fullmatch(word.strip())
        if read is None:
            raise ValueError(text)
        length, count = int(read[1]), int(read[2] or 1)
        if length < 1 or not 1 <= count <= MOST - len(found):
            raise ValueError(text)
        found += [length] * count
    return tuple(found)


_WORD = re.compile(r"(\d{1,16})(?:x(\d{1,16}))?", re.ASCII)
MOST = 1 << 20
"""Documents of one sequence."""
