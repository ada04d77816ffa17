"""How the operations of a program look to torch.compile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from seqcomp.lowering.ops.along import RunningSum, Windowed
from seqcomp.lowering.ops.base import Op, RankBinding
from seqcomp.lowering.ops.compute import (
    Attention,
    ColumnLinear,
    Constant,
    MaskTiling,
    OwnHeads,
    Remember,
    TokenLocal,
    VocabularyEmbedding,
    VocabularyLoss,
)
from seqcomp.lowering.ops.dropout import Dropout, DropPairs
from seqcomp.lowering.ops.loss import ChunkedLoss
from seqcomp.lowering.ops.mlp import ChunkedMlp
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
from seqcomp.runtime.opaque import Opaque
from seqcomp.runtime.opaque_calls import Form, Shape, in_backward

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

# As in runtime/recompute.py: what is kept of a region that runs again.
_KEPT = (Attention, AllReduce, AllToAll, ReduceScatter)

Sizes = Sequence[Any]
Each = Callable[..., Form | Sequence[Form]]
"""From the operands of a call: the form of its result, or of each in a list."""


class Traceable:
    """Makes the functions of one program such that torch.compile can be used around them.

    What it cannot look into it calls; what it cannot call is run aside and breaks the graph.
    """

    def __init__(self, rank: RankBinding, program: torch.fx.Graph) -> None:
        self._rank = rank
        # Objects that undivided attention takes, in operations of torch, must be there themselves.
        self._bare = {
            node.target
            for node in program.nodes
            if isinstance(node.target, _HOLD)
            and not all(isinstance(user.target, Op) for user in node.users)
        }

    def __call__(self, op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, to which `op` was bound."""
        if isinstance(op, _READ):
            return run
        if isinstance(op, _HOLD) and op not in self._bare:
            return Opaque(run, type(op).__name__, None, measures=isinstance(op, Remember))
        each = shape_of(op, self._rank)
        if each is None:
            aside: Callable[..., Any] = torch.compiler.disable(run)
            return aside
        many = isinstance(op, TokenLocal)
        return Opaque(
            run,
            self._like(op),
            each if many else _alone(each),
            many=many,
            keeps=isinstance(op, _KEPT) or (isinstance(op, ChunkedMlp) and not op.last),
            inside=self._inside(run),
        )

    def _inside(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, where a compiled backward may call it since a part of the forward runs again."""
        traffic = self._rank.context.traffic

        def counted(*args: Any) -> Any:
            before, traffic.again = traffic.again, traffic.again or in_backward()
            try:
                return run(*args)
            finally:
                traffic.again = before

        return counted

    def _like(self, op: Op) -> Any:
        """The same for operations whose results have the same shapes."""
        context = self._rank.context
        if isinstance(op, TokenLocal):
            own: Any = (op.unit.outputs, op.unit.results.dtypes, op.axes)
        elif isinstance(op, ChunkedLoss):
            own = (op.reduce, op.dtype)
        elif isinstance(op, ChunkedMlp):
            own = (op.code, op.chunks, op.uses, op.last)
        else:
            names = {"label": "", "number": 0}
            own = dataclasses.replace(op, **{k: v for k, v in names.items() if hasattr(op, k)})  # type: ignore[type-var]
        return type(op).__name__, own, tuple(context.sizes.items()), self._rank.layout


def _alone(each: Each) -> Shape:
    return lambda *args, cast: (each(*args, cast=cast),)


@singledispatch
def shape_of(op: Op, rank: RankBinding) -> Each | None:
    """The shape of what `op` gives, from its operands; None for what is no tensor."""
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
def _same(op: Op, rank: RankBinding) -> Each:
    return lambda x, *_, cast: (x.shape, x.dtype)


@shape_of.register(Shard)
@shape_of.register(ReduceScatter)
def _cut(op: Shard | ReduceScatter, rank: RankBinding) -> Each:
    def shape(x: Tensor, length: Any = None, *, cast: Any) -> Form:
        whole = x.shape[op.dim] if length is None else rank.layout.padded(length)
        return _sized(x, op.dim, whole // _size(op, rank)), x.dtype

    return shape


@shape_of.register
def _gathered(op: Gather, rank: RankBinding) -> Each:
    def shape(x: Tensor, length: Any = None, *, cast: Any) -> Form:
        whole = x.shape[op.dim] * _size(op, rank) if length is None else length
        return _sized(x, op.dim, whole), x.dtype

    return shape


@shape_of.register
def _exchanged(op: AllToAll, rank: RankBinding) -> Each:
    def shape(x: Tensor, *, cast: Any) -> Form:
        sizes, size = list(x.shape), _size(op, rank)
        sizes[op.scatter_dim] //= size
        sizes[op.gather_dim] *= size
        return sizes, x.dtype

    return shape


@shape_of.register
def _attended(op: Attention, rank: RankBinding) -> Each:
    def shape(q: Tensor, k: Tensor, v: Tensor, *_: Any, cast: Any) -> Form:
        dtype = q.dtype if cast is None or q.dtype == torch.float64 else cast
        sizes = (*q.shape[:3], v.shape[3] + 1) if op.lse else (*q.shape[:3], v.shape[3])
        return sizes, accumulator_dtype(dtype) if op.lse else dtype

    return shape


@shape_of.register
def _projected(op: ColumnLinear, rank: RankBinding) -> Each:
    def shape(x: Tensor, shard: Tensor, weight: Tensor, *_: Any, cast: Any) -> Form:
        dtype = x.dtype if cast is None or x.dtype == torch.float64 else cast
        return (*x.shape[:-1], weight.shape[0]), dtype

    return shape


@shape_of.register
def _lost(op: VocabularyLoss, rank: RankBinding) -> Each:
    return lambda logits, target, *, cast: (() if op.reduce else target.shape, logits.dtype)


@shape_of.register
def _in_chunks(op: ChunkedLoss, rank: RankBinding) -> Each:
    def shape(x: Tensor, shard: Any, weight: Any, bias: Any, again: Any, target: Tensor, *_: Any,
              cast: Any) -> Form:  # fmt: skip
        return () if op.reduce else target.shape, op.dtype

    return shape


@shape_of.register
def _by_tokens(op: ChunkedMlp, rank: RankBinding) -> Each:
    def shape(x: Tensor, shard: Any, again: Any, *parameters: Tensor, cast: Any) -> Form:
        with torch.autocast(x.device.type, cast, enabled=cast is not None):
            imagined = op.body(linear, x, *parameters)
        return imagined.shape, imagined.dtype

    return shape


@shape_of.register
def _windowed(op: Windowed, rank: RankBinding) -> Each:
    def shape(*args: Any, cast: Any) -> Form:
        imagined = op.window(*args)
        return imagined.shape, imagined.dtype

    return shape


@shape_of.register
def _running(op: RunningSum, rank: RankBinding) -> Each:
    return lambda x, *, cast: (x.shape, op.dtype or x.dtype)


@shape_of.register
def _by_unit(op: TokenLocal, rank: RankBinding) -> Each:
    def shapes(inputs: list[Tensor], parameters: list[Tensor], *, cast: Any) -> list[Form]:
        sizes = op.shapes([x.shape for x in inputs], rank.context.sizes)
        return list(zip(sizes, op.unit.results.dtypes, strict=True))

    return shapes
