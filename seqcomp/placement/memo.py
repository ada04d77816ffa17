"""Decisions that are made once for all equal operations: identical layers are placed once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from seqcomp.capture.edit import is_tensor
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.placement.rule import Decision, Env, tensor_args
from seqcomp.placement.spec import Spec


@dataclass(frozen=True)
class _Template:
    """A decision whose operands are places in the list of the node's tensor operands."""

    decision: Decision
    wants: tuple[tuple[int, Spec], ...]


class DecisionMemo:
    """Rules read an operation's own arguments and its operands' placements, shapes and dtypes:
    where these are equal, so is the decision.
    """

    def __init__(self, env: Env, weights: Collection[Node], whole: Collection[Node]):
        self._env = env
        self._whole = whole
        self._weights = weights
        self._known: dict[Any, _Template] = {}

    def get(self, node: Node, decide: Callable[[Node], Decision]) -> Decision:
        """The decision for a node, by `decide` where no equal node has been seen."""
        operands = list(dict.fromkeys(tensor_args(node)))
        key = self._key(node, operands)
        found = self._known.get(key)
        if found is None:
            decision = decide(node)
            wants = tuple((operands.index(n), spec) for n, spec in decision.wants.items())
            self._known[key] = _Template(decision, wants)
            return decision
        return replace(found.decision, wants={operands[index]: spec for index, spec in found.wants})

    def _key(self, node: Node, operands: list[Node]) -> Any:
        def plain(item: Node) -> str:
            return f"%{operands.index(item)}" if is_tensor(item) else str(item.meta.get("val"))

        info = node.meta.get("attention")
        return (
            node.target,
            str(map_arg(node.args, plain)),
            str(map_arg(node.kwargs, plain)),
            tuple(self._operand(item) for item in operands),
            self._result(node),
            self._env.role(node),
            self._env.shared_heads(node),
            bool(node.users),
            node in self._whole,
            replace(info, where="") if isinstance(info, AttentionInfo) else None,
        )

    def _operand(self, item: Node) -> Any:
        value = item.meta["val"]
        given = item.op == "placeholder"
        return (
            self._env.native[item],
            self._env.shape(item),
            value.dtype,
            given,
            (item in self._weights),
        )

    def _result(self, node: Node) -> Any:
        return (self._env.shape(node), node.meta["val"].dtype) if is_tensor(node) else None
