"""Attention written out: matmul, scale, softcap, mask, softmax, matmul (also with sinks).

Each is read as one attention, so that no S x S tensor is computed. Where the weights themselves
are used elsewhere, or something stands between that is none of these, the operations stay as they
are, and are placed like any others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from seqcomp.capture.dropout import Dropped
from seqcomp.capture.edit import Editor, argument, is_tensor, op_name, transposed_dims
from seqcomp.capture.export import Capture
from seqcomp.capture.fills import Fill, filled_in, sum_of
from seqcomp.capture.lead_dims import between_views, lead_of
from seqcomp.runtime.attention.pair_mask import hides_from

aten = torch.ops.aten


@dataclass
class Written:
    """An attention as the graph has it: `out` = softmax(cap(q k^T scale) + mask, sinks) v.

    scale None is 1/sqrt(d); dtype: the one that the softmax is computed in, where it is fixed.
    With a `mod` its first node takes the place of cap(q k^T scale), and `mask` is boolean.
    """

    out: Node
    q: Node
    k: Node
    v: Node
    scale: float | None
    mask: Node | None
    causal: bool = False
    softcap: float = 0.0
    sinks: Node | None = None
    dtype: torch.dtype | None = None
    lse: bool = False  # the log-sum-exp is one more column of `out`
    mod: tuple[Node, Node] | None = None  # (scores in any form, made of q k^T scale)
    filled: Node | None = None  # pairs whose number in `mask` takes the place of the score
    dropped: Dropped | None = None


@dataclass
class Scores:
    """State of the walk from the softmax up to q k^T; what is met last was applied first."""

    node: Node
    masks: list[Node | Fill] = field(default_factory=list)
    absorbs: bool = True  # whether the numbers that fill swallow all else that is added
    scale: float = 1.0
    softcap: float = 0.0
    sinks: Node | None = None


def find_eager(capture: Capture) -> list[Written]:
    """All attentions that are written out, in order; adds nodes for masks, changes no other."""
    found = []
    for node in list(capture.graph.nodes):
        if node.op == "call_function" and op_name(node) in ("aten.softmax", "aten._softmax"):
            item = _read(capture, node)
            if item is not None:
                found.append(item)
    return found


def _read(capture: Capture, softmax: Node) -> Written | None:
    dim, ndim = argument(softmax, 1, "dim"), softmax.meta["val"].ndim
    if ndim < 3 or dim not in (ndim - 1, -1):
        return None
    walked = scores_behind(capture, softmax.args[0])
    used = _weights_times_values(softmax, with_sinks=walked is not None and bool(walked.sinks))
    if walked is None or used is None:
        return None
    if not walked.absorbs and not all(isinstance(mask, Fill) for mask in walked.masks):
        return None
    product, dropped = used
    q, k_t = walked.node.args[:2]
    k = _transposed(capture, k_t, before=product)
    v = product.args[1]
    one_dtype = q.meta["val"].dtype == v.meta["val"].dtype
    if k is None or (ndim != 4 and (walked.sinks is not None or not one_dtype)):
        return None
    lead = lead_of(capture, q=q, k=k, v=v, product=product)
    if lead is None:
        return None
    mask = sum_of(capture, walked.masks, before=product)
    filled = filled_in(capture, walked.masks, before=product)
    if not one_dtype:
        product, q, k, v = _one_dtype(capture, product, q, k, v)
    if ndim != 4:
        editor, before = Editor(capture), product
        mask, filled = lead.of_scores(editor, mask, filled, before=before)
        q, k, v = (lead.view(editor, x, before) for x in (q, k, v))
        product = between_views(capture, product, lead)
    return Written(
        out=product,
        q=q,
        k=k,
        v=v,
        scale=walked.scale,
        mask=mask,
        softcap=walked.softcap,
        sinks=walked.sinks,
        dtype=softmax.meta["val"].dtype,
        dropped=dropped,
        filled=filled,
    )


def _one_dtype(
    capture: Capture, product: Node, q: Node, k: Node, v: Node
) -> tuple[Node, Node, Node, Node]:
    """Scores in another dtype than the values (fp32 among bf16): all of it in the wider one."""
    editor = Editor(capture)
    own = product.meta["val"].dtype
    wide = torch.promote_types(q.meta["val"].dtype, v.meta["val"].dtype)
    weights, q, k, v = (
        n if n.meta["val"].dtype == wide else editor.call(aten.to.dtype, (n, wide), before=product)
        for n in (product.args[0], q, k, v)
    )
    new = editor.call(product.target, (weights, v), before=product)
    back = new if wide == own else editor.call(aten.to.dtype, (new, own), before=product)
    editor.replace(product, back)
    return new, q, k, v


def scores_behind(capture: Capture, node: Node) -> Scores | None:
    """What is done to q k^T on the way to `node`, the softmax's operand; None for other things."""
    state = Scores(node)
    while is_tensor(state.node) and state.node.op == "call_function":
        if op_name(state.node) == "aten.matmul":
            return state
        if len(state.node.users) > 1 and not _only_its_maximum(state.node):
            return None
        step = _STEPS.get(op_name(state.node).removeprefix("aten.").strip("_"))
        if step is None or not step(capture, state):
            return None
    return None


def _only_its_maximum(node: Node) -> bool:
    """Users besides the softmax that do not change it: x - max(x)."""
    return all(op_name(user) in ("aten.sub", "aten.max", "aten.amax") for user in node.users)


def _to(capture: Capture, state: Scores) -> bool:
    state.node = state.node.args[0]
    return state.node.meta["val"].is_floating_point()


def _add(capture: Capture, state: Scores) -> bool:
    if argument(state.node, 2, "alpha", 1) != 1 or state.scale != 1.0 or state.softcap:
        return False
    left, right = state.node.args[:2]
    if not is_tensor(left) or not is_tensor(right):
        return False
    scores, mask = (left, right) if _leads_to_product(left) else (right, left)
    if not _leads_to_product(scores) or _is_made_of(mask, scores):
        return False
    state.masks.append(mask)
    state.node = scores
    return True


def _leads_to_product(node: Node) -> bool:
    """Whether a matmul of two activations is behind a chain of element-wise operations."""
    for _ in range(12):
        if not is_tensor(node) or node.op != "call_function":
            return False
        if op_name(node) == "aten.matmul":
            return all(is_tensor(n) and n.meta["val"].ndim >= 3 for n in node.args[:2])
        name = op_name(node).removeprefix("aten.").strip("_")
        if name == "tanh":
            node = node.args[0]
        elif name == "where":
            node = node.args[1] if _leads_to_product(node.args[1]) else node.args[2]
        elif name in _STEPS and name != "cat":
            left = node.args[0]
            other = node.args[1] if len(node.args) > 1 else None
            swap = name == "add" and is_tensor(other) and not _leads_to_product(left)
            node = other if swap else left
        else:
            return False
    return False


def _times(capture: Capture, state: Scores) -> bool:
    return _scaled(capture, state, lambda x: x)


def _divided(capture: Capture, state: Scores) -> bool:
    if argument(state.node, 2, "rounding_mode") is not None:
        return False
    return _scaled(capture, state, lambda x: 1.0 / x)


def _scaled(capture: Capture, state: Scores, factor: Callable[[float], float]) -> bool:
    number = number_in(capture, state.node.args[1])
    if number is None or number == 0:
        return False
    source = state.node.args[0]
    if is_tensor(source) and op_name(source) == "aten.tanh" and state.scale == 1.0:
        return not state.softcap and _capped(capture, state, factor(number), source)
    state.scale *= factor(number)
    state.node = source
    return True


def _capped(capture: Capture, state: Scores, cap: float, tanh: Node) -> bool:
    """c tanh(s / c)"""
    inner = tanh.args[0]
    if not is_tensor(inner) or len(tanh.users) > 1:
        return False
    number = number_in(capture, inner.args[1]) if len(inner.args) > 1 else None
    divided = op_name(inner) == "aten.div" and number == cap
    times = op_name(inner) == "aten.mul" and number is not None and math.isclose(number * cap, 1.0)
    if cap <= 0 or not (divided or times):
        return False
    state.softcap, state.node = cap, inner.args[0]
    return True


def number_in(capture: Capture, item: object) -> float | None:
    """The number that an operand is, however it is written."""
    if isinstance(item, bool):
        return None
    if isinstance(item, int | float):
        return float(item)
    if isinstance(item, Node) and op_name(item) in ("aten.scalar_tensor", "aten.full"):
        value = item.args[-1]
        return float(value) if isinstance(value, int | float) else None
    return _constant(capture, item) if isinstance(item, Node) else None


def _constant(capture: Capture, node: Node) -> float | None:
    """torch.tensor(number), which a capture lifts out of the code."""
    while node.op == "call_function" and op_name(node) in _COPIES:
        node = node.args[0]
    value = capture.constants.get(capture.state.get(node.name, ""))
    if value is None or value.numel() != 1 or isinstance(value, FakeTensor) or value.is_meta:
        return None
    return float(value)


_COPIES = ("aten.detach", "aten.alias", "aten.clone", "aten.lift_fresh", "aten.to")


def _filled(capture: Capture, state: Scores) -> bool:
    """masked_fill(scores, hidden, lowest)"""
    scores, hidden, value = state.node.args[:3]
    return _choice(capture, state, hidden, scores, number_in(capture, value), is_hidden=True)


def _where(capture: Capture, state: Scores) -> bool:
    condition, yes, no = state.node.args[:3]
    if is_tensor(yes) and _leads_to_product(yes):
        return _choice(capture, state, condition, yes, number_in(capture, no), is_hidden=False)
    if is_tensor(no):
        return _choice(capture, state, condition, no, number_in(capture, yes), is_hidden=True)
    return False


def _choice(
    capture: Capture,
    state: Scores,
    condition: Node,
    scores: Node,
    value: float | None,
    *,
    is_hidden: bool,
) -> bool:
    dtype = state.node.meta["val"].dtype
    if value is None or value > hides_from(dtype) or state.scale != 1.0 or state.softcap:
        return False
    state.absorbs = state.absorbs and value <= torch.finfo(dtype).min / 2
    editor, before = Editor(capture), state.node
    kwargs = {"dtype": dtype, "device": state.node.meta["val"].device}
    low = editor.call(aten.scalar_tensor.default, (value,), kwargs, before=before)
    zero = editor.call(aten.scalar_tensor.default, (0.0,), kwargs, before=before)
    state.masks.append(Fill(condition, is_hidden, low, zero))
    state.node = scores
    return True


def _less(capture: Capture, state: Scores) -> bool:
    """x - max(x), which has the softmax of x; or x - bias."""
    source, other = state.node.args[:2]
    peak = other
    while is_tensor(peak) and op_name(peak) in ("aten.getitem", "getitem", "aten.to"):
        peak = peak.args[0]
    if not isinstance(peak, Node):
        return False
    if op_name(peak) in ("aten.max", "aten.amax"):
        state.node = source
        return peak.args[0] is source
    if argument(state.node, 2, "alpha", 1) != 1 or state.scale != 1.0 or state.softcap:
        return False
    if not _leads_to_product(source) or _is_made_of(other, source):
        return False
    state.masks.append(Editor(capture).call(aten.neg.default, (other,), before=state.node))
    state.node = source
    return True


def _is_made_of(node: Node, scores: Node) -> bool:
    """Whether a bias is a product itself, or depends on the scores that it is added to."""
    if _leads_to_product(node):
        return True
    seen, work = {node}, [node]
    while work:
        for source in work.pop().all_input_nodes:
            if source is scores:
                return True
            if source not in seen:
                seen.add(source)
                work.append(source)
    return False


def _with_sinks(capture: Capture, state: Scores) -> bool:
    """cat((scores, sinks expanded to one column), -1)"""
    parts, dim = state.node.args[0], argument(state.node, 1, "dim", 0)
    if len(parts) != 2 or dim not in (3, -1) or state.masks or state.sinks is not None:
        return False
    column = parts[1]
    while is_tensor(column) and op_name(column) in (
        "aten.expand", "aten.reshape", "aten.view", "aten.unsqueeze", "aten.to", "aten.slice",
        "aten.repeat", "aten.contiguous", "aten.clone",
    ):  # fmt: skip
        column = column.args[0]
    heads = state.node.meta["val"].shape[1]
    if not is_tensor(column) or tuple(column.meta["val"].shape) != (heads,):
        return False
    state.sinks, state.node = column, parts[0]
    return True


Step = Callable[[Capture, Scores], bool]
_STEPS: dict[str, Step] = {
    "to": _to,
    "add": _add,
    "mul": _times,
    "div": _divided,
    "masked_fill": _filled,
    "where": _where,
    "sub": _less,
    "cat": _with_sinks,
}


def _weights_times_values(softmax: Node, *, with_sinks: bool) -> tuple[Node, Dropped | None] | None:
    """The matmul with the values, where nothing else uses the weights, and what drops these."""
    node, dropped = softmax, None
    while len(node.users) == 1:
        user = next(iter(node.users))
        name = op_name(user)
        if name == "aten.matmul" and user.args[0] is node and is_tensor(user.args[1]):
            return None if with_sinks else (user, dropped)
        if name == "aten.slice" and with_sinks:
            dim, stop = argument(user, 1, "dim", 0), argument(user, 3, "end")
            if dim not in (3, -1) or stop != -1 or argument(user, 2, "start", 0) not in (0, None):
                return None
            with_sinks = False
        elif name == "keyed_dropout" and dropped is None and not with_sinks:
            _, _, number, p, dims = user.args
            if dims != user.meta["val"].ndim:
                return None
            dropped = Dropped(p, number)
        elif name not in ("aten.to", "aten.contiguous", "aten.clone"):
            return None
        node = user
    return None


def _transposed(capture: Capture, node: Node, before: Node) -> Node | None:
    """k [.., S, d] behind k^T, or made of it where it came to be in another way."""
    if not is_tensor(node) or node.op != "call_function":
        return None
    ndim = node.meta["val"].ndim
    if transposed_dims(node) == (*range(ndim - 2), ndim - 1, ndim - 2):
        return node.args[0]
    return Editor(capture).call(aten.transpose.int, (node, -2, -1), before=before)
