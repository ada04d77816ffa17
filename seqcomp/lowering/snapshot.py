"""What a verifier needs of a lowering: the global graph, and where its values live on ranks.

The graph is kept as it was when every value had its placement and no collective was inserted: run
on one device with the full inputs it gives what each rank's values are parts of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from seqcomp.capture.edit import module_path, op_name
from seqcomp.lowering.context import LoweringContext, Traced
from seqcomp.lowering.sizes import of_one_rank


@dataclass(frozen=True)
class Operation:
    """A node of the global graph, for messages. `is_given`: an input, parameter or buffer."""

    name: str
    op: str
    module: str
    is_given: bool


@dataclass(frozen=True)
class Snapshot:
    """The global graph of one program and the local values that belong to it, by node name."""

    graph: Graph
    operations: tuple[Operation, ...]
    state: Mapping[str, str]  # placeholder -> parameter, buffer or constant
    constants: Mapping[str, Tensor]
    parameters: frozenset[str]
    inputs: tuple[str, ...]
    values: Mapping[str, Traced]
    dropout_keys: str | None = None  # the placeholder
    dropouts: int = 0


def keep_global_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Keeps a copy of the global graph where one was asked for."""
    if context.keep_global:
        context.kept = copy_of_whole(graph)
    return graph


def copy_of_whole(graph: Graph) -> Graph:
    """The graph for a caller that passes the whole batch: nothing is scaled up to it."""
    copy = Graph()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        scaled = of_one_rank(node)
        if scaled is not None:
            made[node] = made[scaled]
            continue
        made[node] = copy.node_copy(node, made.__getitem__)
        assert made[node].name == node.name, f"{node.name} became {made[node].name}"
    copy.eliminate_dead_code()
    return copy


def snapshot(graph: Graph, context: LoweringContext) -> Snapshot | None:
    """What was kept, with the local values that are still in the lowered `graph`."""
    if context.kept is None:
        return None
    capture = context.capture
    # A tied parameter has a placeholder for each of its names, and one of them is used.
    alive = {node for node in graph.nodes if node.op == "call_function" or node.users}
    known = {node.name for node in context.kept.nodes}
    return Snapshot(
        graph=context.kept,
        operations=tuple(_operation(n, capture.state) for n in context.kept.nodes),
        state=dict(capture.state),
        constants=dict(capture.constants),
        parameters=capture.parameters,
        inputs=capture.inputs,
        values={
            node.name: traced
            for node, traced in context.traced.items()
            if node in alive and traced.source in known
        },
        dropout_keys=capture.dropout_keys,
        dropouts=capture.dropouts,
    )


def _operation(node: Node, state: Mapping[str, str]) -> Operation:
    if node.op != "placeholder":
        return Operation(node.name, op_name(node), module_path(node), is_given=False)
    module, _, tensor = state.get(node.name, "").rpartition(".")
    return Operation(node.name, tensor or "input", module, is_given=True)
