"""SC402: real work on tokens that every rank of an axis does in whole.

Positions, masks and cos/sin tables are whole on purpose: they are made of indices and constants,
cost O(S), and cannot be wrong. What is made of weights or of floating-point inputs is another
matter: a product, an attention or a norm over whole tokens costs each rank what one device pays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from seqcomp.capture.call import SEQ
from seqcomp.capture.edit import is_tensor, module_path, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import CONVOLUTIONS, RECURRENT
from seqcomp.capture.sizes import BATCH_SYMBOL, LENGTH_SYMBOL, Size, evaluate, product
from seqcomp.capture.windows import Window
from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.layout.masks import Causal
from seqcomp.placement.recurrent import recurrent_flops
from seqcomp.placement.rule import Decision, MeshView

_PRODUCTS = ("aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.__matmul__")
_NORMS = ("aten.layer_norm", "aten.rms_norm", "aten._fused_rms_norm", "aten.group_norm")
_BORROWERS = ("aten.to", "aten.type_as", "aten.view_as", "aten.reshape_as", "aten.expand_as")
# Mean, variance, scale and shift; a convention, since norms are bound by memory.
_PER_ELEMENT_OF_A_NORM = 8


@dataclass
class _Repeated:
    """What one module repeats over one set of axes."""

    operations: dict[str, None] = field(default_factory=dict)
    flops: int = 0


def repeated_work(
    capture: Capture, mesh: MeshView, decisions: Mapping[Node, Decision]
) -> list[Diagnostic]:
    """One finding per module and axes, with the forward FLOPs of a rank at the captured sizes."""
    found: dict[tuple[str, tuple[str, ...]], _Repeated] = {}
    computed = _computed(capture, decisions)
    for node in capture.graph.nodes:
        decision = decisions.get(node)
        if decision is None or node not in computed:
            continue
        work = _flops(node, capture)
        if work is None:
            continue
        used = _axes_of(decision)
        idle = tuple(a for a in _axes_of_tokens(node, capture, mesh) if a not in used)
        if idle:
            entry = found.setdefault((module_path(node), idle), _Repeated())
            entry.operations[op_name(node)] = None
            entry.flops += evaluate(work, capture.hints) // mesh.degree(used)
    size = " x ".join(
        str(evaluate(extent, capture.hints))
        for extent in (capture.batch, capture.length)
        if extent is not None
    )
    return [
        diagnostic(
            "SC402",
            where=path or "<root>",
            found=f"{', '.join(item.operations)} on whole tokens: each of the "
            f"{mesh.degree(axes)} ranks along {'+'.join(axes)} computes the same "
            f"{item.flops} FLOPs forward, of {size} tokens",
            legal="work that is cut by tokens, heads or features",
            help="exact as it is; move it before the operation that gathered its input (SC401)",
        )
        for (path, axes), item in found.items()
    ]


def _computed(capture: Capture, decisions: Mapping[Node, Decision]) -> set[Node]:
    """Values made of weights or of floating-point inputs, not of indices and constants alone."""
    result: set[Node] = set()
    for node in capture.graph.nodes:
        if node.op == "placeholder" and is_tensor(node):
            given = node.name in capture.inputs and node.meta["val"].is_floating_point()
            if given or node.name in capture.parameters:
                result.add(node)
        elif node.op == "call_function" and any(n in result for n in _operands(node)):
            decision = decisions.get(node)
            if decision is None or decision.form != "create":
                result.add(node)
    return result


def _operands(node: Node) -> list[Node]:
    """What a value is made of; sizes, and operands that lend a shape or dtype, are left out."""
    if isinstance(node.meta.get("val"), int | torch.SymInt):
        return []
    return node.all_input_nodes[:1] if op_name(node) in _BORROWERS else node.all_input_nodes


def _axes_of(decision: Decision) -> set[str]:
    outs = decision.out if isinstance(decision.out, tuple) else (decision.out,)
    specs = (*outs, *decision.wants.values())
    return {a for spec in specs for a in (*spec.axes, *spec.partial)}


def _axes_of_tokens(node: Node, capture: Capture, mesh: MeshView) -> Iterator[str]:
    """The axes that could share this node's work: those of the sequence, those of the batch."""
    values = [n for n in (node, *node.all_input_nodes) if is_tensor(n)]
    sizes = [size for value in values for size in capture.shape(value)]
    # A convolution of an image makes the tokens of sides that are no tokens yet; and attention is
    # over tokens, of whatever number.
    makes = op_name(node) == "attention" or (
        op_name(node) in CONVOLUTIONS
        and all(d is None or d.index(SEQ) is None for d in capture.dims)
    )
    for symbol, extent, axes in (
        (BATCH_SYMBOL, capture.batch, mesh.batch),
        (LENGTH_SYMBOL, capture.length, mesh.sequence),
    ):
        if makes or any(size.has(symbol) or size == extent for size in sizes):
            yield from axes


def _flops(node: Node, capture: Capture) -> Size | None:
    """Forward FLOPs of the whole operation, 2 per multiplication and addition; None: not counted.

    Causal attention counts half of its square.
    """
    name = op_name(node)
    if name in RECURRENT:
        return recurrent_flops(node, capture)
    if not is_tensor(node):
        return None
    out = product(capture.shape(node))
    if name == "aten.linear":
        return 2 * out * capture.shape(node.args[0])[-1]
    if name in _PRODUCTS:
        left = node.args[1 if name in ("aten.addmm", "aten.baddbmm") else 0]
        return 2 * out * capture.shape(left)[-1]
    if name == "aten.einsum":
        letters: dict[str, Size] = {}
        inputs = node.args[0].replace(" ", "").split("->")[0].split(",")
        for names, operand in zip(inputs, node.args[1], strict=True):
            if "." in names:
                return None
            letters |= dict(zip(names, capture.shape(operand), strict=True))
        return 2 * product(letters.values())
    if name in ("attention", "aten.scaled_dot_product_attention"):
        query, key = capture.shape(node.args[0]), capture.shape(node.args[1])
        work = 2 * out * key[-2] + 2 * product(query) * key[-2]
        info = node.meta.get("attention")
        return work / 2 if info is not None and isinstance(info.mask, Causal) else work
    if name in _NORMS:
        return _PER_ELEMENT_OF_A_NORM * out
    if name in CONVOLUTIONS or (isinstance(node.target, Window) and node.target.mixes_channels):
        weight = capture.shape(node.args[1])
        return 2 * out * product(weight[1:])
    return None
