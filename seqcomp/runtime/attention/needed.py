"""Keys and values that go straight to the ranks whose queries see them, and their gradients back.

At step t rank r sends to r + t what that one needs of its block and gets what it needs from
r - t; nothing is sent where nothing is needed. The next step's keys travel while those of the
current one are computed. In backward the same keys travel again, and the gradients of exactly
these go back to their owner. The transport "allgather" moves the same in one exchange each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seqcomp.layout.travel import Intervals, Travel
from seqcomp.runtime.attention.merge import accumulator_dtype
from seqcomp.runtime.attention.sums import TokenSum
from seqcomp.runtime.comm import Communicator, Pending
from seqcomp.runtime.traffic import Phase

Sums = tuple[TokenSum, TokenSum]


@dataclass(frozen=True)
class Route:
    """Where the keys of one attention go. Every rank of ``comm`` has the same ``travel``."""

    comm: Communicator
    travel: Travel
    gathered: bool
    label: str

    def blocks(self, k: Tensor, v: Tensor, phase: Phase) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(source, K, V) for each rank at whose step anything travels, own block first.

        Of other ranks only what is needed, one interval after the other, maybe nothing. The caller
        takes all blocks, on every rank.
        """
        rank, size = self.comm.rank, self.comm.size
        if self.gathered:
            arrived = self._all_at_once(k, v, phase)
            yield rank, k, v
            for step in self.travel.steps:
                source = (rank - step) % size
                yield source, *_unpacked(arrived[source], (k, v), self._count(rank, source))
            return
        steps = self.travel.steps
        pending = self._start(steps[0], (k, v), phase) if steps else None
        yield rank, k, v
        for index, step in enumerate(steps):
            assert pending is not None
            source = (rank - step) % size
            got = pending.wait()
            if index + 1 < len(steps):
                pending = self._start(steps[index + 1], (k, v), phase)
            empty = k.new_empty(0)
            yield source, *_unpacked(got[0] if got else empty, (k, v), self._count(rank, source))

    def gradients(self, home: Sums, k: Tensor, v: Tensor) -> Returned:
        """Takes what the blocks of a backward give to their keys, in the order of ``blocks``.

        home: dk and dv of this rank's own keys, to which others add.
        """
        return Returned(self, home, k, v)

    def _start(self, step: int, block: tuple[Tensor, Tensor], phase: Phase) -> Pending:
        rank, size = self.comm.rank, self.comm.size
        to, source = (rank + step) % size, (rank - step) % size
        sends = [_packed(block, self.travel.needs[to][rank])] if self._count(to, rank) else []
        receives = [_room(block, n)] if (n := self._count(rank, source)) else []
        return self.comm.start_exchange(
            sends, receives=receives, to=to, source=source, phase=phase, label=self.label
        )

    def _all_at_once(self, k: Tensor, v: Tensor, phase: Phase) -> list[Tensor]:
        rank, others = self.comm.rank, range(self.comm.size)
        nothing = k.new_empty(0)
        sends = [
            nothing if r == rank else _packed((k, v), self.travel.needs[r][rank]) for r in others
        ]
        receives = [nothing if r == rank else _room((k, v), self._count(rank, r)) for r in others]
        self._exchange_all(sends, receives, "all_gather", phase)
        return receives

    def _exchange_all(
        self,
        sends: list[Tensor],
        receives: list[Tensor],
        kind: Literal["all_gather", "reduce_scatter"],
        phase: Phase,
    ) -> None:
        self.comm.exchange_all(sends, receives, kind=kind, phase=phase, label=self.label)

    def _count(self, receiver: int, source: int) -> int:
        return self.travel.count(receiver, source)


class Returned:
    """dK/dV of what came from other ranks, on their way back to the owners."""

    def __init__(self, route: Route, home: Sums, k: Tensor, v: Tensor) -> None:
        self._route = route
        self._like = (k, v)
        self._home = home
        self._arriving: tuple[int, Pending] | None = None
        nothing = k.new_empty(0, dtype=accumulator_dtype(k.dtype))
        self._kept = [nothing] * route.comm.size

    def add(self, source: int, given: tuple[Tensor, Tensor]) -> None:
        """Takes ownership of dk and dv of the keys that arrived from ``source``, another rank."""
        route, comm = self._route, self._route.comm
        far = _flat(given) if route.travel.count(comm.rank, source) else None
        if route.gathered:
            self._kept[source] = self._kept[source] if far is None else far
            return
        taker = (2 * comm.rank - source) % comm.size  # has had this rank's keys at this step
        back = route.travel.count(taker, comm.rank)
        pending = comm.start_exchange(
            [] if far is None else [far],
            receives=[self._room(back)] if back else [],
            to=source,
            source=taker,
            phase="backward",
            label=route.label,
        )
        self._collect()
        self._arriving = (taker, pending)

    def result(self) -> tuple[Tensor, Tensor]:
        """dk and dv of this rank's own keys, what it computed itself included."""
        route, rank = self._route, self._route.comm.rank
        self._collect()
        if route.gathered:
            counts = [route.travel.count(r, rank) for r in range(route.comm.size)]
            counts[rank] = 0
            receives = [self._room(n) for n in counts]
            route._exchange_all(self._kept, receives, "reduce_scatter", "backward")
            for taker, got in enumerate(receives):
                self._take(taker, got)
        dk, dv = (own.result() for own in self._home)
        return dk, dv

    def _collect(self) -> None:
        if self._arriving is not None:
            taker, pending = self._arriving
            for got in pending.wait():
                self._take(taker, got)
            self._arriving = None

    def _take(self, taker: int, got: Tensor) -> None:
        if not len(got):
            return
        runs = self._route.travel.needs[taker][self._route.comm.rank]
        parts = _unpacked(got, self._like, sum(map(len, runs)))
        for home, part in zip(self._home, parts, strict=True):
            start = 0
            for run in runs:
                home.add(run.start, run.stop, part[:, :, start : start + len(run)])
                start += len(run)

    def _room(self, count: int) -> Tensor:
        return _room(self._like, count, accumulator_dtype(self._like[0].dtype))


def _packed(block: tuple[Tensor, Tensor], runs: Intervals) -> Tensor:
    """K, then V, of these keys in one row."""
    row = _room(block, sum(map(len, runs)))
    for x, packed in zip(block, _unpacked(row, block, sum(map(len, runs))), strict=True):
        at = 0
        for run in runs:
            packed[:, :, at : at + len(run)] = x[:, :, run.start : run.stop]
            at += len(run)
    return row


def _flat(pieces: tuple[Tensor, Tensor]) -> Tensor:
    row = pieces[0].new_empty(sum(x.numel() for x in pieces))
    for x, flat in zip(pieces, row.split([x.numel() for x in pieces]), strict=True):
        flat.view(x.shape).copy_(x)
    return row


def _unpacked(row: Tensor, like: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    shapes = [(*x.shape[:2], count, x.shape[3]) for x in like]
    k, v = row.split([_elements(x, count) for x in like])
    return k.view(shapes[0]), v.view(shapes[1])


def _room(like: tuple[Tensor, Tensor], count: int, dtype: torch.dtype | None = None) -> Tensor:
    return like[0].new_empty(sum(_elements(x, count) for x in like), dtype=dtype)


def _elements(x: Tensor, count: int) -> int:
    return x.shape[0] * x.shape[1] * count * x.shape[3]
