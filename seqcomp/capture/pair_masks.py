"""Mask subgraph -> a program on pairs of positions (runtime.attention.pair_mask).

Followed from the attention's mask argument upwards through everything that acts on each (query,
key) pair alone; where the graph is a vector over queries or over keys only, the walk stops and the
vector becomes an input. What mixes pairs becomes an input too, as the whole S x S tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name, transposed_dims
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import is_pointwise
from seqcomp.capture.mask_values import Affine, Choice, Truth
from seqcomp.capture.masks import MaskReader
from seqcomp.capture.sizes import Size
from seqcomp.runtime.attention.pair_mask import (
    Apply,
    Leaf,
    Lookup,
    Number,
    PairMask,
    Position,
    Score,
    Term,
    hides_from,
)

aten = torch.ops.aten

BATCH_DIM, HEAD_DIM, QUERY_DIM, KEY_DIM = range(4)
TABLE_DIM = -1  # rows of a table: it stands where the batch does, and is never cut


@dataclass(frozen=True)
class MaskInput:
    """A vector or matrix that a mask is made of; `dims[i]` is what its dim i is in [B, H, q, k]."""

    node: Node
    dims: tuple[int, ...]


@dataclass(frozen=True)
class PairReading:
    """A mask as a program and its inputs. `dense`: inputs that are S x S."""

    mask: PairMask
    inputs: tuple[MaskInput, ...]
    dense: tuple[Node, ...]


class PairReader:
    """Reads masks of one capture."""

    def __init__(self, capture: Capture, positions: MaskReader):
        self._capture = capture
        self._positions = positions

    def read(
        self,
        node: Node | None,
        queries: Size,
        keys: Size,
        mod: tuple[Node, Node] | None = None,
        *,
        filled: Node | None = None,
        sinks: bool = False,
    ) -> PairReading | None:
        """The mask [.., Sq, Sk] of an attention; None where it has no such dims.

        node None: nothing is hidden. mod: what the scores become, and the node that they are.
        filled, sinks: see `PairMask`.
        """
        walk = _Walk(self._capture, self._positions, queries, keys, mod[1] if mod else None)
        dtype, term = torch.bool, _TRUE
        if node is not None:
            value = node.meta["val"]
            if value.ndim > 4:
                return None
            dtype, term = value.dtype, walk.term(node, tuple(range(4 - value.ndim, 4)))
        scores = walk.term(mod[0], tuple(range(4))) if mod else None
        additive = dtype != torch.bool
        hidden = hides_from(dtype) if additive else 0.0
        fills = None
        if filled is not None and additive and not sinks:
            fills = walk.term(filled, tuple(range(4 - filled.meta["val"].ndim, 4)))
        trained = tuple(
            i
            for i, item in enumerate(walk.inputs)
            if (additive or mod) and self._needs_gradient(item.node)
        )
        tables = tuple(i for i, item in enumerate(walk.inputs) if TABLE_DIM in item.dims)
        return PairReading(
            PairMask(term, additive, hidden, trained, tables, scores, fills, sinks),
            tuple(walk.inputs),
            tuple(dict.fromkeys(walk.dense)),
        )

    def _needs_gradient(self, node: Node) -> bool:
        seen, work = {node}, [node] if node.meta["val"].is_floating_point() else []
        while work:
            item = work.pop()
            if item.op == "placeholder" and is_tensor(item):
                floating = item.meta["val"].is_floating_point()
                if floating and (
                    item.name in self._capture.parameters or item.meta["val"].requires_grad
                ):
                    return True
            for operand in item.all_input_nodes:
                # Comparisons and rounding to integers pass no gradient on.
                if operand in seen or not is_tensor(operand):
                    continue
                if operand.meta["val"].is_floating_point() and op_name(operand) != "aten.detach":
                    seen.add(operand)
                    work.append(operand)
        return False


class _Walk:
    def __init__(
        self,
        capture: Capture,
        positions: MaskReader,
        queries: Size,
        keys: Size,
        score: Node | None = None,
    ):
        self._capture = capture
        self._score = score
        self._positions = positions
        self._sizes = {QUERY_DIM: queries, KEY_DIM: keys}
        self._terms: dict[tuple[Node, tuple[int, ...]], Term] = {}
        self.inputs: list[MaskInput] = []
        self.dense: list[Node] = []

    def term(self, node: Node, dims: tuple[int, ...]) -> Term:
        """What `node` is on a pair, its dims being `dims` of [B, H, q, k]."""
        if node is self._score:
            return Score()
        key = (node, dims)
        if key not in self._terms:
            found = self._known(node, dims)
            if found is None and self._is_pairs(node, dims):
                found = self._pairs(node, dims)
            self._terms[key] = found if found is not None else self._input(node, dims)
        return self._terms[key]

    def _is_pairs(self, node: Node, dims: tuple[int, ...]) -> bool:
        shape = self._capture.shape(node)
        large = {dim for dim, size in zip(dims, shape, strict=True) if size != 1}
        return {QUERY_DIM, KEY_DIM} <= large

    def _input(self, node: Node, dims: tuple[int, ...]) -> Term:
        if self._is_pairs(node, dims):
            self.dense.append(node)
        entry = MaskInput(node, dims)
        if entry not in self.inputs:
            self.inputs.append(entry)
        return Leaf(self.inputs.index(entry), scalar=not dims)

    def _known(self, node: Node, dims: tuple[int, ...]) -> Term | None:
        """Values that are read as functions of positions alone."""
        value = self._positions.value(node)
        shape = self._capture.shape(node)
        dtype = node.meta["val"].dtype
        if isinstance(value, Affine):
            form = self._affine(value, dims, shape) if dims else None
            if form is None or dtype not in (torch.int64, torch.int32):
                return None
            return Apply(aten.to.dtype, (form, dtype))
        if isinstance(value, Truth):
            return self._truth(value, dims, shape)
        if isinstance(value, Choice):
            condition = self._truth(value.condition, dims, shape)
            if condition is None:
                return None
            if value.yes == value.no or condition == _TRUE:
                return Number(value.yes, dtype, scalar=not dims)
            return Apply(
                aten.where.self, (condition, Number(value.yes, dtype), Number(value.no, dtype))
            )
        return None

    def _truth(self, value: Truth, dims: tuple[int, ...], shape: Sequence[Size]) -> Term | None:
        if value.never:
            return Number(False, torch.bool)
        result: Term = _TRUE
        for part in sorted(value.terms, key=str):
            form = self._affine(part.form, dims, shape)
            if form is None:
                return None
            test = Apply(aten.ge.Scalar, (form, 0))
            result = test if result == _TRUE else Apply(aten.logical_and.default, (result, test))
        return result

    def _affine(self, value: Affine, dims: tuple[int, ...], shape: Sequence[Size]) -> Term | None:
        if not value.const.is_Integer or len(value.coeffs) != len(dims):
            return None
        total: Term = Number(int(value.const), torch.int64)
        for coeff, dim, size in zip(value.coeffs, dims, shape, strict=True):
            if coeff == 0 or size == 1:
                continue
            if dim not in self._sizes or size != self._sizes[dim]:
                return None
            position: Term = Position("query" if dim == QUERY_DIM else "key")
            if coeff != 1:
                position = Apply(aten.mul.Scalar, (position, coeff))
            total = Apply(aten.add.Tensor, (total, position))
        return total

    def _pairs(self, node: Node, dims: tuple[int, ...]) -> Term | None:
        """One operation on pairs; None where it mixes them."""
        if node.op != "call_function":
            return None
        name = op_name(node).removeprefix("aten.").strip("_")
        if name in ("expand", "expand_as", "broadcast_to", "clone", "contiguous", "alias",
                    "detach", "lift_fresh_copy"):  # fmt: skip
            return self._expanded(node.args[0], dims)
        if name == "repeat":
            return self._repeated(node, dims)
        if name in ("unsqueeze", "view", "reshape", "unsafe_view", "squeeze"):
            return self._reshaped(node, dims)
        order = transposed_dims(node)
        if order is not None:
            own = dict(zip(order, dims, strict=True))
            return self.term(node.args[0], tuple(own[i] for i in range(len(dims))))
        if name in ("tril", "triu"):
            return self._triangle(node, name, dims)
        if name == "embedding":
            return self._lookup(node, dims)
        if name == "slice":
            same = self._capture.shape(node) == self._capture.shape(node.args[0])
            return self.term(node.args[0], dims) if same else None
        if is_pointwise(node) and not _is_random(node):
            return self._pointwise(node, name, dims)
        return None

    def _broadcast(self, source: Node, dims: tuple[int, ...]) -> Term:
        return self.term(source, dims[len(dims) - source.meta["val"].ndim :])

    def _expanded(self, source: Node, dims: tuple[int, ...]) -> Term:
        found = self._broadcast(source, dims)
        if source.meta["val"].ndim == 0 and dims:  # now it counts in the promotion of dtypes
            return Apply(aten.reshape.default, (found, (1, 1, 1, 1)))
        return found

    def _repeated(self, node: Node, dims: tuple[int, ...]) -> Term | None:
        """Only of dims of size 1: anything else starts over at every copy."""
        shape = self._capture.shape(node.args[0])
        times = node.args[1][len(dims) - len(shape) :]
        whole = all(n == 1 or size == 1 for n, size in zip(times, shape, strict=True))
        return self._expanded(node.args[0], dims) if whole else None

    def _pointwise(self, node: Node, name: str, dims: tuple[int, ...]) -> Term | None:
        words = name.replace("bitwise_", "")
        if words in ("and", "or", "xor", "not") and node.meta["val"].dtype != torch.bool:
            return None

        def given(item: Any) -> Any:
            if isinstance(item, Node):
                tensor = is_tensor(item)
                item = item if tensor else self._as_tensor(item, node.meta["val"].device)
                return self._broadcast(item, dims)
            if isinstance(item, list | tuple):
                return tuple(given(x) for x in item)
            return item

        if name in ("type_as", "to"):
            return Apply(aten.to.dtype, (given(node.args[0]), node.meta["val"].dtype))
        args = tuple(given(item) for item in node.args)
        kwargs = tuple((key, given(item)) for key, item in node.kwargs.items())
        return Apply(node.target, args, kwargs)

    def _as_tensor(self, size: Node, device: torch.device) -> Node:
        """A size among the operands is an input like any other."""
        kwargs = {"dtype": torch.int64, "device": device}
        editor = Editor(self._capture)
        return editor.call(aten.scalar_tensor.default, (size,), kwargs, before=size.next)

    def _reshaped(self, node: Node, dims: tuple[int, ...]) -> Term | None:
        """Views that add or remove dims of size 1."""
        source = node.args[0]
        new, old = self._capture.shape(node), self._capture.shape(source)
        if [s for s in new if s != 1] != [s for s in old if s != 1]:
            return None
        kept = iter([dim for dim, size in zip(dims, new, strict=True) if size != 1])
        spare = [dim for dim, size in zip(dims, new, strict=True) if size == 1]
        unused = iter(spare + [d for d in range(4) if d not in set(dims)] + [-1] * len(old))
        own = tuple(next(kept if s != 1 else unused) for s in old)
        return self.term(source, own) if -1 not in own else None

    def _triangle(self, node: Node, name: str, dims: tuple[int, ...]) -> Term | None:
        diagonal = argument(node, 1, "diagonal", 0)
        if set(dims[-2:]) != {QUERY_DIM, KEY_DIM} or not isinstance(diagonal, int):
            return None
        if tuple(self._capture.shape(node)[-2:]) != tuple(self._sizes[d] for d in dims[-2:]):
            return None
        row, column = (Position("query" if d == QUERY_DIM else "key") for d in dims[-2:])
        gap = Apply(aten.sub.Tensor, (column, row))
        keep = aten.le.Scalar if name == "tril" else aten.ge.Scalar
        inside = Apply(keep, (gap, diagonal))
        dtype = node.meta["val"].dtype
        value = self.term(node.args[0], dims)
        return Apply(aten.where.self, (inside, value, Number(0, dtype)))

    def _lookup(self, node: Node, dims: tuple[int, ...]) -> Term | None:
        """A row per pair of a table [rows, heads] (the relative bias of T5)."""
        table, index = node.args[:2]
        columns = table.meta["val"].shape[-1]
        if table.meta["val"].ndim != 2 or (dims[-1] != HEAD_DIM and columns != 1):
            return None
        entry = MaskInput(table, (TABLE_DIM, HEAD_DIM))
        if entry not in self.inputs:
            self.inputs.append(entry)
        return Lookup(self.inputs.index(entry), self.term(index, dims[:-1]))


def _is_random(node: Node) -> bool:
    # Evaluated for each tile anew, it would be another mask each time.
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or (
        op_name(node) == "keyed_dropout"
    )


_TRUE = Number(True, torch.bool)
