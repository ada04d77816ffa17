"""Operations that move values, or cotangents, between ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.lowering.ops.base import Op, RankBinding
from seqcomp.runtime import collectives, uneven
from seqcomp.runtime.collectives import Cotangent
from seqcomp.runtime.gradients import GradientBucket
from seqcomp.runtime.local import local_part


@dataclass(frozen=True)
class Shard(Op):
    """Replicate -> Shard(dim) over axes: local.

    A second operand is the length of a sequence that is to be padded first.
    """

    dim: int
    axes: tuple[str, ...]
    __name__ = "shard"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)
        return lambda x, length=None: collectives.shard(
            x, self.dim, comm, layout, rank.padded(length)
        )

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class Gather(Op):
    """Shard(dim) over axes -> Replicate, global token order.

    A second operand is the length that remains of a padded sequence.
    """

    dim: int
    axes: tuple[str, ...]
    cotangent: Cotangent
    label: str = ""
    __name__ = "all_gather"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)
        return lambda x, length=None: collectives.gather(
            x, self.dim, comm, layout,
            cotangent=self.cotangent, length=length, label=self.label,
        )  # fmt: skip

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class AllReduce(Op):
    """Partial over axes -> Replicate."""

    axes: tuple[str, ...]
    cotangent: Cotangent
    label: str = ""
    __name__ = "all_reduce"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda x: collectives.all_reduce(x, comm, cotangent=self.cotangent, label=self.label)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class ReduceScatter(Op):
    """Partial over axes -> Shard(dim); a second operand as in `Shard`."""

    dim: int
    axes: tuple[str, ...]
    label: str = ""
    __name__ = "reduce_scatter"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)
        return lambda x, length=None: collectives.reduce_scatter(
            x, self.dim, comm, layout, rank.padded(length), label=self.label
        )

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class AllToAll(Op):
    """Shard(gather_dim) -> Shard(scatter_dim) over axes, in one exchange."""

    scatter_dim: int
    gather_dim: int
    axes: tuple[str, ...]
    label: str = ""
    __name__ = "all_to_all"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda x: collectives.all_to_all(
            x, self.scatter_dim, self.gather_dim, comm, label=self.label
        )

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class PadPart(Op):
    """This rank's part of a dim that axes do not divide, in the size of the largest part."""

    dim: int
    axes: tuple[str, ...]
    size: int
    __name__ = "pad_part"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda x: uneven.pad_part(x, self.dim, self.size, comm)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class Part(Op):
    """Replicate -> Shard(dim) in the parts of torch.chunk, as a view: local."""

    dim: int
    axes: tuple[str, ...]
    size: int
    __name__ = "part"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda x: uneven.own_part(x, self.dim, self.size, comm)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class OwnCotangent(Op):
    """Identity at a module's output: a replicated cotangent becomes partial over axes."""

    axes: tuple[str, ...]
    __name__ = "own_cotangent"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda x: collectives.own_cotangent(x, comm)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class ScaleCotangent(Op):
    """Identity at a module's output: its cotangent is multiplied by a factor."""

    factor: float
    __name__ = "scale_cotangent"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        return lambda x: collectives.scale_cotangent(x, self.factor)


@dataclass(frozen=True)
class SumGradient(Op):
    """Identity on an input that axes replicate: its cotangent is summed over them."""

    axes: tuple[str, ...]
    label: str = ""
    __name__ = "sum_gradient"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)

        def sum_gradient(x: Tensor) -> Tensor:
            if not (x.requires_grad and torch.is_grad_enabled()):
                return x
            return collectives.sum_gradient(x, comm, label=self.label)

        return sum_gradient

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class OpenBucket(Op):
    """Parameters that axes replicate -> their local tensors, and the sum of their gradients.

    Stands before everything; in backward it runs last, and waits for the sum.
    """

    axes: tuple[str, ...]
    label: str
    __name__ = "open_bucket"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)

        def open_bucket(*parameters: Tensor) -> tuple[GradientBucket, list[Tensor]]:
            bucket = GradientBucket(comm, self.label)
            return bucket, bucket.open(parameters)

        return open_bucket

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class FillBucket(Op):
    """Identity on the values of an opened bucket; in backward it starts the sum."""

    axes: tuple[str, ...]
    label: str
    __name__ = "fill_bucket"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        return lambda opened: opened[0].fill(opened[1])

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class LocalPart(Op):
    """This rank's part of a parameter that nothing else sums over."""

    __name__ = "local_part"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        return local_part


@dataclass(frozen=True)
class PaddedLength(Op):
    """The length of a sequence with its padding."""

    __name__ = "padded_length"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        return rank.layout.padded


@dataclass(frozen=True)
class HidePadding(Op):
    """Zeros in place of the padded tokens of one factor of a dim: what is summed must not see them.

    Operands: the value, the length of the sequence, the local size of what follows the tokens in
    their dim.
    """

    dim: int
    axes: tuple[str, ...]
    __name__ = "hide_padding"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        layout = rank.layout_over(self.axes) or SequenceLayout("contiguous", comm.size)

        def hide_padding(x: Tensor, length: int, tail: int = 1) -> Tensor:
            padded = rank.layout.padded(length)
            own = layout.ranges(padded, comm.rank)
            real = sum(len(range(part.start, min(part.stop, length), part.step)) for part in own)
            tokens = padded // comm.size
            if real == tokens:
                return x
            x = x.unflatten(self.dim, (-1, tokens, tail))
            kept = x.narrow(self.dim + 1, 0, real)
            hidden = kept.new_zeros(()).expand(
                *x.shape[: self.dim + 1], tokens - real, *x.shape[self.dim + 2 :]
            )
            return torch.cat([kept, hidden], self.dim + 1).flatten(self.dim, self.dim + 2)

        return hide_padding

    def axes_used(self) -> tuple[str, ...]:
        return self.axes
