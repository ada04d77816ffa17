"""Ring attention: queries stay, keys and values go round (Liu et al., Ring Attention, 2023).

Rank i holds the block of rank i - t at step t. K and V make P - 1 hops, in forward and again in
backward. The gradients of a block make P - 1 hops too: what its owner computes stays at home, the
travelling accumulator starts one rank further and ends at the owner. Every hop hides
behind computation: half of a rank's own block is computed last in backward, behind the last hop.
The transport "allgather" replaces the hops by one all-gather of K and V and one reduce-scatter of
their gradients. Where a mask leaves most of the keys unseen, only those that are seen travel
(``needed``).

All functions work on the tokens of a whole ring rank and know nothing of autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.layout.halves import Halves
from seqcomp.layout.masks import Tile, TileTask
from seqcomp.layout.travel import Travel
from seqcomp.runtime.attention import math_kernel
from seqcomp.runtime.attention.band_mask import BandMask
from seqcomp.runtime.attention.heads import repeated
from seqcomp.runtime.attention.heads import summed as summed_heads
from seqcomp.runtime.attention.hidden_rows import HiddenRows
from seqcomp.runtime.attention.kernels import Grads, Kernel
from seqcomp.runtime.attention.merge import SoftmaxAccumulator, accumulator_dtype
from seqcomp.runtime.attention.needed import Returned, Route, Sums
from seqcomp.runtime.attention.pair_dropout import RingDropout
from seqcomp.runtime.attention.sums import TokenSum
from seqcomp.runtime.attention.tile_mask import TileMask
from seqcomp.runtime.attention.tiling import Tiling
from seqcomp.runtime.comm import Communicator, Pending
from seqcomp.runtime.traffic import Phase


@dataclass(frozen=True)
class Ring:
    """One attention's view of its ring. ``comm`` None is a ring of one.

    ``masked`` computes the tiles that need a mask; ``heads`` says which head of the mask each of
    this rank's query heads has. ``uses``: how many of the kernel's KV heads each KV head stands
    for, None for one; it travels once. ``travel`` None: whole blocks.
    """

    comm: Communicator | None
    tiling: Tiling
    gathered: bool
    kernel: Kernel
    masked: Kernel
    scale: float
    heads: Sequence[int]
    uses: Sequence[int] | None = None
    softcap: float = 0.0
    label: str = ""
    travel: Travel | None = None
    dropout: RingDropout | None = None

    @property
    def size(self) -> int:
        return self.comm.size if self.comm else 1

    @property
    def rank(self) -> int:
        return self.comm.rank if self.comm else 0

    def tasks(self, source: int) -> tuple[TileTask, ...]:
        """This rank's queries against the block of ``source``."""
        return self.tiling.tasks(self.rank, source)

    def own(self, phase: Phase) -> Halves:
        """The same of its own block: what comes before all others, and what behind them."""
        hops = not self.gathered and (self.size > 1 if self.travel is None else self.travel.steps)
        if phase == "backward" and hops:
            return self.tiling.halves(self.rank)
        return Halves(self.tasks(self.rank))

    @property
    def route(self) -> Route | None:
        """How keys reach this rank where not all of them do."""
        if self.comm is None or self.travel is None:
            return None
        return Route(self.comm, self.travel, self.gathered, self.label)

    def keys(self, task: TileTask, source: int) -> slice:
        """The keys of a task in the block of ``source`` as it arrives."""
        start = task.k_start
        if self.travel is not None and source != self.rank:
            start = self.travel.place(self.rank, source, start)
        return slice(start, start + task.k_stop - task.k_start)

    def mask(self, task: TileTask, source: int) -> TileMask:
        """Of a PARTIAL tile."""
        return self.tiling.mask(task, self.rank, source, self.heads)

    def masks(self, task: TileTask) -> bool:
        """Whether the mask of an ANTICAUSAL tile costs less than to turn its tokens round."""
        return task.q_stop - task.q_start <= self.kernel.whole

    def how(self, task: TileTask, source: int) -> dict[str, Any]:
        """What kernels are told besides tensors and masks."""
        if self.dropout is None:
            return {"scale": self.scale}
        reverse = task.kind is Tile.ANTICAUSAL
        tile = self.dropout.tile(task, self.rank, source, self.heads, reverse=reverse)
        return {"scale": self.scale, "dropout": tile}


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """[B,Hq,n,d], [B,Hkv,n,d] x 2 -> out [B,Hq,n,dv] and lse [B,Hq,n] in accumulator dtype."""
    rows = q.shape[2]
    softmax = SoftmaxAccumulator(rows)
    for source, tasks, k_block, v_block in _steps(ring, k, v, "forward"):
        for task in tasks:
            out, lse = _forward_tile(ring, task, source, q, k_block, v_block)
            softmax.add(task.q_start, task.q_stop, out, lse)
    return softmax.result(q.new_empty((*q.shape[:3], v.shape[3])))


def backward(
    ring: Ring, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Grads, list[Tensor]]:
    """dq, dk, dv in accumulator dtype, and what the mask's trained inputs get.

    ``out`` in the dtype of q, ``lse`` as from ``forward``. Both out and dout may have more columns
    than v, whose values are zeros there.
    """
    dq = TokenSum(q)
    trained = [torch.zeros_like(x) for x in ring.tiling.trained]
    home = TokenSum(k), TokenSum(v)
    route = _gradients(ring, home, k, v)
    for source, tasks, k_block, v_block in _steps(ring, k, v, "backward"):
        # Not kept apart: the keys of all tiles together may be many times those of the block.
        dk, dv = home if source == ring.rank else (TokenSum(k_block), TokenSum(v_block))
        for task in tasks:
            rows = (dout, q, out, lse)
            _add_gradients(ring, task, source, rows, (k_block, v_block), (dq, dk, dv))
            if trained and task.kind is Tile.PARTIAL:
                _add_mask_gradient(trained, ring, task, source, rows, (k_block, v_block))
        if source != ring.rank:
            route.add(source, (dk.result(), dv.result()))
    return (dq.result(), *route.result()), trained


def _steps(
    ring: Ring, k: Tensor, v: Tensor, phase: Phase
) -> Iterator[tuple[int, tuple[TileTask, ...], Tensor, Tensor]]:
    """(source, tasks, K, V) in the order of computation. The own block is first, and in backward
    comes again at the end, when the gradients of the last other one are under way."""
    own = ring.own(phase)
    for source, k_block, v_block in _blocks(ring, k, v, phase):
        tasks = own.first if source == ring.rank else ring.tasks(source)
        yield source, tasks, k_block, v_block
    del k_block, v_block
    if own.last:
        yield ring.rank, own.last, k, v


def _blocks(ring: Ring, k: Tensor, v: Tensor, phase: Phase) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(source, K, V), own block first. The next block travels while the caller computes."""
    if ring.comm is None or ring.size == 1:
        yield 0, k, v
    elif ring.route is not None:
        yield from ring.route.blocks(k, v, phase)
    elif ring.gathered:
        packed = torch.cat((k.reshape(-1), v.reshape(-1)))
        rows = ring.comm.all_gather(packed, phase=phase, label=ring.label)
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            k_flat, v_flat = rows[source].split((k.numel(), v.numel()))
            yield source, k_flat.view(k.shape), v_flat.view(v.shape)
    else:
        k, v = k.contiguous(), v.contiguous()
        for step in range(ring.size):
            last = step == ring.size - 1
            pending = None if last else _pass_on(ring, ring.comm, (k, v), phase)
            yield (ring.rank - step) % ring.size, k, v
            if pending is not None:
                k, v = pending.wait()


def _pass_on(ring: Ring, comm: Communicator, tensors: tuple[Tensor, ...], phase: Phase) -> Pending:
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return comm.start_exchange(tensors, to=to, source=source, phase=phase, label=ring.label)


def _gradients(ring: Ring, home: Sums, k: Tensor, v: Tensor) -> Returned | _Gathered | _Travelling:
    if ring.route is not None:
        return ring.route.gradients(home, k, v)
    if ring.gathered and ring.size > 1:
        return _Gathered(ring, home, k, v)
    return _Travelling(ring, home)


class _Travelling:
    """dK/dV accumulators that follow their block round the ring."""

    def __init__(self, ring: Ring, home: Sums) -> None:
        self._ring = ring
        self._home = home
        self._arriving: Pending | None = None

    def add(self, source: int, given: tuple[Tensor, Tensor]) -> None:
        """Takes ownership of dk and dv of the block of ``source``, another rank."""
        del source
        ring = self._ring
        assert ring.comm is not None
        if self._arriving is not None:
            for own, arrived in zip(given, self._arriving.wait(), strict=True):
                own.add_(arrived)
        self._arriving = _pass_on(ring, ring.comm, given, "backward")

    def result(self) -> tuple[Tensor, Tensor]:
        """dk and dv of this rank's own keys, what it computed itself included."""
        dk, dv = (own.result() for own in self._home)
        if self._arriving is not None:
            dk_far, dv_far = self._arriving.wait()
            dk, dv = dk.add_(dk_far), dv.add_(dv_far)
        return dk, dv


class _Gathered:
    """dK/dV of all blocks side by side until one reduce-scatter."""

    def __init__(self, ring: Ring, home: Sums, k: Tensor, v: Tensor) -> None:
        assert ring.comm is not None
        self._ring = ring
        self._home = home
        self._comm = ring.comm
        self._shapes = (k.shape, v.shape)
        self._sizes = (k.numel(), v.numel())
        dtype = accumulator_dtype(k.dtype)
        self._rows = k.new_empty((ring.size, sum(self._sizes)), dtype=dtype)

    def add(self, source: int, given: tuple[Tensor, Tensor]) -> None:
        for row, part in zip(self._split(self._rows[source]), given, strict=True):
            row.copy_(part)

    def result(self) -> tuple[Tensor, Tensor]:
        dk, dv = (own.result() for own in self._home)
        self.add(self._ring.rank, (dk, dv))
        total = self._comm.reduce_scatter(self._rows, phase="backward", label=self._ring.label)
        return self._split(total)

    def _split(self, row: Tensor) -> tuple[Tensor, Tensor]:
        dk, dv = row.split(self._sizes)
        return dk.view(self._shapes[0]), dv.view(self._shapes[1])


def _forward_tile(
    ring: Ring, task: TileTask, source: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    q = q[:, :, task.q_start : task.q_stop]
    k, v = _keys(ring, task, source, k, v)
    how = ring.how(task, source)
    if task.kind is Tile.PARTIAL:
        mask = ring.mask(task, source)
        return ring.masked.forward(q, k, v, causal=False, mask=mask, **how)
    if task.kind is Tile.ANTICAUSAL:
        if ring.masks(task):
            return ring.kernel.forward(q, k, v, causal=False, mask=_upper(q), **how)
        q, k, v = (_reversed(x) for x in (q, k, v))
        found = ring.kernel.forward(q, k, v, causal=True, **how)
        return _reversed(found[0]), _reversed(found[1])
    return ring.kernel.forward(q, k, v, causal=task.kind is Tile.CAUSAL, **how)


def _add_gradients(
    ring: Ring,
    task: TileTask,
    source: int,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    sums: tuple[TokenSum, TokenSum, TokenSum],
) -> None:
    """What one tile gives to dq, dk and dv."""
    dout, q, out, lse = (x[:, :, task.q_start : task.q_stop] for x in rows)
    k, v = _keys(ring, task, source, *keys)
    how = ring.how(task, source)
    tensors = (dout, q, k, v, out, lse)
    own = ring.keys(task, source)
    places = (slice(task.q_start, task.q_stop), own, own)
    if task.kind is not Tile.PARTIAL:
        grads = _without_mask(ring, task, tensors, how)
    else:
        mask = ring.mask(task, source)
        if isinstance(mask, BandMask) and ring.uses is None and dout.shape[-1] == v.shape[-1]:
            into = tuple(x.room(at.start, at.stop) for x, at in zip(sums, places, strict=True))
            ring.masked.backward(*tensors, causal=False, mask=mask, into=into, **how)
            return
        grads = ring.masked.backward(*tensors, causal=False, mask=mask, **how)
    dq, *of_keys = grads
    wide = accumulator_dtype(q.dtype)
    dk, dv = (summed_heads(x, ring.uses, wide) for x in of_keys)
    for total, at, grad in zip(sums, places, (dq, dk, dv), strict=True):
        total.add(at.start, at.stop, grad)


def _without_mask(
    ring: Ring, task: TileTask, tensors: tuple[Tensor, ...], how: dict[str, Any]
) -> Grads:
    if task.kind is Tile.ANTICAUSAL:
        if ring.masks(task):
            return ring.kernel.backward(*tensors, causal=False, mask=_upper(tensors[1]), **how)
        tensors = tuple(_reversed(x) for x in tensors)
        dq, dk, dv = ring.kernel.backward(*tensors, causal=True, **how)
        return _reversed(dq), _reversed(dk), _reversed(dv)
    return ring.kernel.backward(*tensors, causal=task.kind is Tile.CAUSAL, **how)


def _upper(q: Tensor) -> Tensor:
    """The mask of an ANTICAUSAL tile, to be added."""
    rows, dtype = q.shape[2], accumulator_dtype(q.dtype)
    return torch.full((rows, rows), -torch.inf, dtype=dtype, device=q.device).tril_(-1)


def _reversed(x: Tensor) -> Tensor:
    """The tokens of [B,H,n,...] from the last to the first."""
    return x.flip(2)


def _keys(ring: Ring, task: TileTask, source: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a tile as the kernel takes them."""
    own = ring.keys(task, source)
    k, v = (repeated(x[:, :, own], ring.uses) for x in (k, v))
    return k, v


def _add_mask_gradient(
    totals: list[Tensor],
    ring: Ring,
    task: TileTask,
    source: int,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
) -> None:
    dout, q, out, lse = (x[:, :, task.q_start : task.q_stop] for x in rows)
    k, v = _keys(ring, task, source, *keys)
    mask = ring.mask(task, source)
    assert not isinstance(mask, BandMask), "a rule has nothing to train"
    if isinstance(mask, HiddenRows):  # as its kernels compute these rows
        q, mask = q.masked_fill(mask.swallowed(q), 0.0), mask.mask
    v = torch.nn.functional.pad(v, (0, dout.shape[-1] - v.shape[-1]))
    cotangent, scores = math_kernel.mask_gradient(
        dout, q, k, v, out, lse, mask=mask, softcap=ring.softcap, **ring.how(task, source)
    )
    parts = ring.tiling.gradients(task, ring.rank, source, ring.heads, cotangent, scores)
    for total, part in zip(totals, parts, strict=True):
        total.add_(part)
