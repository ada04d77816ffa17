"""Which weights Megatron-SP cuts, and how: column-parallel in, row-parallel out.

A row-parallel linear sums over features that column-parallel ones made, with nothing in between
that mixes features: o_proj behind attention, down_proj behind the activation. Embedding and head
are cut by vocabulary. What does not fit stays whole on every rank and acts on its tokens alone,
which is exact and reported (Shoeybi et al., 2019; Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name, place_of
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import VIEWS, is_pointwise
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.placement.spec import Factor, Spec, whole

Role = Literal["column", "row", "vocabulary", "gathered"]


@dataclass
class TensorPlan:
    """Role of each linear and embedding node; specs of the parameters that are cut.

    `gathered` linears keep whole weights but run on gathered tokens (K/V beyond the KV heads).
    """

    axis: str
    degree: int
    roles: dict[Node, Role] = field(default_factory=dict)
    specs: dict[Node, Spec] = field(default_factory=dict)
    sliced_heads: set[Node] = field(default_factory=set)
    findings: list[Diagnostic] = field(default_factory=list)


def plan_tensor_axis(capture: Capture, axis: str, degree: int) -> TensorPlan:
    """Reads the pairs off a captured graph."""
    plan = TensorPlan(axis, degree)
    linears = [n for n in capture.graph.nodes if _is_linear(n, capture)]
    for node in capture.graph.nodes:
        if op_name(node) == "attention":
            _plan_attention(plan, capture, node)
    for node in linears:
        if node not in plan.roles:
            _plan_mlp(plan, capture, node)
    _plan_vocabulary(plan, capture, linears)
    _drop_conflicts(plan, capture)
    for node in linears:
        if node not in plan.roles:
            plan.findings.append(
                diagnostic(
                    "SC405",
                    where=place_of(node),
                    found="no partner that sums over its features",
                    legal="column-parallel linears whose outputs meet one row-parallel linear",
                    help="exact as it is: the weight is whole on every rank, the work is cut by "
                    "tokens",
                )
            )
    return plan


def _is_linear(node: Node, capture: Capture) -> bool:
    return (
        node.op == "call_function"
        and op_name(node) == "aten.linear"
        and isinstance(node.args[1], Node)
        and node.args[1].name in capture.parameters
    )


def _plan_attention(plan: TensorPlan, capture: Capture, node: Node) -> None:
    info: AttentionInfo = node.meta["attention"]
    if info.heads % plan.degree:
        return
    out = _next_linear(node, capture)
    sources = [_sources(operand, capture) for operand in node.args[:3]]
    if out is None or any(s is None or len(s) != 1 for s in sources):
        return
    q, k, v = (next(iter(s)) for s in sources if s)
    if len({q, k, v}) != 3 or _width(q, capture) != info.heads * info.head_dim:
        return
    _cut(plan, capture, q, "column")
    _cut(plan, capture, out, "row")
    for linear, operand in ((k, node.args[1]), (v, node.args[2])):
        if info.kv_heads % plan.degree == 0:
            _cut(plan, capture, linear, "column")
        else:
            # Fewer KV heads than ranks: every rank makes all of them and uses its own.
            plan.roles[linear] = "gathered"
            plan.sliced_heads.add(operand)


def _plan_mlp(plan: TensorPlan, capture: Capture, node: Node) -> None:
    sources = _sources(node.args[0], capture)
    width = int(node.args[1].meta["val"].shape[1])
    if not sources or width % plan.degree:
        return
    if any(s in plan.roles or _width(s, capture) != width for s in sources):
        return
    if any(not _ends_in(s, node) for s in sources):
        return
    for source in sources:
        _cut(plan, capture, source, "column")
    _cut(plan, capture, node, "row")


def _plan_vocabulary(plan: TensorPlan, capture: Capture, linears: Iterable[Node]) -> None:
    """Embeddings of token ids, and linears that give one number per word of such a vocabulary.

    Known from sizes alone, so that calls with and without labels agree on the cut.
    """
    words = set()
    for node in capture.graph.nodes:
        if op_name(node) == "aten.embedding" and node.args[0].name in capture.parameters:
            rows = int(node.args[0].meta["val"].shape[0])
            if not _from_input(node.args[1], capture):
                continue
            if rows < plan.degree:
                plan.findings.append(
                    diagnostic(
                        "SC405",
                        where=place_of(node),
                        found=f"{rows} words for {plan.degree} ranks",
                        legal="at least one word for each rank",
                        help="exact as it is: the weight is whole on every rank",
                    )
                )
                continue
            words.add(rows)
            _cut(plan, capture, node, "vocabulary")
    for node in linears:
        if node not in plan.roles and _width(node, capture) in words:
            _cut(plan, capture, node, "vocabulary")


def _from_input(node: Node, capture: Capture) -> bool:
    while is_tensor(node) and node.op == "call_function" and node.args:
        node = node.args[0]
    return isinstance(node, Node) and node.name in capture.inputs


def _cut(plan: TensorPlan, capture: Capture, node: Node, role: Role) -> None:
    plan.roles[node] = role
    name = op_name(node)
    weight = node.args[0] if name == "aten.embedding" else node.args[1]
    rows, columns = capture.shape(weight)
    axes = (plan.axis,)
    if role == "row":
        plan.specs[weight] = Spec((whole(rows), (Factor(columns, axes),)))
        return
    plan.specs[weight] = Spec(((Factor(rows, axes),), whole(columns)))
    bias = argument(node, 2, "bias") if name == "aten.linear" else None
    if isinstance(bias, Node):
        plan.specs[bias] = Spec(((Factor(rows, axes),),))


def _drop_conflicts(plan: TensorPlan, capture: Capture) -> None:
    """A parameter is cut in one way for all its uses, or not at all."""
    for node in list(capture.graph.nodes):
        if node.op != "placeholder" or node.name not in capture.parameters:
            continue
        roles = {plan.roles.get(user) for user in node.users}
        if len(roles) > 1 or None in roles:
            plan.specs.pop(node, None)
            for user in node.users:
                if plan.roles.get(user) == "vocabulary":
                    del plan.roles[user]


def _width(linear: Node, capture: Capture) -> int:
    return int(linear.meta["val"].shape[-1])


def _sources(node: Node, capture: Capture) -> set[Node] | None:
    """The linears that `node` is made of, token by token and feature group by feature group.

    None where something in between mixes features or comes from elsewhere.
    """
    found: set[Node] = set()
    seen: set[Node] = set()
    work = [node]
    while work:
        item = work.pop()
        if item in seen:
            continue
        seen.add(item)
        if _is_linear(item, capture):
            found.add(item)
            continue
        operands = _passes_through(item, capture)
        if operands is None:
            return None
        work.extend(operands)
    return found


def _passes_through(node: Node, capture: Capture) -> list[Node] | None:
    """Operands whose features `node` keeps apart; None when it does not keep them apart."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    name = op_name(node)
    if name == "attention":
        return None
    if name in VIEWS or name in ("aten.slice", "aten.rms_norm", "aten.layer_norm"):
        # Per head (behind the view into heads) or along head_dim (rotary halves).
        return [node.args[0]] if name in VIEWS or _is_per_head(node) else None
    if name == "aten.cat":
        return list(node.args[0]) if _is_per_head(node) else None
    if is_pointwise(node):
        return [n for n in node.all_input_nodes if is_tensor(n) and _carries(n, capture)]
    if name == "aten.mean" and _is_per_head(node):
        return [node.args[0]]
    return None


def _carries(node: Node, capture: Capture) -> bool:
    """Whether a value carries features of a token (position tables, weights and scalars do not)."""
    work, seen = [node], {node}
    while work:
        item = work.pop()
        if _is_linear(item, capture) or op_name(item) in ("attention", "aten.embedding"):
            return True
        value = item.meta["val"]
        given = item.op == "placeholder" and item.name in capture.inputs
        if given and value.is_floating_point() and value.ndim >= 3:
            return True
        for operand in item.all_input_nodes:
            if is_tensor(operand) and operand not in seen:
                seen.add(operand)
                work.append(operand)
    return False


def _is_per_head(node: Node) -> bool:
    return node.meta["val"].ndim == 4


def _next_linear(node: Node, capture: Capture) -> Node | None:
    """The one linear that the value of `node` reaches through views and element-wise operations."""
    found: set[Node] = set()
    work, seen = [node], {node}
    while work:
        for user in work.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if _is_linear(user, capture):
                found.add(user)
            elif op_name(user) in VIEWS or is_pointwise(user):
                work.append(user)
            else:
                return None
    return next(iter(found)) if len(found) == 1 else None


def _ends_in(source: Node, target: Node) -> bool:
    """Every path from `source` reaches `target` before anything that mixes features."""
    work, seen = [source], {source}
    while work:
        for user in work.pop().users:
            if user is target or user in seen:
                continue
            seen.add(user)
            if user.op == "output" or not (op_name(user) in VIEWS or is_pointwise(user)):
                return False
            work.append(user)
    return True


def split_row_biases(capture: Capture, plan: TensorPlan) -> None:
    """A bias behind a row-parallel linear becomes an addition of its own, after the sum."""
    editor = Editor(capture)
    for node in [n for n, role in plan.roles.items() if role == "row"]:
        bias = argument(node, 2, "bias")
        if not isinstance(bias, Node):
            continue
        plain = editor.call(torch.ops.aten.linear.default, node.args[:2], before=node)
        total = editor.call(torch.ops.aten.add.Tensor, (plain, bias), before=node)
        plan.roles[plain] = plan.roles.pop(node)
        editor.replace(node, total)
