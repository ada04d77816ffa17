"""Cuts a flat lowered graph along the module tree: one piece of code per module call.

FSDP, checkpointing and hooks of the caller work on modules, so the lowered program keeps them:
each submodule's forward computes what its own code computed, on local tensors. Every piece is
called with a token that says whose program it belongs to; nothing is looked up in a context, so a
recomputation in backward runs the program that its forward ran. Modules that compute the same get
the same code, to the letter: a compiler then compiles it once.
"""

from __future__ import annotations

import heapq
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch.fx import Node

from seqcomp.capture.edit import scope_of
from seqcomp.lowering import ops

Key = tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """The forward of one module call: source code and the objects it names.

    `token` tells it from other calls of the module at `path`, in this program and in others. Takes
    (self, token-free arguments in order) and returns one value or a tuple. The last `weights`
    arguments are parameters.
    """

    path: str
    token: str
    code: str
    names: Mapping[str, Any]
    weights: int = 0


@dataclass(frozen=True)
class Call:
    """One call of a module, and the nodes of the flat graph that are in or below it."""

    path: str
    token: str
    nodes: tuple[Node, ...]


class ScopeBuilder:
    """Builds all pieces of one program."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        state: Mapping[str, str],
        aliases: Mapping[str, Sequence[str]],
        program: str,
    ):
        self._graph = graph
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._state = state
        self._aliases = aliases
        self._program = program
        self._paths: dict[Key, str] = {}
        self._members: dict[Key, list[Node]] = {}
        self._tokens: dict[Key, str] = {}
        self.pieces: list[Piece] = []
        # For each parameter or buffer, the modules that are being called where it is named.
        self.reads: dict[str, set[frozenset[str]]] = {}

    def build(self, inputs: Sequence[Node]) -> Piece:
        """Builds every piece; the root one takes `inputs` and returns the output tuple."""
        placed: dict[Node, Key] = {}
        for node in self._graph.nodes:
            if node.op == "call_function":
                placed[node] = self._key(node)
        self._dissolve(placed)
        return self._piece((), "", placed, list(inputs), self._graph.output_node().args[0])

    def calls(self) -> list[Call]:
        """The calls of modules that have a piece, once they are built."""
        return [
            Call(self._paths[key], self._tokens[key], tuple(nodes))
            for key, nodes in self._members.items()
            if key and key in self._tokens
        ]

    def _key(self, node: Node) -> Key:
        """Calls that the node is below; a module that is not below its caller has no piece."""
        levels = scope_of(node.meta.get("nn_module_stack") or {})
        key: Key = ()
        caller = ""
        for name, path in levels:
            if path.startswith(f"{caller}." if caller else ""):
                key, caller = (*key, name), path
                self._paths[key] = path
        return key

    def _dissolve(self, placed: dict[Node, Key]) -> None:
        """Where modules depend on each other both ways, their nodes move up to the parent.

        That happens for values inserted between the nodes of a module, and for Python code that
        leaves and re-enters a module's call.
        """
        changed = True
        while changed:
            changed = False
            self._index(placed)
            for scope in sorted(self._members):
                items = self._items(scope, placed)
                for knot in nx.strongly_connected_components(items):
                    if len(knot) > 1:
                        changed = True
                        children = [item for item in knot if isinstance(item, tuple)]
                        assert children, f"a cycle of plain nodes in {scope}"
                        self._lift(children, len(scope), placed)
                if changed:
                    break

    def _index(self, placed: Mapping[Node, Key]) -> None:
        """The nodes in and below each scope, in order."""
        self._members = {}
        for node, key in placed.items():
            for depth in range(len(key) + 1):
                self._members.setdefault(key[:depth], []).append(node)

    def _lift(self, children: Iterable[Key], depth: int, placed: dict[Node, Key]) -> None:
        """Takes the level `depth` out of the keys of `children`; what is below it stays."""
        gone = set(children)
        for node, key in placed.items():
            if key[: depth + 1] in gone:
                placed[node] = new = (*key[:depth], *key[depth + 1 :])
                for below in range(depth + 1, len(key)):
                    self._paths[new[:below]] = self._paths[key[: below + 1]]

    def _items(self, scope: Key, placed: Mapping[Node, Key]) -> nx.DiGraph:
        """Direct nodes and child calls of a scope, with their dependencies."""
        depth = len(scope)
        items: nx.DiGraph[Any] = nx.DiGraph()

        def item(node: Node) -> Any:
            key = placed[node]
            return node if len(key) == depth else key[: depth + 1]

        for node in self._members.get(scope, ()):
            items.add_node(item(node))
            for operand in node.all_input_nodes:
                inside = operand in placed and placed[operand][:depth] == scope
                if inside and item(operand) != item(node):
                    items.add_edge(item(operand), item(node))
        return items

    def _sorted_items(self, scope: Key, placed: Mapping[Node, Key]) -> list[Any]:
        """Topological, otherwise in the order of the capture."""
        items = self._items(scope, placed)
        first: dict[Any, int] = {}
        depth = len(scope)
        for node in self._members.get(scope, ()):
            key = placed[node]
            name = node if len(key) == depth else key[: depth + 1]
            first[name] = min(first.get(name, len(self._order)), self._order[node])
        waiting = {name: items.in_degree(name) for name in items}
        ready = [(first[name], str(name), name) for name, n in waiting.items() if n == 0]
        heapq.heapify(ready)
        result = []
        while ready:
            _, _, name = heapq.heappop(ready)
            result.append(name)
            for after in items.successors(name):
                waiting[after] -= 1
                if waiting[after] == 0:
                    heapq.heappush(ready, (first[after], str(after), after))
        assert len(result) == len(items)
        return result

    def _attribute(self, node: Node, path: str) -> str | None:
        """Name of a parameter or buffer as an attribute below the module at `path`."""
        name = self._state.get(node.name)
        if name is None:
            return None
        prefix = f"{path}." if path else ""
        for alias in (name, *self._aliases.get(name, ())):
            if alias.startswith(prefix):
                return alias[len(prefix) :]
        return None

    def _piece(
        self,
        scope: Key,
        path: str,
        placed: Mapping[Node, Key],
        inputs: Sequence[Node],
        results: Any,
        weights: int = 0,
    ) -> Piece:
        graph = torch.fx.Graph()
        # Whoever computes them has names of its own for what modules alike are given.
        names = [f"x_{i}" if i else "x" for i in range(len(inputs))]
        local: dict[Node, Any] = dict(zip(inputs, map(graph.placeholder, names), strict=True))
        called = frozenset(self._paths[scope[:depth]] for depth in range(1, len(scope) + 1))

        def lookup(node: Node) -> Any:
            if node not in local:
                attribute = self._attribute(node, path)
                assert attribute is not None, f"{node} is not visible in {path or '<root>'}"
                local[node] = graph.get_attr(attribute)
                self.reads.setdefault(self._state[node.name], set()).add(called)
            return local[node]

        for item in self._sorted_items(scope, placed):
            if isinstance(item, Node):
                for operand in item.all_input_nodes:
                    lookup(operand)
                local[item] = _copied(graph, item, lookup)
            else:
                self._child(item, path, placed, graph, local, lookup)
        if isinstance(results, tuple | list):
            returned = tuple(lookup(r) if isinstance(r, Node) else r for r in results)
        else:
            returned = lookup(results)
        graph.output(returned)
        code = _code(graph)
        piece = Piece(path, self._token(scope), code.src, code.globals, weights)
        self.pieces.append(piece)
        return piece

    def _token(self, scope: Key) -> str:
        """Which call of its module this is: nothing that tells alike modules apart."""
        if scope not in self._tokens:
            path = self._paths.get(scope, "")
            number = sum(self._paths.get(other, "") == path for other in self._tokens)
            self._tokens[scope] = f"seqcomp:{self._program}:{number}"
        return self._tokens[scope]

    def _child(
        self,
        key: Key,
        path: str,
        placed: Mapping[Node, Key],
        graph: torch.fx.Graph,
        local: dict[Node, Any],
        lookup: Any,
    ) -> None:
        child_path = self._paths[key]
        inside = set(self._members[key])
        needed: list[Node] = []
        for node in sorted(inside, key=self._order.__getitem__):
            for operand in node.all_input_nodes:
                if operand in inside or operand in needed:
                    continue
                if self._attribute(operand, child_path) is None:
                    needed.append(operand)
        needed.sort(key=_is_ours)
        count = len(needed) - sum(map(_is_ours, needed))
        given = [
            n
            for n in sorted(inside, key=self._order.__getitem__)
            if any(user not in inside for user in n.users)
        ]
        if not given:
            return
        results: Any = given[0] if len(given) == 1 else tuple(given)
        self._piece(key, child_path, placed, needed, results, len(needed) - count)
        relative = child_path.removeprefix(f"{path}.") if path else child_path
        # Hooks that users register see the activations alone, and may replace them: what is
        # ours goes by keyword.
        arguments = tuple(lookup(n) for n in needed[:count])
        ours: dict[str, Any] = {"seqcomp": self._token(key)}
        if count < len(needed):
            ours["seqcomp_weights"] = tuple(lookup(n) for n in needed[count:])
        # Not named after the module: one may be called `self`, as the code calls its own.
        call = graph.create_node("call_module", relative, arguments, ours, name="result")
        if len(given) == 1:
            local[given[0]] = call
        else:
            for i, node in enumerate(given):
                local[node] = graph.call_function(_getitem, (call, i))


def _is_ours(node: Node) -> bool:
    """A parameter as its bucket hands it out, or an input that no caller knows of."""
    if "ours" in node.meta:
        return True
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and isinstance(source.target, ops.FillBucket)


def _plain(node: Node) -> str:
    """A node's name without its number in the whole graph; its piece gives it another."""
    return re.sub(r"(_\d+)+$", "", node.name)


def _copied(graph: torch.fx.Graph, node: Node, lookup: Any) -> Node:
    args = torch.fx.map_arg(node.args, lookup)
    kwargs = torch.fx.map_arg(node.kwargs, lookup)
    return graph.create_node(node.op, node.target, args, kwargs, _plain(node), node.type)


def _getitem(values: Sequence[Any], index: int) -> Any:
    return values[index]


def _code(graph: torch.fx.Graph) -> Any:
    """Python source of a graph. Values are dropped after their last use, as in eager code."""
    return graph.python_code("self")
