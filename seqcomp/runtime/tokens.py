"""Where the tokens of one tensor dim live: between the global order and the ranks' shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.traffic import Phase


class Tokens:
    """Moves one dim of a tensor; ``x`` is global, or this rank's shard with ``local``.

    A global length that the layout does not take is padded to ``padded`` on the way to the ranks,
    and ``length`` on the way back says how long it was. The padding stands at the end: copies of
    the last token, so that whatever is finite for tokens is for them, or zeros for cotangents.
    """

    def __init__(
        self,
        x: Tensor,
        dim: int,
        comm: Communicator,
        layout: SequenceLayout | None,
        label: str,
        *,
        local: bool = False,
        padded: int | None = None,
        length: int | None = None,
    ) -> None:
        self.dim = dim % x.dim()
        self.comm = comm
        self.label = label
        self.layout = layout or SequenceLayout("contiguous", comm.size)
        assert self.layout.size == comm.size, f"{self.layout} over {comm.size} ranks"
        given = x.shape[self.dim] * (comm.size if local else 1)
        self.length = given if padded is None else padded
        self.real = given if length is None else length
        assert self.real <= self.length, f"{self.real} tokens in {self.length}"

    def take(self, x: Tensor, rank: int | None = None, *, zeros: bool = False) -> Tensor:
        """A rank's tokens of a global tensor, as a new tensor."""
        x = self._extended(x, zeros)
        pieces = [x[self._at(part)] for part in self._ranges(rank)]
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(pieces, self.dim)

    def put(self, target: Tensor, x: Tensor, rank: int | None = None) -> None:
        """Write a rank's tokens to their places in a global tensor."""
        start = 0
        for part in self._ranges(rank):
            target[self._at(part)] = x.narrow(self.dim, start, len(part))
            start += len(part)

    def scattered(self, x: Tensor) -> Tensor:
        """Shard [..., s/P, ...] -> zeros [..., s, ...] with the shard in its places."""
        out = x.new_zeros(self._shape(x, self.length))
        self.put(out, x)
        return self._shortened(out)

    def blocks(self, x: Tensor, *, zeros: bool = False) -> Tensor:
        """Global [..., s, ...] -> [P, ..., s/P, ...], one row for each rank."""
        x = self._extended(x, zeros)
        size = self.comm.size
        if self._is_flat(x):
            return x.reshape(size, *self._shape(x, self.length // size))
        out = x.new_empty((size, *self._shape(x, self.length // size)))
        for rank in range(size):
            start = 0
            for part in self._ranges(rank):
                out[rank].narrow(self.dim, start, len(part)).copy_(x[self._at(part)])
                start += len(part)
        return out

    def gathered(self, x: Tensor, phase: Phase) -> Tensor:
        """One all-gather, then every shard in its places."""
        return self.start_gathered(x, phase)()

    def start_gathered(self, x: Tensor, phase: Phase) -> Callable[[], Tensor]:
        """``gathered``, whose result is asked for later; ``x`` must not change before."""
        pending = self.comm.start_all_gather(x, phase=phase, label=self.label)

        def finish() -> Tensor:
            (rows,) = pending.wait()
            shape = self._shape(x, self.length)
            if self._is_flat(x):
                return self._shortened(rows.reshape(shape))
            out = x.new_empty(shape)
            for rank, row in enumerate(rows):
                self.put(out, row, rank)
            return self._shortened(out)

        return finish

    def _extended(self, x: Tensor, zeros: bool) -> Tensor:
        missing = self.length - self.real
        if not missing:
            return x
        last = x.narrow(self.dim, self.real - 1, 1)
        more = last.new_zeros(()) if zeros else last
        return torch.cat([x, more.expand(self._shape(x, missing))], self.dim)

    def _shortened(self, x: Tensor) -> Tensor:
        if self.length == self.real:
            return x
        return x.narrow(self.dim, 0, self.real).contiguous()

    def _is_flat(self, x: Tensor) -> bool:
        """Whether the ranks' shards lie in memory one after the other."""
        return self.layout.is_identity and all(n == 1 for n in x.shape[: self.dim])

    def _ranges(self, rank: int | None) -> tuple[range, ...]:
        return self.layout.ranges(self.length, self.comm.rank if rank is None else rank)

    def _at(self, part: range) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(part.start, part.stop, part.step),)

    def _shape(self, x: Tensor, length: int) -> tuple[int, ...]:
        return (*x.shape[: self.dim], length, *x.shape[self.dim + 1 :])
