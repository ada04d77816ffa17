"""Inserts what turns each value's native placement into the one an operation needs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from seqcomp.capture.edit import module_path, scope_of
from seqcomp.capture.sizes import LENGTH_SYMBOL, Size, SizeEmitter, common, divide, product
from seqcomp.layout.parts import part_size
from seqcomp.lowering import ops
from seqcomp.placement.rule import MeshView
from seqcomp.placement.spec import Dim, Factor, Spec, merged, whole
from seqcomp.runtime.collectives import Cotangent

aten = torch.ops.aten


class Redistributor:
    """Makes local nodes with a wanted placement; equal wishes share one node."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        mesh: MeshView,
        sizes: SizeEmitter,
        cotangent: Cotangent = "partial",
        label: str = "",
    ):
        self._label = label
        self._cotangent: Cotangent = cotangent
        self._graph = graph
        self._mesh = mesh
        self._sizes = sizes
        self._made: dict[tuple[Node, Spec], Node] = {}
        self._promises: dict[Node, Node] = {}
        self._padded: Node | None = None

    def get(self, node: Node, have: Spec, want: Spec, before: Node) -> Node:
        """`node` (placed as `have`) as `want`, computed before `before`."""
        if have == want:
            return node
        key = (node, want)
        if key not in self._made:
            self._made[key] = self._build(node, have, want, before)
        return self._made[key]

    def redistributed(self) -> Iterator[tuple[Node, Spec, Node]]:
        """(value, wanted placement, the node that has it) of everything made so far."""
        for (node, want), value in self._made.items():
            yield node, want, value

    def _build(self, node: Node, have: Spec, want: Spec, before: Node) -> Node:
        scope, value = common_scope(node, before), node
        ends: list[tuple[Any, tuple[Any, ...]]] = []
        for index, (old, new) in enumerate(zip(have.dims, want.dims, strict=True)):
            if old == new:
                continue
            if self._mesh.is_uneven(old):  # gathered in parts of the size of the largest
                axes, size = have.axes_of(index), int(have.size(index))
                parts = self._mesh.degree(axes)
                even = sympy.Integer(parts * part_size(size, parts))
                value = self.call(ops.PadPart(index, axes, size), (value,), before, scope, node)
                ends.append((aten.slice.Tensor, (index, 0, size)))
                have = have.with_dim(index, (Factor(even, axes),))
                want = want.with_dim(index, whole(even))
            if self._mesh.is_uneven(new):  # cut at last, from the whole
                ends.append((self._part(index, new), ()))
                want = want.with_dim(index, whole(want.size(index)))
        value = self._resharded(value, node, have, want, before, scope)
        for target, args in ends:
            value = self.call(target, (value, *args), before, scope, node)
        return value

    def part_of(self, weight: Node, want: Spec, before: Node) -> Node:
        """What this rank uses of a weight that is whole: a view, where a cut would be a copy."""
        key = (weight, want)
        if key not in self._made:
            scope, value = common_scope(weight, before), weight
            for index, dim in enumerate(want.dims):
                if want.axes_of(index):
                    value = self.call(self._part(index, dim), (value,), before, scope, weight)
            self._made[key] = value
        return self._made[key]

    @staticmethod
    def _part(index: int, dim: Dim) -> ops.Part:
        (factor,) = dim
        return ops.Part(index, factor.axes, int(factor.size))

    def _resharded(
        self, value: Node, node: Node, have: Spec, want: Spec, before: Node, scope: dict[str, Any]
    ) -> Node:
        label = self._label or module_path(before)
        sum_axes = tuple(a for a in have.partial if a not in want.partial)
        target = self._scatter_dim(have, want, sum_axes)
        if target is not None:
            op: ops.Op = ops.ReduceScatter(target, sum_axes, label)
            length = self._length(have.dims[target][0].size, have.axes_of(target), before)
            value = self.call(op, (value, *length), before, scope, node)
            have = have.with_dim(target, want.dims[target])
        elif sum_axes:
            value = self.call(
                ops.AllReduce(sum_axes, "partial", label), (value,), before, scope, node
            )
        exchange = self._exchanged(have, want)
        if exchange is not None:
            op = ops.AllToAll(*exchange, label)
            return self.call(op, (value,), before, scope, node)
        # Everything is gathered before anything is cut: an axis that moves from one dim to
        # another would otherwise cut values that it is about to gather.
        between = [_kept(old, new) for old, new in zip(have.dims, want.dims, strict=True)]
        for index, (old, new) in enumerate(zip(have.dims, between, strict=True)):
            value = self._reshard_dim(value, index, old, new, before, scope, label)
        for index, (old, new) in enumerate(zip(between, want.dims, strict=True)):
            value = self._reshard_dim(value, index, old, new, before, scope, label)
        return value

    def _exchanged(self, have: Spec, want: Spec) -> tuple[int, int, tuple[str, ...]] | None:
        """(dim to cut, dim to gather, axes) where the tensor axis moves from one dim to another."""
        axes = (self._mesh.tensor,) if self._mesh.tensor else ()
        moved = [
            (i, old[0].axes, new[0].axes)
            for i, (old, new) in enumerate(zip(have.dims, want.dims, strict=True))
            if old != new and len(old) == len(new) == 1
        ]
        changed = sum(old != new for old, new in zip(have.dims, want.dims, strict=True))
        if not axes or len(moved) != 2 or changed != 2 or have.partial != want.partial:
            return None
        for (i, old_i, new_i), (j, old_j, new_j) in (moved, moved[::-1]):
            if old_i == (*new_i, *axes) and new_j == (*old_j, *axes):
                return j, i, axes
        return None

    @staticmethod
    def _scatter_dim(have: Spec, want: Spec, axes: tuple[str, ...]) -> int | None:
        """The dim that the summed axes cut afterwards, where one reduce-scatter does both."""
        for index, (old, new) in enumerate(zip(have.dims, want.dims, strict=True)):
            if len(old) == len(new) == 1 and axes and new[0].axes == (*old[0].axes, *axes):
                return index
        return None

    def _reshard_dim(
        self,
        value: Node,
        index: int,
        old: Dim,
        new: Dim,
        before: Node,
        scope: dict[str, Any],
        label: str,
    ) -> Node:
        steps = refine(old, new)
        changed = [s for s in steps if s[1] != s[2]]
        if not changed:
            return value
        source = value
        opened = len(steps) > 1
        if opened:
            local = [self.local_dim((Factor(size, axes),), before) for size, axes, _ in steps]
            value = self.call(aten.unflatten.int, (value, index, local), before, scope, source)
        for offset, (size, have, need) in enumerate(steps):
            gone = tuple(a for a in have if a not in need)
            fresh = tuple(a for a in need if a not in have)
            at = index + offset
            length = self._length(size, tuple(a for a in have if a in need), before)
            if gone:
                assert have[-len(gone) :] == gone, f"{gone} of {have} gathered"
                op = ops.Gather(at, gone, self._cotangent, label)
                value = self.call(op, (value, *length), before, scope, source)
            if fresh:
                value = self.call(ops.Shard(at, fresh), (value, *length), before, scope, source)
        if opened:
            last = index + len(steps) - 1
            value = self.call(aten.flatten.using_ints, (value, index, last), before, scope, source)
        return value

    def remembered(self, gathered: Node) -> Node:
        """The promise to gather `gathered` again, shared by all linears that use it."""
        if gathered not in self._promises:
            op = gathered.target
            assert isinstance(op, ops.Gather)
            with self._graph.inserting_after(gathered):
                node = self._graph.call_function(
                    ops.Remember(op.dim, op.axes, 0, op.label), gathered.args
                )
            node.meta["nn_module_stack"] = dict(gathered.meta["nn_module_stack"])
            self._promises[gathered] = node
        return self._promises[gathered]

    def count_promises(self) -> None:
        """Tells each promise how many linears will ask for it, once all of them are known."""
        for node in self._promises.values():
            assert isinstance(node.target, ops.Remember)
            node.target = replace(node.target, uses=len(node.users))

    def _length(self, size: Size, kept: tuple[str, ...], before: Node) -> tuple[Any, ...]:
        """The operand that says how much of a sequence is no padding, where it becomes or was
        whole: tokens that `kept` axes share out stay padded."""
        padded = self._mesh.pads and size == LENGTH_SYMBOL and not kept
        return (self._sizes.emit(size, before),) if padded else ()

    def hidden(self, value: Node, index: int, dim: Dim, at: int, before: Node) -> Node:
        """`value` with zeros for the padding in the at-th factor of a dim."""
        length = self._sizes.emit(LENGTH_SYMBOL, before)
        args = (value, length, self.local_dim(dim[at + 1 :], before))
        return self.call(
            ops.HidePadding(index, dim[at].axes), args, before, common_scope(value, before), value
        )

    def padded_length(self, before: Node) -> Node:
        """The length with its padding."""
        if self._padded is None:
            length = self._sizes.emit(LENGTH_SYMBOL, before)
            assert isinstance(length, Node)
            with self._graph.inserting_after(length):
                self._padded = self._graph.call_function(ops.PaddedLength(), (length,))
            self._padded.meta["nn_module_stack"] = {}
            self._padded.meta["root_size"] = True
        return self._padded

    def local_dim(self, dim: Dim, before: Node) -> Any:
        """A rank's size of a dim, as a node or a number."""
        total: Any = 1
        for factor in dim:
            if self._mesh.is_padded(factor):
                degree = self._mesh.degree(factor.axes)
                size = self.floordiv(self.padded_length(before), degree, before)
            else:
                size = self.local_size(factor.size, factor.axes, before)
            if isinstance(total, int) and isinstance(size, int):
                total *= size
            elif total == 1:
                total = size
            else:
                with self._graph.inserting_before(before):
                    total = self._graph.call_function(operator.mul, (total, size))
                total.meta["nn_module_stack"] = dict(before.meta.get("nn_module_stack") or {})
        return total

    def size(self, size: Size, before: Node) -> Any:
        """A global size as a node or a number."""
        return self._sizes.emit(size, before)

    def local_size(self, size: Size, axes: Iterable[str], before: Node) -> Any:
        """A global size, or a node of it, divided by the degrees of the axes."""
        total = self._sizes.emit(size, before)
        degree = self._mesh.degree(axes)
        return self.floordiv(total, degree, before)

    def floordiv(self, total: Any, degree: int, before: Node) -> Any:
        if degree == 1:
            return total
        if isinstance(total, int):
            return total // degree
        with self._graph.inserting_before(before):
            node = self._graph.call_function(_floordiv, (total, degree))
        node.meta["nn_module_stack"] = dict(before.meta.get("nn_module_stack") or {})
        return node

    def call(
        self, target: Any, args: Sequence[Any], before: Node, scope: dict[str, Any], like: Node
    ) -> Node:
        with self._graph.inserting_before(before):
            node = self._graph.call_function(target, tuple(args))
        node.meta["nn_module_stack"] = scope
        node.meta["source"] = like.meta.get("source", like)
        return node


class TornDimError(Exception):
    """Two factorings of a dim cut across each other: one becomes the other by way of the whole."""


def _kept(old: Dim, new: Dim) -> Dim:
    """The dim with the axes that it has before and after; the whole where neither fits."""
    try:
        steps = refine(old, new)
    except TornDimError:
        return merged(tuple(Factor(f.size) for f in old))
    return merged(
        tuple(Factor(size, tuple(a for a in was if a in will)) for size, was, will in steps)
    )


def _floordiv(total: int, degree: int) -> int:
    return total // degree


def refine(old: Dim, new: Dim) -> list[tuple[Size, tuple[str, ...], tuple[str, ...]]]:
    """Common refinement of two factorings of one dim: (size, axes before, axes after) each."""
    left, right = list(old), list(new)
    assert product(f.size for f in old) == product(f.size for f in new), f"{old} against {new}"
    steps: list[tuple[Size, tuple[str, ...], tuple[str, ...]]] = []
    one = sympy.Integer(1)
    while left or right:
        a = left[0] if left else Factor(one)
        b = right[0] if right else Factor(one)
        if a.size == b.size:
            size = a.size
            left, right = left[1:], right[1:]
        elif (rest := divide(a.size, b.size)) is not None and not a.axes:
            size, left, right = b.size, [Factor(rest), *left[1:]], right[1:]
        elif (rest := divide(b.size, a.size)) is not None and not b.axes:
            size, left, right = a.size, left[1:], [Factor(rest), *right[1:]]
        else:
            size = common(a.size, b.size)
            if size == 1 or a.axes or b.axes:
                raise TornDimError(f"{old} against {new}")
            left = [Factor(divide(a.size, size)), *left[1:]]
            right = [Factor(divide(b.size, size)), *right[1:]]
        if size == 1:
            continue
        if steps and not a.axes and not b.axes and not steps[-1][1] and not steps[-1][2]:
            steps[-1] = (product((steps[-1][0], size)), (), ())
        else:
            steps.append((size, a.axes, b.axes))
    return steps


def common_scope(first: Node, second: Node) -> dict[str, Any]:
    """Module stack of the lowest module whose forward can see both nodes."""
    one = first.meta.get("nn_module_stack") or {}
    two = second.meta.get("nn_module_stack") or {}
    pairs = zip(scope_of(one), scope_of(two), strict=False)
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    keep, result = 0, {}
    for key, entry in two.items():
        if scope_of({key: entry}):
            keep += 1
            if keep > shared:
                break
        result[key] = entry
    return result
