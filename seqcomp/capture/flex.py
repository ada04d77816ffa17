"""FlexAttention in a capture, written out on all pairs so that it reads as any attention does.

A mod is in the graph as the program of one pair (flex_trace.py). Here the same operations are
written on tensors [B, H, q, k] that broadcast, on fake tensors and for reading only: a look-up
x[b, q_idx] becomes x itself, bias[h, q_idx - kv_idx] a table with one row per distance. What acts
on the pair in another way is refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from seqcomp.capture.eager import Written, number_in, scores_behind
from seqcomp.capture.edit import Editor, argument, is_tensor, op_name, place_of
from seqcomp.capture.export import Capture
from seqcomp.capture.fills import filled_in, sum_of
from seqcomp.capture.flex_trace import BATCH, HEAD, KEY, QUERY
from seqcomp.capture.kinds import is_pointwise
from seqcomp.capture.sizes import Size
from seqcomp.diagnostics import PlanError, diagnostic

aten = torch.ops.aten


def find_flex(capture: Capture) -> list[Written]:
    """All calls of FlexAttention; adds nodes, and splits what uses a log-sum-exp off its output.

    Raises PlanError SC303 for mods that act on more than their pair.
    """
    shared: dict[Any, Node] = {}
    return [
        _written(capture, node, shared)
        for node in list(capture.graph.nodes)
        if node.op == "call_function" and op_name(node) == "seqcomp.flex_attention"
    ]


def _written(capture: Capture, node: Node, shared: dict[Any, Node]) -> Written:
    q, k, v, score, seen = node.args
    writer = _Writer(capture, node, shared)
    product = writer.product()
    modified, mask = writer.on_pairs(score), _unless_all(writer.on_pairs(seen))
    state = scores_behind(capture, modified)
    softcap, added, mod, filled = 0.0, None, None, None
    if state is None:
        mod, scale = (modified, product), float(product.args[1])
    else:
        softcap, scale = state.softcap, state.scale
        added = sum_of(capture, state.masks, before=node)
        filled = filled_in(capture, state.masks, before=node)
        if added is not None and mask is not None:
            added = writer.emit(aten.add.Tensor, (added, writer.hidden(mask, like=added)))
    out, lse = _outputs(capture, node)
    return Written(
        out=out,
        q=q,
        k=k,
        v=v,
        scale=scale,
        mask=mask if added is None else added,
        softcap=softcap,
        lse=lse,
        mod=mod,
        filled=filled,
    )


def _unless_all(mask: Node) -> Node | None:
    """None for a mask that hides nothing."""
    everything = op_name(mask) == "aten.full" and mask.args[1] is True
    return None if everything else mask


def _outputs(capture: Capture, node: Node) -> tuple[Node, bool]:
    """(the attention's one result, whether its last column is the log-sum-exp)."""
    found = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    editor, after = Editor(capture), node.next
    if 0 not in found:
        found[0] = editor.call(operator.getitem, (node, 0), before=after, like=node)
    if 1 not in found:
        return found[0], False
    out, lse = found[0], found[1]
    while after in (out, lse):
        after = after.next

    def made(target: Any, *args: Any) -> Node:
        return editor.call(target, args, before=after, like=node)

    own, wide, width = out.meta["val"].dtype, lse.meta["val"].dtype, out.meta["val"].shape[3]
    parts = [made(aten.to.dtype, out, wide), made(aten.unsqueeze.default, lse, 3)]
    whole = made(aten.cat.default, parts, 3)
    values = made(aten.to.dtype, made(aten.slice.Tensor, whole, 3, 0, width), own)
    out.replace_all_uses_with(values, delete_user_cb=lambda user: user is not parts[0])
    column = made(aten.select.int, whole, 3, width)
    lse.replace_all_uses_with(column, delete_user_cb=lambda user: user is not parts[1])
    return whole, True


class _Writer:
    """Writes the programs of one call. `shared`: what earlier calls have written."""

    def __init__(self, capture: Capture, node: Node, shared: dict[Any, Node]):
        self._capture = capture
        self._node = node
        self._editor = Editor(capture)
        self._shared = shared
        self._known: dict[Node, Node] = {}
        q, k = node.args[:2]
        self._sizes: dict[int, Size] = dict(
            zip(range(4), (*capture.shape(q)[:3], capture.shape(k)[2]), strict=True)
        )
        self._of_pair: dict[Node, frozenset[int]] = {}

    def emit(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Node:
        """One operation, or the same one that has been written before."""
        key = (target, str(args), str(kwargs))
        if key not in self._shared:
            self._shared[key] = self._editor.call(target, args, kwargs, before=self._node)
        return self._shared[key]

    def product(self) -> Node:
        """The scores of all pairs; the node that a score_mod's reading ends at."""
        q, k, _, score = self._node.args[:4]
        found = (n for n in _behind(score) if op_name(n) == "seqcomp.flex_score")
        source = next(found, None)
        if source is None:
            raise self._refused(score, "a result that does not use the score")
        groups = int(self._sizes[HEAD]) // int(k.meta["val"].shape[1])
        call = self._editor.call
        if groups > 1:
            k = call(aten.repeat_interleave.self_int, (k, groups, 1), before=self._node)
        k = call(aten.transpose.int, (k, 2, 3), before=self._node)
        scores = call(aten.matmul.default, (q, k), before=self._node)
        if scores.meta["val"].dtype != source.meta["val"].dtype:
            wide = source.meta["val"].dtype
            scores = call(aten.to.dtype, (scores, wide), before=self._node)
        scores = call(aten.mul.Tensor, (scores, source.args[2]), before=self._node)
        self._known[source] = scores
        return scores

    def hidden(self, mask: Node, like: Node) -> Node:
        """0 where seen, else -inf."""
        dtype = like.meta["val"].dtype
        zero, low = (self._number(x, dtype) for x in (0.0, float("-inf")))
        return self.emit(aten.where.self, (mask, zero, low))

    def on_pairs(self, node: Node) -> Node:
        """What the tensor without dims `node` is for all pairs."""
        if node not in self._known:
            found = self._written(node)
            if found.meta["val"].dtype != node.meta["val"].dtype:
                raise self._refused(node, f"{op_name(node)} on mixed dtypes")
            self._known[node] = found
        return self._known[node]

    def _written(self, node: Node) -> Node:
        if not self._depends(node):
            number = number_in(self._capture, node)
            if number is not None:
                return self._number(number, node.meta["val"].dtype)
            return self.emit(aten.view.default, (node, [1, 1, 1, 1]))
        name = op_name(node)
        if name == "seqcomp.flex_position":
            return self._position(node.args[1])
        if name == "aten.index":
            return self._looked_up(node)
        made = _CONSTANTS.get(name)
        if made is not None:
            value = argument(node, 1, "fill_value") if made is _GIVEN else made
            return self._number(value, node.meta["val"].dtype)
        if not is_pointwise(node):
            raise self._refused(node, f"{name}, which does not act on each pair alone")

        def given(item: Node) -> Node:
            return self.on_pairs(item) if is_tensor(item) else item

        return self.emit(node.target, map_arg(node.args, given), map_arg(node.kwargs, given))

    def _number(self, value: Any, dtype: torch.dtype) -> Node:
        value = bool(value) if dtype == torch.bool else value
        if not dtype.is_floating_point and dtype != torch.bool:
            value = int(value)
        device = self._node.args[0].meta["val"].device
        return self.emit(
            aten.full.default, ([1, 1, 1, 1], value), {"dtype": dtype, "device": device}
        )

    def _depends(self, node: Node) -> frozenset[int]:
        """The dims of the pair that a value depends on (also of its score: all of them)."""
        if node not in self._of_pair:
            name = op_name(node) if node.op == "call_function" else ""
            if name == "seqcomp.flex_position":
                found = frozenset({node.args[1]})
            elif name == "seqcomp.flex_score":
                found = frozenset(range(4))
            else:
                parts = (self._depends(n) for n in node.all_input_nodes if is_tensor(n))
                found = frozenset().union(*parts)
            self._of_pair[node] = found
        return self._of_pair[node]

    def _size(self, dim: int) -> Any:
        """The size of a dim of [B, H, q, k]: a number, or the node that gives it."""
        size = self._sizes[dim]
        if size.is_Integer:
            return int(size)
        key = ("size", size)
        if key not in self._shared:
            source = self._node.args[1 if dim == KEY else 0]
            at = 2 if dim == KEY else dim
            self._shared[key] = self._editor.call(
                aten.sym_size.int, (source, at), before=self._node
            )
        return self._shared[key]

    def _range(self, dim: int) -> Node:
        device = self._node.args[0].meta["val"].device
        return self.emit(aten.arange.default, (self._size(dim),), {"device": device})

    def _position(self, dim: int) -> Node:
        return self._placed(self._range(dim), [dim])

    def _placed(self, x: Node, dims: list[int]) -> Node:
        """[B, H, q, k] from a tensor whose dims are some of these."""
        order = sorted(range(len(dims)), key=dims.__getitem__)
        if order != list(range(len(dims))):
            x = self.emit(aten.permute.default, (x, order))
        for dim in range(4):
            if dim not in dims:
                x = self.emit(aten.unsqueeze.default, (x, dim))
        return x

    def _looked_up(self, node: Node) -> Node:
        base, found = self._indices(node)
        if len(found) != base.meta["val"].ndim:
            raise self._refused(node, f"a look-up of whole rows of {base.name}")
        dims = [_own_dim(item) for item in found]
        others = [i for i, dim in enumerate(dims) if dim is None or dims.index(dim) != i]
        if len(others) == 1:
            at = others[0]
            depends = self._depends(found[at])
            kept = [dim for i, dim in enumerate(dims) if i != at]
            if len(depends) == 1 and not depends & set(kept):
                base = self.emit(aten.index_select.default, (base, at, self._vector(found[at])))
                dims[at], others = next(iter(depends)), []
            elif depends >= {QUERY, KEY} and HEAD not in depends and set(kept) <= {HEAD}:
                return self._of_table(base, at, found[at], by_head=bool(kept))
        elif len(others) == len(found):
            depends = self._depends(node)
            if len(depends) == 1:
                vectors = [self._vector(item) for item in found]
                base = self.emit(aten.index.Tensor, (base, vectors))
                dims, others = [next(iter(depends))], []
        if others:
            raise self._refused(node, f"a look-up in {base.name} by several computed indices")
        for at, dim in enumerate(dims):
            base = self._first(base, at, dim, node)
        return self._placed(base, dims)

    def _indices(self, node: Node) -> tuple[Node, list[Node]]:
        """The tensor behind x[i][j] or x[i, j], and the index of each of its first dims."""
        source, indices = node.args
        if any(item is None for item in indices):
            raise self._refused(node, "a look-up of whole rows")
        if not self._depends(source):
            return source, list(indices)
        if op_name(source) == "aten.select":  # x[i][0]: the number first
            inner, dim, index = source.args
            if op_name(inner) == "aten.index" and self._depends(inner):
                base, before = self._indices(inner)
                at = dim % inner.meta["val"].ndim + len(before)
                return self.emit(aten.select.int, (base, at, index)), [*before, *indices]
        if op_name(source) != "aten.index":
            raise self._refused(source, f"a look-up in the result of {op_name(source)}")
        base, before = self._indices(source)
        return base, [*before, *indices]

    def _vector(self, item: Node) -> Node:
        """[n] of what depends on one dim only."""
        return self.emit(aten.reshape.default, (self.on_pairs(item), [-1]))

    def _of_table(self, table: Node, at: int, index: Node, *, by_head: bool) -> Node:
        """table[h, f(q, k)]: the row f of a table [rows, H], as relative biases are stored."""
        if not by_head:
            table = self.emit(aten.unsqueeze.default, (table, 1))
        elif at == 1:
            table = self.emit(aten.permute.default, (table, [1, 0]))
        if by_head:
            table = self._first(table, 1, HEAD, index)
        batched = BATCH in self._depends(index)
        rows = self.emit(aten.squeeze.dims, (self.on_pairs(index), [1] if batched else [0, 1]))
        found = self.emit(aten.embedding.default, (table, rows))
        if batched:
            return self.emit(aten.permute.default, (found, [0, 3, 1, 2]))
        return self.emit(
            aten.unsqueeze.default, (self.emit(aten.permute.default, (found, [2, 0, 1])), 0)
        )

    def _first(self, x: Node, at: int, dim: int, node: Node) -> Node:
        """As many entries along `at` as the dim of the pairs has; a longer table is cut."""
        own, size = self._capture.shape(x)[at], self._sizes[dim]
        if own == size:
            return x
        whole = self.emit(aten.slice.Tensor, (x, at, 0, self._size(dim)))
        if self._capture.shape(whole)[at] != size:
            raise self._refused(node, f"{own} entries looked up at {size} positions")
        return whole

    def _refused(self, node: Node, found: str) -> PlanError:
        return PlanError(
            [
                diagnostic(
                    "SC303",
                    where=place_of(node),
                    found=f"a FlexAttention mod with {found}",
                    legal="element-wise operations on score, b, h, q_idx, kv_idx and on tensors "
                    "indexed by them",
                    help="compute it outside of the mod, per token or per head",
                )
            ]
        )


_GIVEN = object()
_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("aten.new_ones", "aten.ones_like"), 1),
    **dict.fromkeys(("aten.new_zeros", "aten.zeros_like"), 0),
    **dict.fromkeys(("aten.new_full", "aten.full_like"), _GIVEN),
}


def _own_dim(item: Node) -> int | None:
    """The dim whose index itself an operand is."""
    while item.op == "call_function":
        if op_name(item) == "seqcomp.flex_position":
            dim: int = item.args[1]
            return dim
        plain = op_name(item) in ("aten.to", "aten.alias", "aten.clone", "aten.detach")
        if not plain and not (op_name(item) in ("aten.add", "aten.sub") and item.args[1] == 0):
            return None
        item = item.args[0]
    return None


def _behind(node: Node) -> list[Node]:
    """All that a value is made of, itself included."""
    found, work = {node: None}, [node]
    while work:
        for source in work.pop().all_input_nodes:
            if source not in found:
                found[source] = None
                work.append(source)
    return list(found)
