"""How the operations of a program look to torch.compile."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from seqcomp.lowering.ops.base import Op, RankBinding
from seqcomp.lowering.ops.compute import (
    Attention,
    ColumnLinear,
    Constant,
    MaskTiling,
    OwnHeads,
    Remember,
    VocabularyEmbedding,
    VocabularyLoss,
)
from seqcomp.lowering.ops.dropout import Dropout, DropPairs
from seqcomp.lowering.ops.moves import (
    AllReduce,
    AllToAll,
    Gather,
    HidePadding,
    LocalPart,
    OwnCotangent,
    PaddedLength,
    PadPart,
    Part,
    ReduceScatter,
    ScaleCotangent,
    Shard,
    SumGradient,
)
from seqcomp.runtime.attention.merge import accumulator_dtype
from seqcomp.runtime.opaque import Opaque, Shape

# Plain operations of torch on numbers that a rank knows: whoever traces reads them.
_READ = (
    Constant,
    HidePadding,
    LocalPart,
    OwnHeads,
    PadPart,
    PaddedLength,
    Part,
    VocabularyEmbedding,
)
# What gives an object that other operations take.
_HOLD = (DropPairs, MaskTiling, Remember)
_HELD = {Attention: frozenset({3, 6}), ColumnLinear: frozenset({4})}

Sizes = Sequence[Any]


class Traceable:
    """Makes the functions of one program such that torch.compile can be used around them.

    What it cannot look into it calls; what it cannot call, since objects go in and out or
    gradients of objects, is run aside and breaks the graph.
    """

    def __init__(self, rank: RankBinding, program: torch.fx.Graph) -> None:
        self._rank = rank
        # Objects that something else takes too must be there themselves.
        self._bare = {
            node.target
            for node in program.nodes
            if isinstance(node.target, _HOLD)
            and not all(type(user.target) in _HELD for user in node.users)
        }
        self._likes: dict[tuple[str, Op], str] = {}
        self._shapes: dict[str, Shape] = {}

    def __call__(self, op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, to which `op` was bound."""
        if isinstance(op, _READ):
            return run
        held = _HELD.get(type(op), frozenset())
        if isinstance(op, _HOLD) and op not in self._bare:
            return Opaque(run, "", None, held, measures=isinstance(op, Remember))
        shape = shape_of(op, self._rank)
        if shape is None:
            aside: Callable[..., Any] = torch.compiler.disable(run)
            return aside
        like = self._like(op)
        return Opaque(run, like, self._shapes.setdefault(like, shape), held)

    def _like(self, op: Op) -> str:
        """The same for operations whose results have the same shapes."""
        own = {"label": "", "number": 0}
        own = {name: value for name, value in own.items() if hasattr(op, name)}
        key = (type(op).__name__, dataclasses.replace(op, **own))  # type: ignore[type-var]
        return self._likes.setdefault(key, f"{type(op).__name__}{next(_COUNT)}")


_COUNT = itertools.count()


@singledispatch
def shape_of(op: Op, rank: RankBinding) -> Shape | None:
    """The shape of what `op` gives, from its operands; None for what is not one tensor."""
    return None


def _size(op: Any, rank: RankBinding) -> int:
    return math.prod(rank.context.sizes[axis] for axis in op.axes)


def _sized(x: Tensor, dim: int, size: Any) -> Sizes:
    dim %= x.dim()
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


@shape_of.register(AllReduce)
@shape_of.register(OwnCotangent)
@shape_of.register(ScaleCotangent)
@shape_of.register(SumGradient)
@shape_of.register(Dropout)
def _same(op: Op, rank: RankBinding) -> Shape:
    return lambda x, *_, cast: (x.shape, x.dtype)


@shape_of.register(Shard)
@shape_of.register(ReduceScatter)
def _cut(op: Shard | ReduceScatter, rank: RankBinding) -> Shape:
    def shape(x: Tensor, length: Any = None, *, cast: Any) -> tuple[Sizes, torch.dtype]:
        whole = x.shape[op.dim] if length is None else rank.layout.padded(length)
        return _sized(x, op.dim, whole // _size(op, rank)), x.dtype

    return shape


@shape_of.register
def _gathered(op: Gather, rank: RankBinding) -> Shape:
    def shape(x: Tensor, length: Any = None, *, cast: Any) -> tuple[Sizes, torch.dtype]:
        whole = x.shape[op.dim] * _size(op, rank) if length is None else length
        return _sized(x, op.dim, whole), x.dtype

    return shape


@shape_of.register
def _exchanged(op: AllToAll, rank: RankBinding) -> Shape:
    def shape(x: Tensor, *, cast: Any) -> tuple[Sizes, torch.dtype]:
        sizes, size = list(x.shape), _size(op, rank)
        sizes[op.scatter_dim] //= size
        sizes[op.gather_dim] *= size
        return sizes, x.dtype

    return shape


@shape_of.register
def _attended(op: Attention, rank: RankBinding) -> Shape:
    def shape(q: Tensor, k: Tensor, v: Tensor, *_: Any, cast: Any) -> tuple[Sizes, torch.dtype]:
        dtype = q.dtype if cast is None or q.dtype == torch.float64 else cast
        sizes = (*q.shape[:3], v.shape[3] + 1) if op.lse else (*q.shape[:3], v.shape[3])
        return sizes, accumulator_dtype(dtype) if op.lse else dtype

    return shape


@shape_of.register
def _projected(op: ColumnLinear, rank: RankBinding) -> Shape:
    def shape(x: Tensor, shard: Tensor, weight: Tensor, *_: Any, cast: Any) -> Any:
        dtype = x.dtype if cast is None or x.dtype == torch.float64 else cast
        return (*x.shape[:-1], weight.shape[0]), dtype

    return shape


@shape_of.register
def _lost(op: VocabularyLoss, rank: RankBinding) -> Shape:
    return lambda logits, target, *, cast: (() if op.reduce else target.shape, logits.dtype)
