"""An MLP of a block becomes one operation that runs in chunks of tokens.

Chosen by what it is worth: linears with element-wise work between them whose inner values are wider
than what goes in and out. It is made in as many chunks as make the inner values of one no larger
than what goes in; short sequences go at once (see runtime/chunked_mlp.py).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from seqcomp.capture.edit import op_name, scope_of
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext
from seqcomp.lowering.memory import KEPT
from seqcomp.lowering.redistribute import common_scope

_MOST = 64  # operations of one MLP
_SAME = {"aten.contiguous", "aten.alias", "aten.to", "aten._to_copy"}
_ALONG = {
    "aten.split": 2, "aten.split_with_sizes": 2, "aten.chunk": 2, "aten.slice": 1, "aten.narrow": 1
}  # fmt: skip
# What reads nothing of its operand again in backward.
_SAVES_NOTHING = {
    "aten.add", "aten.sub", "aten.view", "aten.reshape", "aten.to", "aten._to_copy", "aten.alias",
    "dropout",
}  # fmt: skip


@dataclass(frozen=True)
class _Mlp:
    """The nodes from x to `out`, in order, and the parameters that they use."""

    x: Node
    body: tuple[Node, ...]
    out: Node
    parameters: tuple[Node, ...]
    chunks: int  # that make what one holds inside no larger than x


def chunk_mlp_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces each MLP of the blocks `context.mlps_of` by one `ChunkedMlp`.

    Runs on local values: an exchange is never inside.
    """
    if not context.mlps_of:
        return graph
    search = _Search(graph, context)
    taken: set[Node] = set()
    for out in reversed(list(graph.nodes)):
        if out in taken or not (_is_linear(out) or op_name(out) == "aten.add"):
            continue
        block = _block(out, context.mlps_of)
        found = search.match(out, block) if block else None
        if found is not None:
            taken.update(found.body)
            _replace(graph, context, found, block)
    return graph


def _block(node: Node, blocks: Sequence[str]) -> tuple[str, ...]:
    """The call of a block that the node is in, as the keys of the calls down to it."""
    keys: list[str] = []
    for key, path in scope_of(node.meta.get("nn_module_stack") or {}):
        keys.append(key)
        if path in blocks:
            return tuple(keys)
    return ()


def _is_in(node: Node, block: tuple[str, ...]) -> bool:
    levels = scope_of(node.meta.get("nn_module_stack") or {})
    return tuple(key for key, _ in levels[: len(block)]) == block


def _is_linear(node: Any) -> bool:
    return isinstance(node, Node) and (
        isinstance(node.target, ops.ColumnLinear) or op_name(node) == "aten.linear"
    )


class _Search:
    """Finds MLPs in one graph."""

    def __init__(self, graph: Graph, context: LoweringContext) -> None:
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._state = context.capture.state.keys()

    def match(self, out: Node, block: tuple[str, ...]) -> _Mlp | None:
        """The MLP that ends with `out`: of those it may be cut off at, the one that holds most."""
        body: set[Node] = set()
        parameters: dict[Node, None] = {}
        front = {out}
        best: _Mlp | None = None
        while len(body) < _MOST:
            node = max(front, key=self._order.__getitem__)
            operands = self._operands(node) if _is_in(node, block) else None
            if operands is None:
                return best
            front.remove(node)
            body.add(node)
            values, weights = operands
            front.update(values)
            parameters.update(dict.fromkeys(weights))
            if len(front) == 1 and _is_linear(node):
                nodes = tuple(sorted(body, key=self._order.__getitem__))
                best = _cut(next(iter(front)), nodes, tuple(parameters)) or best
        return best

    def _operands(self, node: Node) -> tuple[list[Node], list[Node]] | None:
        """(values, parameters) that it is made of; None for what does not treat tokens alone."""
        if node.op != "call_function" or "attention" in node.meta:
            return None
        if isinstance(node.target, ops.ColumnLinear):
            x, _, *rest, _ = node.all_input_nodes
            return [x], rest
        if isinstance(node.target, ops.Op) or not node.all_input_nodes:
            return None
        name, nodes = op_name(node), node.all_input_nodes
        values = [n for n in nodes if not self._is_weight(n)]
        weights = [n for n in nodes if n not in values]
        if name == "aten.linear":
            return (values, weights) if values == [node.args[0]] else None
        if node.target is operator.getitem or name in _SAME:
            return (values, []) if len(nodes) == len(values) == 1 else None
        if name in _ALONG:
            return (values, []) if len(nodes) == len(values) == 1 and _is_along(node) else None
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return None
        ranks = {getattr(_value(n), "ndim", None) for n in values}
        plain = len(ranks) == 1 and None not in ranks and all(_value(w).ndim <= 1 for w in weights)
        return (values, weights) if plain else None

    def _is_weight(self, node: Node) -> bool:
        """Whether it is a parameter or buffer, or made of nothing else."""
        if node.op == "placeholder":
            return node.name in self._state
        return bool(node.all_input_nodes) and all(map(self._is_weight, node.all_input_nodes))


def _cut(x: Node, body: tuple[Node, ...], parameters: tuple[Node, ...]) -> _Mlp | None:
    """The MLP from x, where it is worth it and nothing else needs what is inside."""
    inner, out = set(body[:-1]), body[-1]
    linears = [n for n in body if _is_linear(n)]
    gathered = [n for n in linears if isinstance(n.target, ops.ColumnLinear)]
    of_x = [n for n in linears if n.args[0] is x]
    users = {user for node in inner for user in node.users}
    if len(linears) < 2 or not users <= {*inner, out}:
        return None
    # A gathered x is kept as its shard, by all of its linears or none.
    if gathered and gathered != of_x:
        return None
    held, given, gives = [_width(n) for n in inner], _width(x), _width(out)
    if given is None or gives is None:
        return None
    known = [width for width in held if width is not None]
    if len(known) < len(held) or max(known) <= max(given, gives) or sum(known) <= given:
        return None
    return _Mlp(x, body, out, parameters, -(-sum(known) // given))


def _value(node: Node) -> Any:
    """The global value of which the node is a part."""
    return (node if "val" in node.meta else node.meta.get("source", node)).meta.get("val")


def _width(node: Node) -> int | None:
    """Elements that it writes for a token, on all ranks that share its width together."""
    value = _value(node)
    if (
        isinstance(value, tuple | list)
        or node.target is operator.getitem
        or op_name(node) in _ALONG
    ):
        return 0 if node.op == "call_function" else None  # parts of another value
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    last = value.shape[-1]
    return last if isinstance(last, int) else None


def _is_along(node: Node) -> bool:
    """Whether a split or a slice is of the last dim."""
    rank = _value(node.all_input_nodes[0]).ndim
    at = _ALONG[op_name(node)]
    dim = node.args[at] if len(node.args) > at else 0
    return isinstance(dim, int) and dim % rank == rank - 1


def _replace(graph: Graph, context: LoweringContext, found: _Mlp, block: tuple[str, ...]) -> None:
    shared = next((n for n in found.body if isinstance(n.target, ops.ColumnLinear)), None)
    shard, again = (None, None) if shared is None else (shared.args[1], shared.args[4])
    code, body = _body(found)
    op = ops.ChunkedMlp(
        chunks=found.chunks,
        uses=sum(isinstance(n.target, ops.ColumnLinear) for n in found.body),
        last=_is_last(found.out, block),
        inside=(),
        code=code,
        body=body,
    )
    with graph.inserting_before(found.out):
        new = graph.call_function(op, (found.x, shard, again, *found.parameters))
    new.meta.update(found.out.meta)
    for linear in filter(_is_linear, found.body):
        new.meta["nn_module_stack"] = common_scope(linear, new)
    new.target = replace(op, inside=_inside(graph, found.body))
    found.out.replace_all_uses_with(new)
    context.replaced(found.out, new)
    for node in reversed(found.body):
        graph.erase_node(node)


def _inside(graph: Graph, body: tuple[Node, ...]) -> tuple[str, ...]:
    """The modules that are called for nothing but what is in `body`."""

    def called(nodes: Iterable[Node]) -> dict[str, None]:
        stacks = (scope_of(node.meta.get("nn_module_stack") or {}) for node in nodes)
        return {path: None for levels in stacks for _, path in levels}

    elsewhere = called(set(graph.nodes) - set(body))
    return tuple(path for path in called(body) if path not in elsewhere)


def _is_last(out: Node, block: tuple[str, ...]) -> bool:
    """Whether nothing in the block saves what is made of `out` and not kept."""
    waiting, seen = [out], set[Node]()
    while waiting:
        for user in waiting.pop().users:
            if user in seen or user.op == "output" or not _is_in(user, block):
                continue
            seen.add(user)
            if isinstance(user.target, KEPT):
                continue
            if op_name(user) not in _SAVES_NOTHING:
                return False
            waiting.append(user)
    return True


def _body(found: _Mlp) -> tuple[str, Callable[..., Any]]:
    """Source and function of (linear of x, x, parameters) -> the value of `out`."""
    graph = torch.fx.Graph()
    first = graph.placeholder("first")
    local: dict[Node, Node] = {found.x: graph.placeholder("x")}
    for index, weight in enumerate(found.parameters):
        local[weight] = graph.placeholder(f"w_{index}")
    for node in found.body:
        if isinstance(node.target, ops.ColumnLinear):
            _, _, weight, bias, _ = node.args
            given = (first, local[found.x], *map(local.get, (weight, bias)))
            local[node] = graph.call_function(_called, given)
        else:
            args = torch.fx.map_arg(node.args, local.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, local.__getitem__)
            local[node] = graph.call_function(node.target, args, kwargs)
    graph.output(local[found.out])
    made = graph.python_code("self")
    names = dict(made.globals)
    exec(compile(made.src, "<seqcomp mlp>", "exec"), names)
    return made.src, functools.partial(names["forward"], None)


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
