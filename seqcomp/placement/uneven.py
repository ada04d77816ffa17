"""Which operations work on parts of unequal size; all others get the dim whole."""

from __future__ import annotations

from torch.fx import Node

from seqcomp.capture.edit import op_name
from seqcomp.capture.kinds import VIEWS, is_pointwise
from seqcomp.placement.rule import Env
from seqcomp.placement.spec import Spec

# They leave alone the dims that they do not name, or have a form for a cut vocabulary.
_KNOW = {"aten.embedding", "aten.cross_entropy_loss", "aten.slice", "aten.select"}
_REPEATS = {"aten.repeat", "aten.tile", "aten.repeat_interleave"}


def evened(node: Node, env: Env) -> dict[Node, Spec]:
    """The operands that `node` can take only with their uneven dims whole, as it gets them."""
    result = {}
    for operand in node.all_input_nodes:
        spec = env.native.get(operand)
        if not isinstance(spec, Spec) or _takes(node, operand):
            continue
        uneven = [i for i, dim in enumerate(spec.dims) if env.mesh.is_uneven(dim)]
        if uneven:
            axes = [a for i in uneven for a in spec.axes_of(i)]
            result[operand] = env.spec(operand).without(axes)
    return result


def _takes(node: Node, operand: Node) -> bool:
    name = op_name(node)
    if name == "aten.linear":  # a weight of unequal parts, never such features
        return operand is not node.args[0]
    return name in _KNOW or is_pointwise(node) or name in VIEWS - _REPEATS
