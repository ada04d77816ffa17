"""The boundary where local values become what the caller sees."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from seqcomp.capture.edit import is_tensor
from seqcomp.capture.sizes import evaluate
from seqcomp.diagnostics import diagnostic
from seqcomp.lowering import ops
from seqcomp.lowering.context import Graph, LoweringContext, Traced
from seqcomp.lowering.redistribute import Redistributor
from seqcomp.lowering.sizes import size_emitter
from seqcomp.placement.spec import Factor, Spec
from seqcomp.runtime.collectives import Cotangent

_GIB = 2**30


def output_boundary_pass(graph: Graph, context: LoweringContext) -> Graph:
    """Applies the plan's `outputs` and the gradient rules of the boundary.

    A cotangent that arrives from outside is replicated over the sequence axes for whole values:
    a gathered output's backward is a slice, a sum's is the identity, and a value that every rank
    computed alike keeps the cotangent of one rank. Values cut over the batch stay cut.
    """
    output = graph.output_node()
    results = []
    for name, mode, leaf in zip(
        context.capture.output_names, context.output_modes, output.args[0], strict=True
    ):
        if mode == "drop" or not isinstance(leaf, Node) or not is_tensor(leaf):
            results.append(None if mode == "drop" else leaf)
        else:
            value, spec = _finish(graph, context, name, mode, leaf, output)
            value = _averaged(graph, context, leaf, value, spec, output)
            if value is not leaf and leaf in context.traced:
                context.traced[value] = Traced(context.traced[leaf].source, spec, f"output {name}")
            results.append(value)
    output.args = (tuple(results),)
    return graph


def _finish(
    graph: Graph, context: LoweringContext, name: str, mode: str, leaf: Node, output: Node
) -> tuple[Node, Spec]:
    """What the caller sees of `leaf`, and its placement."""
    assert context.placement is not None
    spec = context.placement.native[leaf]
    assert isinstance(spec, Spec)
    sequence, captured = context.mesh.sequence, leaf
    differentiable = leaf.meta["val"].is_floating_point() and context.grad

    def call(op: ops.Op, value: Node) -> Node:
        with graph.inserting_before(output):
            node = graph.call_function(op, (value,))
        node.meta["nn_module_stack"] = {}
        node.meta["source"] = captured
        return node

    own = _own_batch(context, spec)
    if own != spec:
        leaf = _redistributed(graph, context, leaf, spec, own, output, "partial")
        spec = own
    if mode == "sharded":
        want = _by_tokens(context, spec)
        if want is not None:
            return _redistributed(graph, context, leaf, spec, want, output, "partial"), want
    value = leaf
    touched: set[str] = {*spec.axes, *spec.partial}
    if spec.partial:
        value = call(ops.AllReduce(spec.partial, "replicated", name), value)
        spec = replace(spec, partial=())
    cut = [i for i in range(len(spec.dims)) if set(spec.axes_of(i)) & set(sequence)]
    if cut and mode == "full":
        _report_large(context, name, captured)
        whole = spec.without(sequence)
        value = _redistributed(graph, context, value, spec, whole, output, "replicated", name)
        spec = whole
    alike = tuple(a for a in context.mesh.degrees if a not in touched)
    if alike and differentiable and leaf.op != "placeholder":
        value = call(ops.OwnCotangent(alike), value)
    return value, spec


def _averaged(
    graph: Graph, context: LoweringContext, leaf: Node, value: Node, spec: Spec, output: Node
) -> Node:
    """`gradients: mean`: what a data rank's slice contributes counts one part of their number.

    A loss that the model computes is of the global batch already: its gradients are never scaled.
    """
    axes = tuple(a for a in context.mean_over if a in spec.axes)
    if not axes or not context.grad or not leaf.meta["val"].is_floating_point():
        return value
    with graph.inserting_before(output):
        node = graph.call_function(ops.ScaleCotangent(1 / context.mesh.degree(axes)), (value,))
    node.meta["nn_module_stack"] = {}
    node.meta["source"] = leaf
    return node


def _own_batch(context: LoweringContext, spec: Spec) -> Spec:
    """Per-sample outputs cover the rank's own slice, also where the whole batch was computed."""
    axes, batch = context.mesh.batch, context.capture.batch
    if not axes or set(axes) & {*spec.axes, *spec.partial}:
        return spec
    for index, dim in enumerate(spec.dims):
        for at, factor in enumerate(dim):
            if factor.size == batch and not factor.axes:
                cut = Factor(factor.size, axes)
                return spec.with_dim(index, (*dim[:at], cut, *dim[at + 1 :]))
    return spec


def _by_tokens(context: LoweringContext, spec: Spec) -> Spec | None:
    """The value cut by tokens over all sequence axes; None where it has no sequence dim."""
    sequence = context.mesh.sequence
    bare = replace(spec.without(sequence), partial=())
    for index, dim in enumerate(spec.dims):
        for at, factor in enumerate(dim):
            if factor.size == context.capture.length and set(factor.axes) <= set(sequence):
                cut = Factor(factor.size, sequence)
                plain = [Factor(f.size, tuple(a for a in f.axes if a not in sequence)) for f in dim]
                return bare.with_dim(index, (*plain[:at], cut, *plain[at + 1 :]))
    return None


def _redistributed(
    graph: Graph,
    context: LoweringContext,
    leaf: Node,
    have: Spec,
    want: Spec,
    output: Node,
    cotangent: Cotangent,
    label: str = "",
) -> Node:
    sizes = size_emitter(graph, context)
    made = Redistributor(graph, context.mesh, sizes, cotangent=cotangent, label=label)
    return made.get(leaf, have, want, output)


def _report_large(context: LoweringContext, name: str, leaf: Node) -> None:
    size = leaf.meta["val"].element_size()
    for extent in context.capture.shape(leaf):
        size *= evaluate(extent, context.capture.hints)
    if size > _GIB:
        context.findings.append(
            diagnostic(
                "SC404",
                where=f"outputs.{name}",
                found=f"{size} bytes gathered on every rank",
                legal="full, sharded or drop",
                help=f"outputs: {{{name}: drop}} when the loss is computed in the model, "
                f"or {{{name}: sharded}}",
            )
        )
