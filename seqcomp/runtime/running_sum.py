"""Running sums over sharded tokens: each rank adds up its own runs, only their totals travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.traffic import Phase


def running_sum(
    x: Tensor,
    dim: int,
    comm: Communicator,
    layout: SequenceLayout,
    *,
    dtype: torch.dtype | None = None,
    label: str = "",
) -> Tensor:
    """cumsum over all tokens along `dim`, of which x [..., n, ...] are this rank's.

    Only for layouts in which a rank holds runs of adjacent tokens. Half precision is added up in
    fp32.
    """
    out = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    return _RunningSum.apply(x, dim, comm, layout, out, label)


class _RunningSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        comm: Communicator,
        layout: SequenceLayout,
        dtype: torch.dtype,
        label: str,
    ) -> Tensor:
        ctx.given = dim, comm, layout, label
        ctx.dtype = x.dtype
        return _summed(x.to(dtype), dim, comm, layout, label, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        dim, comm, layout, label = ctx.given
        total = _summed(grad, dim, comm, layout, label, "backward")
        return total.to(ctx.dtype), None, None, None, None, None


def _summed(
    x: Tensor,
    dim: int,
    comm: Communicator,
    layout: SequenceLayout,
    label: str,
    phase: Phase,
) -> Tensor:
    """Sums of each token and all before it; in backward of each token and all behind it."""
    backward = phase == "backward"
    length = x.shape[dim] * comm.size
    owned = [layout.ranges(length, rank) for rank in range(comm.size)]
    assert all(part.step == 1 for parts in owned for part in parts), f"{layout} has no runs"
    runs = owned[comm.rank]
    narrow = x.dtype.is_floating_point and x.dtype.itemsize < 4
    wide = x.float() if narrow else x
    most = max(map(len, owned))
    totals = wide.new_zeros((most, *x.shape[:dim], *x.shape[dim + 1 :]))
    sums = []
    for index, part in enumerate(wide.split([len(run) for run in runs], dim)):
        within = part.flip(dim).cumsum(dim).flip(dim) if backward else part.cumsum(dim)
        totals[index] = within.select(dim, 0 if backward else -1)
        sums.append(within)
    everyone = comm.all_gather(totals, phase=phase, label=label)
    for own, within in zip(runs, sums, strict=True):
        for rank, parts in enumerate(owned):
            for index, other in enumerate(parts):
                if other.start > own.start if backward else other.start < own.start:
                    within.add_(everyone[rank, index].unsqueeze(dim))
    return torch.cat(sums, dim).to(x.dtype)
