"""Counts the bytes that a rank sends, so that predictions can be held against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class TrafficRow:
    """Calls of one kind on one group from one place, and the logical payload that left the rank.

    ``kind`` is all_gather, reduce_scatter, all_to_all, all_reduce or p2p; ``axis`` the mesh axes
    of the group joined with "+". The rank's own part of a collective is not counted.
    """

    kind: str
    axis: str
    count: int
    bytes_sent: int
    phase: Phase
    label: str


class Traffic:
    """The counter of one rank; every communicator of a context adds to the same one.

    ``again``: what is sent now is sent because a backward runs a part of the forward again, and
    counts as backward.
    """

    def __init__(self) -> None:
        self.again = False
        self._totals: dict[tuple[str, str, Phase, str], tuple[int, int]] = {}

    def add(self, kind: str, axis: str, bytes_sent: int, phase: Phase, label: str) -> None:
        key = (kind, axis, "backward" if self.again else phase, label)
        count, total = self._totals.get(key, (0, 0))
        self._totals[key] = (count + 1, total + bytes_sent)

    def rows(self) -> list[TrafficRow]:
        """One row per (kind, axis, phase, label), in the order of their first use."""
        return [
            TrafficRow(kind, axis, count, total, phase, label)
            for (kind, axis, phase, label), (count, total) in self._totals.items()
        ]

    def bytes(
        self, axis: str | None = None, phase: Phase | None = None, kind: str | None = None
    ) -> int:
        """Bytes sent, over the rows that match every given value."""
        return sum(
            row.bytes_sent
            for row in self.rows()
            if axis in (None, row.axis) and phase in (None, row.phase) and kind in (None, row.kind)
        )

    def reset(self) -> None:
        self._totals.clear()
