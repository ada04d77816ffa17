"""Rewrites that hold in the global view and make a capture simpler to place.

Each pass takes and returns the graph's owner and keeps its meaning: assertions become facts of the
capture, operations without effect go, in-place operations become plain ones, linear layers get one
form, a mean loss over tokens becomes sum / count, and a label shift written as a slice of the
logits moves to the labels.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from seqcomp.capture.dropout import keyed_dropout_pass
from seqcomp.capture.edit import Editor, argument, is_tensor, op_name, place_of
from seqcomp.capture.einsums import einsums_pass
from seqcomp.capture.export import Capture
from seqcomp.capture.flat_heads import flat_heads_pass
from seqcomp.capture.functional import filled_buffers_pass, functional_pass
from seqcomp.capture.kinds import (
    DROPOUTS,
    OTHER_DROPOUTS,
    RECURRENT,
    VIEWS,
    is_off,
    is_pointwise,
)
from seqcomp.capture.lead_dims import fused_lead_pass
from seqcomp.capture.linears import linears_pass
from seqcomp.capture.losses import mean_loss_pass, shift_labels_pass
from seqcomp.capture.repeats import heads_first_pass
from seqcomp.capture.score_products import bmm_pass
from seqcomp.diagnostics import PlanError, diagnostic

aten = torch.ops.aten


def canonicalise(capture: Capture) -> Capture:
    """Runs the passes in order."""
    for step in (
        inline_regions_pass,
        units_pass,
        drop_asserts_pass,
        filled_buffers_pass,
        functional_pass,
        broadcasts_pass,
        drop_identities_pass,
        linears_pass,
        keyed_dropout_pass,
        refuse_random_pass,
        shift_labels_pass,
        mean_loss_pass,
        flat_heads_pass,
        bmm_pass,
        einsums_pass,
        fused_lead_pass,
        heads_first_pass,
        fixed_squeezes_pass,
        separate_operands_pass,
    ):
        step(capture)
        capture.graph.eliminate_dead_code()
        capture.graph.lint()
    return capture


def drop_asserts_pass(capture: Capture) -> None:
    """Assertions on sizes are kept as facts (Capture.accepts); those on dtypes are dropped.

    A dtype assertion would bake the autocast state in effect at the capture, which is part of
    the variant's key already.
    """
    for node in list(capture.graph.nodes):
        name = op_name(node) if node.op == "call_function" else ""
        if name == "aten._assert_tensor_metadata":
            capture.graph.erase_node(node)
        elif name in ("aten._assert_scalar", "aten.sym_constrain_range_for_size"):
            value = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
            if isinstance(value, torch.SymBool):
                expr = value.node.expr.xreplace(dict(capture.canonical))
                if expr.free_symbols - set(capture.hints):
                    raise _refuse_data_dependent(node)
                capture.checks.append(expr)
            capture.graph.erase_node(node)


def _refuse_data_dependent(node: Node) -> PlanError:
    return PlanError(
        [
            diagnostic(
                "SC311",
                where=place_of(node),
                found="a size or branch that depends on tensor values",
                legal="shapes that depend on input shapes alone",
                help="compute it outside of the model and pass it in",
            )
        ]
    )


def inline_regions_pass(capture: Capture) -> None:
    """no_grad and autocast regions are inlined; what leaves no_grad is detached."""
    for node in list(capture.graph.nodes):
        name = op_name(node) if node.op == "call_function" else ""
        if name == "wrap_with_autocast":
            _require_same_autocast(node)
            enabled, body, operands = True, node.args[4], node.args[5:]
        elif name == "wrap_with_set_grad_enabled":
            enabled, body, *operands = node.args
        else:
            continue
        module = _submodule(capture.graph, body)
        inner = [n for n in module.graph.nodes if n.op == "placeholder"]
        mapping: dict[Node, Any] = dict(zip(inner, operands, strict=True))
        with capture.graph.inserting_before(node):
            for sub in module.graph.nodes:
                if sub.op in ("placeholder", "output"):
                    continue
                mapping[sub] = capture.graph.node_copy(sub, mapping.__getitem__)
        results = module.graph.output_node().args[0]
        editor = Editor(capture)
        outs: list[Any] = []
        for result in results:
            value = mapping[result] if isinstance(result, Node) else result
            if not enabled and is_tensor(value) and value.meta["val"].is_floating_point():
                value = editor.call(aten.detach.default, (value,), before=node)
            outs.append(value)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(outs[user.args[1]])
            capture.graph.erase_node(user)
        capture.graph.erase_node(node)


def units_pass(capture: Capture) -> None:
    """A module that runs as one unit is a call of that unit on its tensors and parameters."""
    for node in capture.graph.nodes:
        if node.op == "call_function" and op_name(node) == "seqcomp.token_local":
            inputs, parameters, number = node.args[:3]
            node.target = capture.units.found[number]
            node.args = (inputs, parameters)


def _require_same_autocast(node: Node) -> None:
    """A region whose autocast is the caller's own changes nothing; others are refused."""
    device, dtype, enabled = node.args[:3]
    active = torch.is_autocast_enabled(device)
    same = active == enabled
    if enabled and active:
        same = dtype in (None, torch.get_autocast_dtype(device))
    if same or _ignores_autocast(node):
        return
    raise PlanError(
        [
            diagnostic(
                "SC302",
                where=place_of(node),
                found=f"an autocast region (enabled={enabled}) inside the forward",
                legal="autocast around the whole call, or none",
                help="move torch.autocast around the call of the model",
            )
        ]
    )


def _ignores_autocast(node: Node) -> bool:
    """Whether a region is element-wise operations and views, which autocast leaves alone."""
    body = _submodule(node.graph, node.args[4])
    calls = [n for n in body.graph.nodes if n.op == "call_function"]
    return all(is_pointwise(n) or op_name(n) in VIEWS | _FREE for n in calls)


_FREE = {"aten.cat", "aten.arange", "aten.slice", "aten._assert_tensor_metadata", "aten.sym_size"}


def _submodule(graph: torch.fx.Graph, node: Node) -> torch.fx.GraphModule:
    assert graph.owning_module is not None
    return graph.owning_module.get_submodule(str(node.target))


def broadcasts_pass(capture: Capture) -> None:
    """broadcast_tensors(a, b), which losses begin with, is an expand of each."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or op_name(node) != "aten.broadcast_tensors":
            continue
        for user in list(node.users):
            source = node.args[0][user.args[1]]
            whole = next((n for n in node.args[0] if capture.shape(n) == capture.shape(user)), None)
            if capture.shape(source) == capture.shape(user):
                editor.replace(user, source)
            elif whole is not None:
                editor.replace(
                    user, editor.call(aten.expand_as.default, (source, whole), before=user)
                )


def drop_identities_pass(capture: Capture) -> None:
    """Aliases, casts to the same dtype, whole slices and dropout that is off are removed."""
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or not is_tensor(node):
            continue
        source = node.args[0] if node.args else None
        if not is_tensor(source):
            continue
        if _is_identity(capture, node, source):
            node.replace_all_uses_with(source)
            capture.graph.erase_node(node)


def _is_identity(capture: Capture, node: Node, source: Node) -> bool:
    name = op_name(node)
    new, old = node.meta["val"], source.meta["val"]
    if name in ("aten.alias", "aten.lift_fresh_copy"):
        return True
    if name == "aten.to":
        same = new.dtype == old.dtype and new.device == old.device
        return same and not argument(node, 3, "copy", False)
    if name in ("aten.expand", "aten.slice"):
        return capture.shape(node) == capture.shape(source)
    if name in (*DROPOUTS, *OTHER_DROPOUTS):
        return is_off(node)
    return False


def _drops(node: Node) -> bool:
    """Whether a recurrent layer has dropout that is on."""
    return bool(argument(node, 6, "train", False)) and argument(node, 5, "dropout", 0.0) > 0


def refuse_random_pass(capture: Capture) -> None:
    """Random numbers would differ between ranks and from one device: refused by name.

    Dropout has become a function of its key before.
    """
    found = []
    for node in capture.graph.nodes:
        if node.op != "call_function":
            continue
        target = node.target
        if (
            isinstance(target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in target.tags
            and op_name(node) != "aten.scaled_dot_product_attention"
            and not (op_name(node) in RECURRENT and not _drops(node))
        ):
            found.append((node, str(target)))
    if found:
        raise PlanError(
            [
                diagnostic(
                    "SC308",
                    where=place_of(node),
                    found=what,
                    legal="no random numbers inside the forward but those of dropout",
                    help="use dropout of another kind, or call eval() first"
                    if "dropout" in what
                    else "draw the numbers outside of the model and pass them in",
                )
                for node, what in found
            ]
        )


def fixed_squeezes_pass(capture: Capture) -> None:
    """squeeze names the dims that are 1 in the whole: a local shard may have size 1 as well."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or op_name(node) != "aten.squeeze":
            continue
        source = node.args[0]
        shape = capture.shape(source)
        named = argument(node, 1, "dim")
        if named is None:
            named = list(range(len(shape)))
        listed = named if isinstance(named, list | tuple) else [named]
        gone = sorted({d % len(shape) for d in listed if shape and shape[d] == 1})
        if not gone:
            node.replace_all_uses_with(source)
            capture.graph.erase_node(node)
        else:
            editor.replace(node, editor.call(aten.squeeze.dims, (source, gone), before=node))


def separate_operands_pass(capture: Capture) -> None:
    """An operand in two roles (x @ x, linear(h, h)) gets a name for each: roles differ in place."""
    editor = Editor(capture)
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or is_pointwise(node):
            continue
        seen: set[Node] = set()
        args = list(node.args)
        for index, item in enumerate(args):
            if not is_tensor(item):
                continue
            if item in seen:
                args[index] = editor.call(aten.alias.default, (item,), before=node)
            seen.add(item)
        node.args = tuple(args)
