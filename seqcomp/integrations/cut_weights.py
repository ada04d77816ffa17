"""What Megatron-SP makes of a model's blocks, read off a capture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from seqcomp.capture.edit import is_tensor, module_path, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.cost.parts import Bytes, KeyNorm
from seqcomp.placement.features import is_linear
from seqcomp.placement.megatron import TensorPlan, plan_tensor_axis

_PASSES = ("add", "view", "reshape", "_to_copy", "to", "clone", "contiguous", "dropout",
           "keyed_dropout", "_unsafe_view", "alias")  # fmt: skip
"""Operations whose backward needs no input."""


@dataclass(frozen=True)
class CutWeights:
    """``whole``: names of the parameters that no degree cuts: fused and unpaired weights, norms;
    not keys and values beyond the KV heads. ``by_tokens``: modules of linears without a partner,
    which run on a rank's own tokens. ``rows``: of each module with a sum over tensor ranks, whether
    more than additions stands behind it in its block. ``bare``: blocks with nothing before their
    first product."""

    whole: frozenset[str]
    by_tokens: tuple[str, ...]
    rows: tuple[tuple[str, bool], ...]
    bare: frozenset[str] = frozenset()

    def ends_in_norm(self, block: str) -> bool:
        """Whether a block needs the result of its last sum for its backward."""
        found = [more for path, more in self.rows if f"{path}.".startswith(f"{block}.")]
        return bool(found) and found[-1]


def cut_weights(
    capture: Capture, infos: Sequence[AttentionInfo], blocks: Sequence[str]
) -> CutWeights:
    """Of the blocks of those paths. The capture is used up; nothing is known where the heads of
    the attentions have no common divisor, which no degree divides."""
    ways = math.gcd(*(info.heads for info in infos))
    degree = next((n for n in range(2, ways + 1) if ways % n == 0), 1)
    if degree == 1:
        return CutWeights(frozenset(), (), ())
    plan = plan_tensor_axis(capture, "tensor", degree)
    cut = {node.name for node in plan.specs} | set(_gathered(plan))
    whole = frozenset(capture.state[n] for n in capture.parameters if n not in cut)
    alone = (f.where.partition(":")[0] for f in plan.findings if f.code == "SC405")
    inside = [where for where in alone if _within(where, blocks)]
    bare = frozenset(b for b in blocks if _is_bare(capture, plan, b))
    return CutWeights(whole, tuple(inside), tuple(_rows(capture, plan, blocks)), bare)


def key_norms(capture: Capture) -> dict[str, KeyNorm]:
    """By attention, the norm between the projection to keys and it; without one it is not named."""
    found: dict[str, KeyNorm] = {}
    for node in (n for n in capture.graph.nodes if op_name(n) == "attention"):
        info: AttentionInfo = node.meta["attention"]
        before, heads = set(_before(node.args[1], capture)), info.kv_heads
        names = {op_name(n) for n in before}
        weighted = any(n.name in capture.parameters for n in before)
        if "aten.rsqrt" in names:  # written out: keys in fp32, their scale, the scaled copy
            kept = Bytes(heads * (4 * info.head_dim + 4), heads * info.head_dim)
            found[info.where] = KeyNorm(kept, weighted)
        elif names & {"aten.rms_norm", "aten.layer_norm"}:
            found[info.where] = KeyNorm(Bytes(4 * heads, heads * info.head_dim), weighted)
    return found


def _before(node: Node, capture: Capture) -> Iterator[Node]:
    """What stands between linears and a value, and the value."""
    work, seen = [node], {node}
    while work:
        item = work.pop()
        if not is_linear(item, capture):
            yield item
            new = [n for n in item.all_input_nodes if n not in seen]
            work += new
            seen.update(new)


def _within(path: str, blocks: Sequence[str]) -> str | None:
    return next((b for b in blocks if f"{path}.".startswith(f"{b}.")), None)


def _rows(capture: Capture, plan: TensorPlan, blocks: Sequence[str]) -> Iterator[tuple[str, bool]]:
    nodes = [n for n in capture.graph.nodes if n.op == "call_function"]
    for at, node in enumerate(nodes):
        block = _within(module_path(node), blocks)
        if plan.roles.get(node) == "row" and block is not None:
            behind = (n for n in nodes[at + 1 :] if _within(module_path(n), [block]))
            yield module_path(node), any(not _passes(n) for n in behind)


def _is_bare(capture: Capture, plan: TensorPlan, block: str) -> bool:
    for node in capture.graph.nodes:
        if node.op == "call_function" and _within(module_path(node), [block]):
            if plan.roles.get(node) is not None:
                return True
            if is_tensor(node) and not _passes(node):
                return False
    return False


def _passes(node: Node) -> bool:
    return op_name(node).removeprefix("aten.") in _PASSES


def _gathered(plan: TensorPlan) -> Iterator[str]:
    """Weights and biases of linears that make keys and values for all ranks."""
    for linear, role in plan.roles.items():
        if role == "gathered":
            for operand in linear.all_input_nodes:
                source = operand
                while op_name(source) == "aten.t":
                    source = source.all_input_nodes[0]
                yield source.name
