"""Windows over sharded tokens: what stands next to a rank's tokens comes from its owners.

The gradients of what came go back to the owners, who add them to their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqcomp.layout.neighbours import OUTSIDE, Neighbours
from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.traffic import Phase


def windowed(
    x: Tensor,
    dim: int,
    comm: Communicator,
    plan: Neighbours,
    *,
    fill: float,
    inner: Callable[[Tensor], Tensor],
    label: str = "",
) -> Tensor:
    """`inner` on tokens that look at their neighbours.

    x [..., n, ...]: this rank's tokens along `dim`. `inner` turns m + plan.width tokens into m.
    Outside of the sequence stands `fill`.
    """
    out = inner(_Neighbours.apply(x, dim, comm, plan, fill, label))
    runs, width = plan.runs[comm.rank], plan.width
    if len(runs) == 1 or not width:
        return out
    # All runs go through `inner` at once: what straddles two of them is dropped.
    kept, start = [], 0
    for count in runs:
        kept.append(out.narrow(dim, start, count))
        start += count + width
    return torch.cat(kept, dim)


class _Neighbours(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        comm: Communicator,
        plan: Neighbours,
        fill: float,
        label: str,
    ) -> Tensor:
        ctx.dim, ctx.comm, ctx.plan, ctx.label = dim, comm, plan, label
        ctx.shape = x.shape
        ranks = range(comm.size)
        sends = [_packed(x, dim, plan.needs[r][comm.rank]) for r in ranks]
        counts = [plan.count(comm.rank, r) for r in ranks]
        got = _exchanged(sends, counts, x, ctx, "forward")
        parts = []
        for piece in plan.pieces[comm.rank]:
            if piece.source == OUTSIDE:
                parts.append(x.new_full((), fill).expand(_sized(x.shape, dim, piece.count)))
            elif piece.source == comm.rank:
                parts.append(x.narrow(dim, piece.start, piece.count))
            else:
                at = plan.place(comm.rank, piece.source, piece.start)
                parts.append(got[piece.source].narrow(dim, at, piece.count))
        return torch.cat(parts, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        dim, comm, plan = ctx.dim, ctx.comm, ctx.plan
        wide = torch.promote_types(grad.dtype, torch.float32)
        ranks = range(comm.size)
        counts = [plan.count(comm.rank, r) for r in ranks]
        own = grad.new_zeros(ctx.shape, dtype=wide)
        away = [grad.new_zeros(_sized(ctx.shape, dim, n), dtype=wide) for n in counts]
        start = 0
        for piece in plan.pieces[comm.rank]:
            part = grad.narrow(dim, start, piece.count)
            start += piece.count
            if piece.source == comm.rank:
                own.narrow(dim, piece.start, piece.count).add_(part)
            elif piece.source != OUTSIDE:
                at = plan.place(comm.rank, piece.source, piece.start)
                away[piece.source].narrow(dim, at, piece.count).add_(part)
        sends = [part.to(grad.dtype).reshape(-1) for part in away]
        back = [plan.count(r, comm.rank) for r in ranks]
        for rank, part in enumerate(_exchanged(sends, back, grad, ctx, "backward")):
            start = 0
            for run in plan.needs[rank][comm.rank]:
                own.narrow(dim, run.start, len(run)).add_(part.narrow(dim, start, len(run)))
                start += len(run)
        return own.to(grad.dtype), None, None, None, None, None


def _exchanged(
    sends: Sequence[Tensor], counts: Sequence[int], like: Tensor, ctx: Any, phase: Phase
) -> list[Tensor]:
    """What every rank sends to this one: `counts` tokens each, shaped like its own tokens."""
    shapes = [_sized(ctx.shape, ctx.dim, n) for n in counts]
    receives = [like.new_empty(shape.numel()) for shape in shapes]
    if ctx.plan.travels:
        ctx.comm.exchange_all(sends, receives, kind="all_to_all", phase=phase, label=ctx.label)
    return [row.view(shape) for row, shape in zip(receives, shapes, strict=True)]


def _packed(x: Tensor, dim: int, runs: Sequence[range]) -> Tensor:
    if not runs:
        return x.new_empty(0)
    return torch.cat([x.narrow(dim, run.start, len(run)) for run in runs], dim).reshape(-1)


def _sized(shape: torch.Size, dim: int, count: int) -> torch.Size:
    return torch.Size((*shape[:dim], count, *shape[dim + 1 :]))
