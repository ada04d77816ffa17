"""Gives every value of a capture its placement, from the inputs on.

Inputs are whole over the sequence axes and cut in batch over the data axes. Sharding of tokens
begins where they meet weights or attention; from there each operation's rule says what it needs
and gives. Index arithmetic on the inputs (positions, label shifts, valid counts) therefore stays
global, and no position can be wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from seqcomp.capture.call import BATCH
from seqcomp.capture.edit import is_tensor, module_path, op_name, place_of
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import CONVOLUTIONS, VIEWS, is_pointwise
from seqcomp.capture.rows import rows_at
from seqcomp.capture.sizes import BATCH_SYMBOL, LENGTH_SYMBOL
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.placement.along import ALONG_RULES
from seqcomp.placement.contract import CONTRACT_RULES
from seqcomp.placement.counts import COUNT_RULES
from seqcomp.placement.dimwise import DIMWISE_RULES
from seqcomp.placement.dropout import DROPOUT_RULES
from seqcomp.placement.findings import gather_findings, travel_finding
from seqcomp.placement.megatron import TensorPlan, plan_tensor_axis, split_row_biases
from seqcomp.placement.memo import DecisionMemo
from seqcomp.placement.oracle import Oracle
from seqcomp.placement.pointwise import pointwise_rule
from seqcomp.placement.recurrence import refuse_recurrences
from seqcomp.placement.recurrent import RECURRENT_RULES
from seqcomp.placement.rule import (
    Decision,
    Env,
    MeshView,
    Rule,
    gather_all,
    summed,
    tensor_args,
)
from seqcomp.placement.spec import Dim, Factor, Spec, replicated
from seqcomp.placement.special import SPECIAL_RULES
from seqcomp.placement.uneven import evened
from seqcomp.placement.units import UNIT_RULES
from seqcomp.placement.views import VIEW_RULES


@dataclass
class Placement:
    """The outcome: per node its decision, per value its native placement."""

    decisions: dict[Node, Decision]
    native: dict[Node, Spec | tuple[Spec, ...]]
    findings: list[Diagnostic]
    tensor: TensorPlan | None = None


def assign(
    capture: Capture, mesh: MeshView, is_whole: Callable[[str], bool] = lambda path: False
) -> Placement:
    """Places every value. `is_whole(path)`: modules that run on the gathered sequence.

    Raises PlanError for operations that cannot be placed at all.
    """
    tensor = None
    whole = {n for n in capture.graph.nodes if n.op == "call_function" and is_whole(module_path(n))}
    if mesh.tensor is not None:
        tensor = plan_tensor_axis(capture, mesh.tensor, mesh.degrees[mesh.tensor], whole)
    env = Env(capture, mesh, {}, tensor=tensor)
    if tensor is not None:
        split_row_biases(capture, tensor)
        env.findings.extend(tensor.findings)
    oracle = Oracle(mesh.degrees, capture.hints)
    decisions: dict[Node, Decision] = {}
    weights = _weight_like(capture)
    memo = DecisionMemo(env, weights, whole)

    def decide(node: Node) -> Decision:
        if node in whole:
            return _decide_whole(node, env, oracle, weights)
        return _decide(node, env, oracle, weights)

    for node in capture.graph.nodes:
        if node.op == "placeholder":
            if is_tensor(node):
                cut = tensor.specs.get(node) if tensor else None
                env.native[node] = cut or _input_spec(node, capture, mesh)
        elif node.op == "call_function" and _is_tensor_op(node):
            if node.target is operator.getitem:
                source = env.native[node.args[0]]
                env.native[node] = source[node.args[1]]
                continue
            decision = memo.get(node, decide)
            _check(node, decision, env)
            if "travels" in decision.attributes:
                env.findings.append(travel_finding(node, decision))
            if decision.gathered:
                env.findings.extend(gather_findings(node, decision, env))
            decisions[node] = decision
            env.native[node] = decision.out
    refuse_recurrences(capture, mesh.sequence, decisions, env.native, whole)
    return Placement(decisions, env.native, env.findings, tensor)


def _is_tensor_op(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
        return True
    if any(is_tensor(n) for n in node.all_input_nodes) and op_name(node) not in (
        "aten.sym_size",
        "aten.sym_numel",
    ):
        raise PlanError(
            [
                diagnostic(
                    "SC311",
                    where=place_of(node),
                    found=f"{op_name(node)} turns a tensor into a Python number",
                    legal="shapes and branches that depend on input shapes alone",
                    help="compute it outside of the model and pass it in",
                )
            ]
        )
    return False


def _weight_like(capture: Capture) -> set[Node]:
    """Parameters, and what is made of parameters and constants alone without the sequence."""
    result: set[Node] = set()
    for node in capture.graph.nodes:
        if node.op == "placeholder" and node.name in capture.parameters:
            result.add(node)
        elif node.op == "call_function" and is_tensor(node) and tensor_args(node):
            has_token = any(s.has(BATCH_SYMBOL, LENGTH_SYMBOL) for s in capture.shape(node))
            if (
                not has_token
                and any(n in result for n in tensor_args(node))
                and all(
                    n in result or (n.op == "placeholder" and n.name in capture.state)
                    for n in tensor_args(node)
                )
            ):
                result.add(node)
    return result


def _input_spec(node: Node, capture: Capture, mesh: MeshView) -> Spec:
    spec = replicated(capture.shape(node))
    if node.name not in capture.inputs or not mesh.batch:
        return spec
    dims = capture.dims[capture.inputs.index(node.name)]
    at = dims.index(BATCH) if dims is not None else None
    if at is None:
        return spec
    return spec.with_dim(at, (Factor(capture.shape(node)[at], mesh.batch),))


def _decide(node: Node, env: Env, oracle: Oracle, weights: set[Node]) -> Decision:
    env.preferred = {
        n: env.scattered(env.native[n])
        for n in tensor_args(node)
        if isinstance(env.native[n], Spec) and not (is_pointwise(node) or op_name(node) in VIEWS)
    }
    if _starts_sharding(node, weights):
        env.preferred |= {
            n: _with_tokens(env.spec(n), env)
            for n in tensor_args(node)
            if n not in weights and isinstance(env.native[n], Spec)
        }
    env.preferred |= (even := evened(node, env))
    rule = _rule_for(node)
    decision = rule(node, env) if rule else None
    if decision is None:
        decision = oracle.decide(node, env)
    if decision is None:
        _require_known(node)
        decision = gather_all(node, env, f"{op_name(node)} has no rule for this placement")
    if even and not decision.gathered:
        decision = replace(decision, gathered=f"{op_name(node)} takes no parts of unequal size")
    return decision


def _decide_whole(node: Node, env: Env, oracle: Oracle, weights: set[Node]) -> Decision:
    """As on a mesh without sequence axes; the batch stays cut."""
    operands = [n for n in tensor_args(node) if isinstance(env.native[n], Spec)]
    native: dict[Node, Spec | tuple[Spec, ...]] = {
        n: summed(env.native[n].without(env.mesh.sequence)) for n in operands
    }
    bare = Env(env.capture, env.mesh.without_sequence(), native, findings=env.findings)
    decision = _decide(node, bare, oracle, weights)
    if decision.gathered or all(native[n] == env.native[n] for n in operands):
        return decision
    return replace(decision, gathered="the plan runs this module on the whole sequence")


def _starts_sharding(node: Node, weights: set[Node]) -> bool:
    if op_name(node) == "attention":
        return True
    if op_name(node) in CONVOLUTIONS:
        return False  # neighbours along a sequence, or the sides of an image
    return any(n in weights for n in tensor_args(node))


def _with_tokens(spec: Spec, env: Env) -> Spec:
    """The spec with its first whole sequence dim cut over the sequence axes (batch alike)."""
    used = set(spec.axes) | set(spec.partial)
    for axes, size in (
        (env.mesh.batch, env.capture.batch),
        (env.mesh.sequence, env.capture.length),
    ):
        if not axes or size is None or size == 1 or used & set(axes):
            continue
        for index, dim in enumerate(spec.dims):
            found = _cut(dim, size, axes)
            if found is not None:
                spec = spec.with_dim(index, found)
                break
    return spec


def _cut(dim: Dim, size: object, axes: tuple[str, ...]) -> Dim | None:
    for at, factor in enumerate(dim):
        if factor.size == size and not factor.axes:
            return (*dim[:at], Factor(factor.size, axes), *dim[at + 1 :])
    return None


def _rule_for(node: Node) -> Rule | None:
    name = op_name(node)
    tables = (
        UNIT_RULES, SPECIAL_RULES, DROPOUT_RULES, COUNT_RULES, VIEW_RULES, CONTRACT_RULES,
        ALONG_RULES, RECURRENT_RULES,
    )  # fmt: skip
    for table in tables:
        if name in table:
            return table[name]
    if is_pointwise(node):
        return pointwise_rule
    return DIMWISE_RULES.get(name)


def _require_known(node: Node) -> None:
    """Gathering makes any pure function exact; what is not known to be pure is refused."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims"):
        return
    if target is rows_at:
        return
    raise PlanError(
        [
            diagnostic(
                "SC302",
                where=place_of(node),
                found=str(target),
                legal="ATen operations",
                help="replace the custom operation by ATen operations",
            )
        ]
    )


def _check(node: Node, decision: Decision, env: Env) -> None:
    """Our own invariant: a placement describes a tensor of the node's shape, axes used once."""
    outs = decision.out if isinstance(decision.out, tuple) else (decision.out,)
    if is_tensor(node):
        shape = env.shape(node)
        spec = outs[0]
        assert len(spec.dims) == len(shape), f"{node.format_node()}: {spec} for {shape}"
        for index, size in enumerate(shape):
            assert spec.size(index) == size, f"{node.format_node()}: {spec} for {shape}"
    for spec in (*outs, *decision.wants.values()):
        axes = [*spec.axes, *spec.partial]
        assert len(axes) == len(set(axes)), f"{node.format_node()}: axis used twice in {spec}"
    missing = [n for n in tensor_args(node) if n not in decision.wants]
    assert not missing, f"{node.format_node()}: no placement asked of {missing}"
