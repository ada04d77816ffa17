"""Which tokens of an accumulator nothing has been added to: the first part is copied there.

It need not be set to zeros before, nor read: memory is slower than the sum.
"""

from __future__ import annotations


class Untouched:
    """Tokens of `count` that no part has covered, as ascending disjoint ranges."""

    def __init__(self, count: int) -> None:
        self.ranges = [range(count)] if count else []

    def take(self, start: int, stop: int) -> list[range]:
        """Those of [start, stop), which are touched from now on."""
        taken, left = [], []
        for own in self.ranges:
            low, high = max(own.start, start), min(own.stop, stop)
            if low >= high:
                left.append(own)
                continue
            taken.append(range(low, high))
            left += [r for r in (range(own.start, low), range(high, own.stop)) if r]
        self.ranges = left
        return taken
