"""Which weights Megatron-SP cuts, and how: column-parallel in, row-parallel out.

A row-parallel linear sums over features that column-parallel ones made, with nothing in between
that mixes features: o_proj behind attention, down_proj behind the activation. Embedding and head
are cut by vocabulary. What does not fit stays whole on every rank and acts on its tokens alone,
which is exact and reported (Shoeybi et al., 2019; Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor, argument, is_tensor, op_name, place_of
from seqcomp.capture.export import Capture
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.capture.sizes import Size
from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.placement.features import (
    by_heads,
    ends_in,
    feeds,
    from_words,
    is_linear,
    next_linears,
    sources,
    width,
)
from seqcomp.placement.fused import separate_fused
from seqcomp.placement.spec import Factor, Spec, replicated, whole

Role = Literal["column", "row", "vocabulary", "gathered"]


@dataclass
class TensorPlan:
    """Role of each linear and embedding node; specs of the parameters that are cut.

    `gathered` linears keep whole weights but run on gathered tokens (K/V beyond the KV heads).
    A weight may be cut where it is used without being cut where it lives. `shared` expansions give
    every head what was made once for all of them: each rank expands it over its own heads, `dim`.
    """

    axis: str
    degree: int
    roles: dict[Node, Role] = field(default_factory=dict)
    specs: dict[Node, Spec] = field(default_factory=dict)
    shared: dict[Node, int] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)


def plan_tensor_axis(
    capture: Capture, axis: str, degree: int, whole: Collection[Node] = ()
) -> TensorPlan:
    """Reads the pairs off a captured graph, in which fused linears are taken apart.

    Operations in `whole` run on the gathered sequence, on whole weights.
    """
    separate_fused(capture)
    plan = TensorPlan(axis, degree)
    linears = [n for n in capture.graph.nodes if is_linear(n, capture)]
    for node in capture.graph.nodes:
        if op_name(node) == "attention":
            _plan_attention(plan, capture, node)
    for node in linears:
        if node not in plan.roles:
            _plan_mlp(plan, capture, node)
    _plan_vocabulary(plan, capture, linears)
    plan.roles = {node: role for node, role in plan.roles.items() if node not in whole}
    for node in linears:
        if node not in plan.roles and node not in whole:
            _not_cut(
                plan,
                node,
                "no partner that sums over its features",
                "column-parallel linears whose outputs meet one row-parallel linear",
            )
    _cut_parameters(plan, capture)
    return plan


def _not_cut(plan: TensorPlan, node: Node, found: str, legal: str) -> None:
    plan.findings.append(
        diagnostic(
            "SC405",
            where=place_of(node),
            found=found,
            legal=legal,
            help="exact as it is: the weight is whole on every rank, the work is cut by tokens",
        )
    )


def _plan_attention(plan: TensorPlan, capture: Capture, node: Node) -> None:
    """q, k and v by heads: each of linears of its own, or of one that makes them head by head.

    Several linears may add up to one of them (an adapter beside its base), or share the output.
    What is made once for all heads is not cut.
    """
    info: AttentionInfo = node.meta["attention"]
    if info.heads % plan.degree:
        return
    outs = next_linears(node, capture)
    shared: dict[Node, int] = {}
    found = [sources(operand, capture, info.heads, shared) for operand in node.args[:3]]
    if not outs or not all(found):
        return
    counts = (info.heads, info.kv_heads, info.kv_heads)
    widths = (info.head_dim, info.head_dim, info.value_dim)
    roles: dict[Node, Role] = {}
    for made, count, dim in zip(found, counts, widths, strict=True):
        for linear in made or ():
            if (linear in roles or width(linear) != count * dim) and not by_heads(
                linear, count, capture, plan.degree
            ):
                return
            # Of fewer KV heads than ranks every rank makes all and uses its own.
            roles[linear] = "gathered" if count % plan.degree else "column"
    plan.roles.update(roles)
    plan.roles.update(dict.fromkeys(outs, "row"))
    plan.shared.update(shared)


def _plan_mlp(plan: TensorPlan, capture: Capture, node: Node) -> None:
    x = node.args[0]
    found = sources(x, capture)
    features = int(node.args[1].meta["val"].shape[1])
    if not found or features % plan.degree:
        return
    if any(s in plan.roles or width(s) != features for s in found):
        return
    targets = {user for user in x.users if is_linear(user, capture)}
    if any(not ends_in(s, targets) for s in found):
        return
    plan.roles.update(dict.fromkeys(found, "column"))
    plan.roles.update(dict.fromkeys(targets, "row"))


def _plan_vocabulary(plan: TensorPlan, capture: Capture, linears: Iterable[Node]) -> None:
    """Embeddings of token ids, and linears that give one number per word of such a vocabulary.

    Known from sizes, and from standing behind the last attention, alone: calls with and without
    labels must agree on the cut. Of linears in a row the last one gives the words.
    """
    words = set()
    for node in capture.graph.nodes:
        if op_name(node) == "aten.embedding" and node.args[0].name in capture.parameters:
            rows = int(node.args[0].meta["val"].shape[0])
            if not from_words(node.args[1], capture):
                continue
            if rows < plan.degree:
                found = f"{rows} words for {plan.degree} ranks"
                _not_cut(plan, node, found, "at least one word for each rank")
            else:
                words.add(rows)
                plan.roles[node] = "vocabulary"
    heads = {node for node in linears if node not in plan.roles and width(node) in words}
    for node in linears:
        if node in heads and not feeds(node, heads):
            plan.roles[node] = "vocabulary"


def weight_spec(role: Role | None, shape: tuple[Size, ...], axis: str) -> Spec:
    """How a linear (or embedding) in this role wants its weight [rows, columns] or bias [rows]."""
    if role in ("column", "vocabulary"):
        return Spec(((Factor(shape[0], (axis,)),), *(whole(s) for s in shape[1:])))
    if role == "row" and len(shape) == 2:
        return Spec((whole(shape[0]), (Factor(shape[1], (axis,)),)))
    return replicated(shape)


def _cut_parameters(plan: TensorPlan, capture: Capture) -> None:
    """A parameter whose uses all want the same cut lives cut; any other is cut at each use."""
    for node in capture.graph.nodes:
        if node.op != "placeholder" or node.name not in capture.parameters:
            continue
        wishes = dict.fromkeys(_wishes(plan, capture, node))
        if len(wishes) == 1 and (spec := next(iter(wishes))) is not None:
            if not spec.is_replicated:
                plan.specs[node] = spec
        elif any(spec is None or not spec.is_replicated for spec in wishes):
            plan.findings.append(
                diagnostic(
                    "SC406",
                    where=capture.state[node.name],
                    found="parts of it are cut" if None in wishes else "cut in unlike ways",
                    legal="one cut of the whole weight that suits all its uses",
                    help="exact as it is: work and traffic are divided, the memory of this weight "
                    "is not; weights of their own would be cut",
                )
            )


def _wishes(plan: TensorPlan, capture: Capture, weight: Node) -> Iterator[Spec | None]:
    """What each use wants of a weight; None for a cut of a slice, which no cut of the whole is."""
    shape = capture.shape(weight)
    for user in weight.users:
        name = op_name(user)
        if name == "aten.t":
            for wish in _wishes(plan, capture, user):
                yield None if wish is None else Spec(tuple(reversed(wish.dims)))
        elif name == "aten.slice":
            parts = list(_wishes(plan, capture, user))
            cut = any(wish is None or not wish.is_replicated for wish in parts)
            yield None if cut else replicated(shape)
        elif user.op == "call_function":
            yield weight_spec(plan.roles.get(user), shape, plan.axis)


def split_row_biases(capture: Capture, plan: TensorPlan) -> None:
    """A bias behind a row-parallel linear becomes an addition of its own, after the sum."""
    editor = Editor(capture)
    for node in [n for n, role in plan.roles.items() if role == "row"]:
        bias = argument(node, 2, "bias")
        if not is_tensor(bias):
            continue
        plain = editor.call(torch.ops.aten.linear.default, node.args[:2], before=node)
        total = editor.call(torch.ops.aten.add.Tensor, (plain, bias), before=node)
        plan.roles[plain] = plan.roles.pop(node)
        editor.replace(node, total)
