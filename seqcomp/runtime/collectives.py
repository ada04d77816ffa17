"""Collectives on local tensors, with their gradients.

Convention inside a compiled graph: the cotangent of a replicated value is partial (every rank
holds a summand), that of a sharded value is the shard. Hence the pairs all-gather <->
reduce-scatter, all-reduce <-> all-reduce, all-to-all <-> all-to-all, shard <-> zero-padded
scatter. At the boundary of a module the cotangent is replicated instead, and the functions that
stand there say so.

``layout`` says which global tokens each rank of ``comm`` holds (``layout.size == comm.size``);
None is the plain even split in rank order. ``label`` names the caller in the byte counter.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.tokens import Tokens

Cotangent = Literal["partial", "replicated"]


def shard(
    x: Tensor,
    dim: int,
    comm: Communicator,
    layout: SequenceLayout | None = None,
    padded: int | None = None,
) -> Tensor:
    """Replicate -> Shard: this rank's tokens along ``dim``, in local order; sends nothing.

    ``padded``: the length to which copies of the last token fill it up first. The backward
    scatters into zeros: the partial cotangent of a replicated value.
    """
    return _Shard.apply(
        x, Tokens(x, dim, comm, layout, "", padded=padded, length=x.shape[dim]), False
    )


def enter(
    x: Tensor,
    dim: int,
    comm: Communicator,
    layout: SequenceLayout | None = None,
    *,
    label: str = "",
) -> Tensor:
    """``shard`` at a module's entry: the backward gathers, so every rank has the cotangent."""
    return _Shard.apply(x, Tokens(x, dim, comm, layout, label), True)


def gather(
    x: Tensor,
    dim: int,
    comm: Communicator,
    layout: SequenceLayout | None = None,
    *,
    cotangent: Cotangent = "partial",
    length: int | None = None,
    label: str = "",
) -> Tensor:
    """Shard -> Replicate: all tokens along ``dim`` in global order, ``length`` of them.

    The backward is a reduce-scatter of a partial cotangent, or this rank's slice of a replicated
    one (a module's output).
    """
    tokens = Tokens(x, dim, comm, layout, label, local=True, length=length)
    return _Gather.apply(x, tokens, cotangent)


def reduce_scatter(
    x: Tensor,
    dim: int,
    comm: Communicator,
    layout: SequenceLayout | None = None,
    padded: int | None = None,
    *,
    label: str = "",
) -> Tensor:
    """Partial -> Shard: the sum over the ranks, of which this rank keeps its tokens.

    ``padded`` as in ``shard``.
    """
    tokens = Tokens(x, dim, comm, layout, label, padded=padded, length=x.shape[dim])
    return _ReduceScatter.apply(x, tokens)


def all_reduce(
    x: Tensor, comm: Communicator, *, cotangent: Cotangent = "partial", label: str = ""
) -> Tensor:
    """Partial -> Replicate: the sum over the ranks.

    The backward sums a partial cotangent, and passes a replicated one (a loss) on as it is.
    """
    return _AllReduce.apply(x, comm, cotangent, label)


def own_cotangent(x: Tensor, comm: Communicator) -> Tensor:
    """Identity; of a replicated cotangent only rank 0 keeps its copy, which makes it partial."""
    return _OwnCotangent.apply(x, comm)


def scale_cotangent(x: Tensor, factor: float) -> Tensor:
    """Identity; the cotangent is multiplied by ``factor``."""
    return _ScaleCotangent.apply(x, factor)


def all_to_all(
    x: Tensor, scatter_dim: int, gather_dim: int, comm: Communicator, *, label: str = ""
) -> Tensor:
    """Shard(gather_dim) -> Shard(scatter_dim) in one exchange.

    ``scatter_dim`` is cut into P equal pieces, ``gather_dim`` grows P times, in rank order.
    """
    scatter_dim, gather_dim = scatter_dim % x.dim(), gather_dim % x.dim()
    assert scatter_dim != gather_dim
    assert x.shape[scatter_dim] % comm.size == 0, f"{x.shape[scatter_dim]} over {comm.size} ranks"
    return _AllToAll.apply(x, scatter_dim, gather_dim, comm, label)


class _ScaleCotangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens, complete: bool) -> Tensor:
        ctx.tokens, ctx.complete = tokens, complete
        return tokens.take(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.complete:
            return ctx.tokens.gathered(grad, "backward"), None, None
        return ctx.tokens.scattered(grad), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens, cotangent: Cotangent) -> Tensor:
        ctx.tokens, ctx.cotangent = tokens, cotangent
        return tokens.gathered(x, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tokens: Tokens = ctx.tokens
        if ctx.cotangent == "replicated":
            return tokens.take(grad, zeros=True), None, None
        rows = tokens.blocks(grad, zeros=True)
        return tokens.comm.reduce_scatter(rows, phase="backward", label=tokens.label), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        return tokens.comm.reduce_scatter(tokens.blocks(x), label=tokens.label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tokens.gathered(grad, "backward"), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, cotangent: Cotangent, label: str
    ) -> Tensor:
        ctx.comm, ctx.cotangent, ctx.label = comm, cotangent, label
        return comm.all_reduce(x, label=label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.cotangent == "replicated":
            return grad, None, None, None
        return ctx.comm.all_reduce(grad, phase="backward", label=ctx.label), None, None, None


class _OwnCotangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.comm.rank == 0 else torch.zeros_like(grad), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scatter_dim: int, gather_dim: int, comm: Communicator, label: str
    ) -> Tensor:
        ctx.scatter_dim, ctx.gather_dim, ctx.comm, ctx.label = scatter_dim, gather_dim, comm, label
        rows = x.unflatten(scatter_dim, (comm.size, -1)).movedim(scatter_dim, 0)
        return _glued(comm.all_to_all(rows, label=label), gather_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        comm: Communicator = ctx.comm
        rows = grad.unflatten(ctx.gather_dim, (comm.size, -1)).movedim(ctx.gather_dim, 0)
        rows = comm.all_to_all(rows, phase="backward", label=ctx.label)
        return _glued(rows, ctx.scatter_dim), None, None, None, None


def _glued(rows: Tensor, dim: int) -> Tensor:
    """[P, ..., n, ...] -> [..., P*n, ...]."""
    return rows.movedim(0, dim).flatten(dim, dim + 1)


def sum_gradient(x: Tensor, comm: Communicator, *, label: str = "") -> Tensor:
    """Identity; the backward sums the cotangent over ``comm``, in fp32 for narrower dtypes.

    For what the ranks replicate from outside the graph: parameters, and inputs that need a
    gradient. Inside, their cotangents are partial.
    """
    return _SumGradient.apply(x, comm, label)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, label: str) -> Tensor:
        ctx.comm, ctx.label = comm, label
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        wide = grad.float() if grad.dtype.itemsize < 4 else grad
        total = ctx.comm.all_reduce(wide, phase="backward", label=ctx.label)
        return total.to(grad.dtype), None, None
