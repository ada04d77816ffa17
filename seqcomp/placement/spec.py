"""Where a value lives: per tensor dim the factors it is made of and the axes that shard them.

A dim is a product of factors in row-major order. [B, S, H] flattened to [B*S, H] keeps the
factors (B, S) in its first dim, so that a sharded S survives flattening and comes back when the
dim is viewed apart again. A dim of one sharded factor is DTensor's Shard(dim); a sharded factor
that is not the first of its dim is DTensor's _StridedShard; see `placements`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from seqcomp.capture.sizes import Size, common, divide, evaluate, product


@dataclass(frozen=True)
class Factor:
    """A global size and the mesh axes (nesting order) among which it is divided."""

    size: Size
    axes: tuple[str, ...] = ()


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Spec:
    """Placement of one tensor. `partial` axes hold summands of the value."""

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that shard some dim."""
        return tuple(a for dim in self.dims for f in dim for a in f.axes)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        return tuple(a for f in self.dims[dim] for a in f.axes)

    @property
    def is_replicated(self) -> bool:
        return not self.axes and not self.partial

    def size(self, dim: int) -> Size:
        return product(f.size for f in self.dims[dim])

    def without(self, axes: Iterable[str]) -> Spec:
        """The same with nothing sharded over `axes`."""
        gone = set(axes)
        return replace(
            self,
            dims=tuple(
                merged(tuple(Factor(f.size, tuple(a for a in f.axes if a not in gone)) for f in d))
                for d in self.dims
            ),
        )

    def with_dim(self, index: int, dim: Dim) -> Spec:
        return replace(self, dims=(*self.dims[:index], dim, *self.dims[index + 1 :]))

    def placements(
        self, axes: Sequence[str], sizes: Mapping[sympy.Symbol, int]
    ) -> tuple[Placement, ...]:
        """DTensor placements on a mesh with these axes (sizes give B and S their numbers)."""
        return tuple(self._placement(axis, sizes) for axis in axes)

    def _placement(self, axis: str, sizes: Mapping[sympy.Symbol, int]) -> Placement:
        if axis in self.partial:
            return Partial("sum")
        for index, dim in enumerate(self.dims):
            before = 1
            for factor in dim:
                if axis in factor.axes:
                    if before == 1:
                        return Shard(index)
                    return _StridedShard(index, split_factor=before)
                before *= evaluate(factor.size, sizes)
        return Replicate()


def merged(dim: Dim) -> Dim:
    """Adjacent factors that no axis shards are one factor; sizes of 1 vanish."""
    result: list[Factor] = []
    for factor in dim:
        if factor.size == 1 and not factor.axes:
            continue
        if result and not result[-1].axes and not factor.axes:
            result[-1] = Factor(sympy.expand(result[-1].size * factor.size))
        else:
            result.append(factor)
    return tuple(result)


def is_uneven(factor: Factor, degrees: Mapping[str, int]) -> bool:
    """Whether the axes do not divide the size, so that the last parts are shorter.

    Such a factor is alone in its dim. Batch, length and heads are divided evenly or not at all.
    """
    degree = math.prod(degrees.get(a, 1) for a in factor.axes)
    return bool(factor.size.is_Integer and int(factor.size) % degree)


def whole(size: Size) -> Dim:
    return merged((Factor(size),))


def replicated(shape: Iterable[Size]) -> Spec:
    return Spec(tuple(whole(size) for size in shape))


def regroup(
    dims: Sequence[Dim], shape: Sequence[Size], degrees: Mapping[str, int]
) -> tuple[Dim, ...] | Factor:
    """Distributes the factors of `dims` over a new shape of the same number of elements.

    `degrees` are the axes that deal out a dim in even contiguous pieces: such a factor may be
    cut into (outer, inner) where the outer part still divides evenly. Returns the new dims, or
    the sharded factor that the new shape would tear.
    """
    queue = list(merged(tuple(f for dim in dims for f in dim)))
    uneven = [f for f in queue if is_uneven(f, degrees)]
    result: list[Dim] = []
    for size in shape:
        rest, dim = size, []
        while rest != 1:
            if not queue:
                return Factor(size)
            head = queue[0]
            if (quotient := divide(rest, head.size)) is not None:
                dim.append(queue.pop(0))
                rest = quotient
                continue
            if head.axes:
                if head in uneven:
                    return head
                inner = divide(head.size, rest)
                degree = math.prod(degrees.get(a, 0) for a in head.axes)
                if inner is None or not rest.is_Integer or not degree or int(rest) % degree:
                    return head
                dim.append(Factor(rest, head.axes))
                queue[0] = Factor(inner)
                rest = sympy.Integer(1)
                continue
            part = common(head.size, rest)
            left = divide(head.size, part)
            if part == 1 or left is None:
                return head
            dim.append(Factor(part))
            queue[0] = Factor(left)
            rest = divide(rest, part)
        result.append(merged(tuple(dim)))
    for factor in uneven:  # parts of unequal size can be padded in a dim of their own only
        if (factor,) not in result:
            return factor
    # Every leftover factor is of size 1 by the equality of element counts.
    return tuple(result)
