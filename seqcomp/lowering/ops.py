"""What a lowered graph calls besides ATen, as data; `bind` turns it into a function of one rank.

A program is lowered once and is the same for every rank: only these operations know ranks, and
only once bound. Each counts its bytes under the module path in `label`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.layout.masks import Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime import collectives, tensor_parallel, uneven
from seqcomp.runtime.attention import AttentionPlan, Transport, attention
from seqcomp.runtime.attention.pair_mask import PairMask
from seqcomp.runtime.attention.tiling import DataTiling
from seqcomp.runtime.collectives import Cotangent
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.gradients import GradientBucket
from seqcomp.runtime.local import local_part
from seqcomp.runtime.tokens import Tokens


@dataclass(frozen=True)
class RankBinding:
    """All that an operation of one rank needs."""

    context: RankContext
    sequence: tuple[str, ...]
    layout: SequenceLayout
    ring_axis: str | None
    ulysses_axis: str | None

    def layout_over(self, axes: tuple[str, ...]) -> SequenceLayout | None:
        """The layout in which these axes deal out tokens; None is the plain even split.

        The inner axes cut what a ring rank holds into even pieces, so that the outer ones alone
        hold the concatenation of those pieces, in the same layout.
        """
        return self.place().layout_over(axes)

    def place(self) -> Place:
        """Where this rank is, as plain data."""
        context = self.context
        return Place(context.sizes, context.coords, self.sequence, self.layout, self.ring_axis)


@dataclass(frozen=True)
class Place:
    """A rank's place in the mesh, and how the mesh deals out tokens. Can be pickled."""

    sizes: Mapping[str, int]
    coords: Mapping[str, int]
    sequence: tuple[str, ...]
    layout: SequenceLayout
    ring_axis: str | None

    def layout_over(self, axes: tuple[str, ...]) -> SequenceLayout | None:
        """As `RankBinding.layout_over`."""
        if not axes or axes != self.sequence[: len(axes)] or axes[0] != self.ring_axis:
            return None
        inner = math.prod(self.sizes[a] for a in axes[1:])
        return SequenceLayout(self.layout.kind, self.layout.ring, inner)


class Op(ABC):
    """A graph operation that must be bound to a rank before it runs."""

    __name__ = "seqcomp_op"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError(f"{self} is not bound to a rank")

    @abstractmethod
    def bind(self, rank: RankBinding) -> Callable[..., Any]: ...

    def axes_used(self) -> tuple[str, ...]:
        """The joint group that the operation talks to; empty for none."""
        return ()


@dataclass(frozen=True)
class Shard(Op):
    """Replicate -> Shard(dim) over axes: local."""

    dim: int
    axes: tuple[str, ...]
    __name__ = "shard"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)
        return lambda x: collectives.shard(x, self.dim, comm, layout)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class Gather(Op):
    """Shard(dim) over axes -> Replicate, global token order."""

    dim: int
    axes: tuple[str, ...]
    cotangent: Cotangent
    label: str = ""
    __name__ = "all_gather"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)
        return lambda x: collectives.gather(
            x, self.dim, comm, layout, cotangent=self.cotangent, label=self.label
        )

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
    """Partial over axes -> Shard(dim)."""

    dim: int
    axes: tuple[str, ...]
    label: str = ""
    __name__ = "reduce_scatter"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)
        return lambda x: collectives.reduce_scatter(x, self.dim, comm, layout, label=self.label)

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
class Attention(Op):
    """Attention over sharded tokens: Ulysses inside, ring outside.

    A fourth operand is the tiling of a mask that depends on data (`mask` is None), a fifth the
    sinks of its heads.
    """

    mask: Mask | None
    scale: float
    transport: Transport
    label: str
    softcap: float = 0.0
    __name__ = "attention"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        def comm(axis: str | None) -> Any:
            return rank.context.comm((axis,)) if axis in rank.sequence else None

        ring, ulysses = comm(rank.ring_axis), comm(rank.ulysses_axis)
        plan = AttentionPlan(self.mask, rank.layout, self.transport, self.scale, self.softcap)

        def sharded_attention(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            tiling: DataTiling | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            return attention(
                q, k, v, plan, tiling, sinks, ring=ring, ulysses=ulysses, label=self.label
            )

        return sharded_attention


@dataclass(frozen=True)
class MaskTiling(Op):
    """The tiles of a mask from its inputs; `dims` says what their dims are in [B, H, q, k]."""

    mask: PairMask
    dims: tuple[tuple[int, ...], ...]
    __name__ = "mask_tiling"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        layout, device = rank.layout, rank.context.device

        def mask_tiling(length: int, *inputs: Tensor) -> DataTiling:
            leaves = [_framed(x, dims) for x, dims in zip(inputs, self.dims, strict=True)]
            return DataTiling(self.mask, leaves, layout, length, device)

        return mask_tiling


def _framed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """[B, H, q, k] from a tensor that has some of these dims."""
    x = x.permute(sorted(range(len(dims)), key=dims.__getitem__))
    places = {max(dim, 0) for dim in dims}  # a table's rows stand where the batch does
    for dim in range(4):
        if dim not in places:
            x = x.unsqueeze(dim)
    return x


@dataclass(frozen=True)
class LocalPart(Op):
    """This rank's part of a parameter that nothing else sums over."""

    __name__ = "local_part"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        return local_part


@dataclass(frozen=True)
class Remember(Op):
    """Shard -> the promise to gather it again in backward, for `uses` linears."""

    dim: int
    axes: tuple[str, ...]
    uses: int
    label: str = ""
    __name__ = "remember"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)

        def remember(x: Tensor) -> tensor_parallel.Regathered:
            tokens = Tokens(x, self.dim, comm, layout, self.label, local=True)
            return tensor_parallel.Regathered(tokens, self.uses)

        return remember

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class ColumnLinear(Op):
    """Column-parallel linear of a gathered value; saves the shard it was gathered from."""

    __name__ = "column_linear"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        return tensor_parallel.column_linear


@dataclass(frozen=True)
class VocabularyEmbedding(Op):
    """Embedding rows cut over axes; the result is partial."""

    axes: tuple[str, ...]
    padding_idx: int
    words: int
    __name__ = "vocabulary_embedding"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda weight, index: tensor_parallel.vocabulary_embedding(
            weight, index, self.padding_idx, self.words, comm
        )

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class VocabularyLoss(Op):
    """Cross-entropy of logits whose classes are cut over axes."""

    axes: tuple[str, ...]
    classes: int
    words: int
    ignore_index: int
    reduce: bool
    label: str
    __name__ = "vocabulary_loss"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda logits, target: tensor_parallel.vocabulary_cross_entropy(
            logits,
            target,
            comm,
            classes=self.classes,
            words=self.words,
            ignore_index=self.ignore_index,
            reduce=self.reduce,
            label=self.label,
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
class OwnHeads(Op):
    """The one KV head that this rank's query heads use."""

    axes: tuple[str, ...]
    heads: int
    __name__ = "own_heads"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda x: tensor_parallel.own_heads(x, self.heads, comm)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True, eq=False)
class Constant(Op):
    """A tensor that the capture lifted out of the code."""

    value: Tensor
    __name__ = "constant"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        value = self.value.to(rank.context.device)
        return lambda: value
