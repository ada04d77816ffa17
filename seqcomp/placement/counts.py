"""Counts per class: what tokens add to bins is summed over tokens, however they are shared out."""

from __future__ import annotations

from torch.fx import Node

from seqcomp.capture.edit import argument, is_tensor, op_name
from seqcomp.placement.dimwise import gather_rule
from seqcomp.placement.rule import Decision, Env, Rule, summed
from seqcomp.placement.spec import Spec, whole


def histc_rule(node: Node, env: Env) -> Decision | None:
    """x of any shape -> counts [bins], where the bins do not depend on the values."""
    source, bounds = node.args[0], (argument(node, 2, "min", 0), argument(node, 3, "max", 0))
    want = summed(env.spec(source))
    if bounds[0] == bounds[1] or env.mesh.pads:
        return None
    return Decision({source: want}, Spec((whole(env.shape(node)[0]),), want.axes))


def scatter_add_rule(node: Node, env: Env) -> Decision | None:
    """zeros.scatter_add(dim, index, values): along dim the shares of the index add up."""
    base, index = node.args[0], argument(node, 2, "index")
    values = argument(node, 3, "src")
    plain = gather_rule(node, env)
    if plain is None or not plain.gathered or env.mesh.pads or not _is_zeros(base):
        return plain
    if env.shape(index) != env.shape(values):
        return plain
    dim = argument(node, 1, "dim") % len(env.shape(base))
    lead = max((summed(env.spec(n)) for n in (index, values)), key=lambda spec: len(spec.axes))
    wants = {index: lead, values: lead, base: lead.with_dim(dim, whole(env.shape(base)[dim]))}
    return Decision(wants, Spec(wants[base].dims, lead.axes_of(dim)))


def _is_zeros(node: Node) -> bool:
    while op_name(node) in ("aten.to", "aten.expand", "aten.clone") and is_tensor(node.args[0]):
        node = node.args[0]
    return op_name(node) in ("aten.zeros", "aten.new_zeros", "aten.zeros_like")


COUNT_RULES: dict[str, Rule] = {
    "aten.histc": histc_rule,
    "aten.scatter_add": scatter_add_rule,
}
