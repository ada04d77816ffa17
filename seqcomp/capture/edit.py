"""Small helpers to read and write captured graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from seqcomp.capture.export import Capture

TRANSPOSITIONS = frozenset(
    f"aten.{name}"
    for name in (
        "transpose", "permute", "t", "mT", "adjoint", "swapaxes", "swapdims", "numpy_T", "movedim",
    )
)  # fmt: skip


def op_name(node: Node) -> str:
    """'aten.linear' for an ATen call whatever its overload, else the function's own name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    return getattr(target, "__name__", str(target))


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def module_path(node: Node) -> str:
    """Path of the module whose forward makes this node ('' for the root)."""
    stack = node.meta.get("nn_module_stack") or {}
    return scope_of(stack)[-1][1] if scope_of(stack) else ""


def scope_of(stack: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """(call key, module path) per level, the root left out; the key tells repeated calls apart."""
    return tuple(
        (str(key), str(entry[0]))
        for key, entry in stack.items()
        if isinstance(entry, tuple)
        and entry[0]
        and not str(entry[0]).startswith("_empty_nn_module_stack")
    )


def place_of(node: Node) -> str:
    """'module.path: op (node)' for messages."""
    return f"{module_path(node) or '<root>'}: {op_name(node)} ({node.name})"


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name.

    ATen calls are read by their schema, since overloads order their arguments differently;
    `index` is the position in other calls. `default` stands for what was not given.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        names = [a.name for a in node.target._schema.arguments]
        if name not in names:
            return default
        index = names.index(name)
        given = node.args[index] if index < len(node.args) else node.kwargs.get(name)
        return default if given is None else given
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def transposed_dims(node: Node) -> tuple[int, ...] | None:
    """The operand's dim at each place of the result; None for what does more than move dims."""
    name = op_name(node)
    if name not in TRANSPOSITIONS:
        return None
    ndim = node.meta["val"].ndim
    if name == "aten.permute":
        return tuple(d % ndim for d in node.args[1])
    order = list(range(ndim))
    if name in ("aten.t", "aten.numpy_T"):
        return tuple(reversed(order))
    if name == "aten.movedim":
        sources, targets = (_listed(places, ndim) for places in node.args[1:3])
        rest = iter([d for d in order if d not in sources])
        return tuple(sources[targets.index(i)] if i in targets else next(rest) for i in order)
    if ndim >= 2:
        a, b = (-2, -1) if name in ("aten.mT", "aten.adjoint") else node.args[1:3]
        order[a], order[b] = order[b], order[a]
    return tuple(order)


def _listed(places: int | Sequence[int], ndim: int) -> list[int]:
    return [d % ndim for d in ([places] if isinstance(places, int) else places)]


def value_of(item: Any) -> Any:
    return map_arg(item, lambda n: n.meta["val"])


class Editor:
    """Inserts calls into a captured graph, with shapes computed on fake tensors."""

    def __init__(self, capture: Capture):
        self.capture = capture
        self.graph = capture.graph

    def call(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        before: Node,
        like: Node | None = None,
    ) -> Node:
        like = like or before
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, tuple(args), dict(kwargs or {}))
        node.meta["nn_module_stack"] = dict(like.meta.get("nn_module_stack") or {})
        with self.capture.fake_mode, torch.no_grad():
            node.meta["val"] = target(*value_of(node.args), **value_of(node.kwargs))
        return node

    def replace(self, old: Node, new: Node) -> None:
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
