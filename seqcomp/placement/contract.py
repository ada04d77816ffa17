"""Products that sum over a dim: linear, matmul, einsum, embedding lookups."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from seqcomp.capture.edit import argument, is_tensor, op_name, place_of
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.placement.megatron import weight_spec
from seqcomp.placement.rule import Decision, Env, Rule, summed, unsharded
from seqcomp.placement.spec import Dim, Factor, Spec, merged, whole


def linear_rule(node: Node, env: Env) -> Decision:
    """x [..., in] times weight [out, in]: token dims keep their placement."""
    x, weight = node.args[:2]
    bias = argument(node, 2, "bias")
    spec = env.spec(x)
    last = len(spec.dims) - 1
    role, axis = env.role(node), env.mesh.tensor
    wants = {n: _weight(n, node, env) for n in (weight, bias) if is_tensor(n)}
    if role == "row" and axis is not None:
        assert bias is None, "the bias of a row-parallel linear is added after the sum"
        tokens = summed(spec.without(axis_of_tokens(spec, axis, last)))
        # [H over the axis, d] seen as one dim is the same cut as [H * d over the axis].
        own = spec.dims[last]
        same = own[0].axes == (axis,) if own else False
        want = tokens.with_dim(last, own if same else wants[weight].dims[1])
        return Decision(
            {x: want, **wants}, Spec((*want.dims[:-1], whole(env.shape(node)[-1])), (axis,))
        )
    want = unsharded(spec, [last])
    if role is not None and axis is not None:
        want = want.without([axis])
        features = wants[weight].dims[0]
        return Decision({x: want, **wants}, Spec((*want.dims[:-1], features)), form="column")
    cut = env.inner_tokens(want)
    want = want if cut.axes_of(last) else cut  # features can be as many as there are tokens
    out = Spec((*want.dims[:-1], whole(env.shape(node)[-1])))
    lost = _reason(spec, want, "the features of a linear")
    return Decision({x: want, **wants}, out, gathered=lost)


def axis_of_tokens(spec: Spec, axis: str, features: int) -> tuple[str, ...]:
    """The tensor axis where it cuts anything but the features."""
    return (axis,) if any(axis in spec.axes_of(i) for i in range(features)) else ()


def _weight(weight: Node, node: Node, env: Env) -> Spec:
    """The weight or bias of `node`: whole, or cut as its role in Megatron-SP has it.

    A parameter that lives cut is cut so already; any other is cut here, for this use.
    """
    axis = env.mesh.tensor
    if axis is None:
        return _whole(weight, env)
    return weight_spec(env.role(node), env.shape(weight), axis)


def _whole(node: Node, env: Env) -> Spec:
    return Spec(tuple(whole(s) for s in env.shape(node)))


def _reason(before: Spec, after: Spec, what: str) -> str:
    lost = set(before.axes) - set(after.axes)
    return f"{what} are summed over a sharded dim" if lost else ""


def matmul_rule(node: Node, env: Env) -> Decision | None:
    """Batch dims broadcast, rows come from the left operand, columns from the right one.

    Left and right cannot both be cut by one axis in rows and columns, nor along the summed dim
    against cut rows: the right operand is gathered then (as eager attention needs it).
    """
    left, right = _operands(node)
    if left is right:
        return None
    a, b = env.spec(left), env.spec(right)
    la, lb = len(a.dims), len(b.dims)
    if la < 2 or lb < 2:
        return _vector_product(node, env, left, right)
    if la != lb and not (la == 2 or lb == 2):
        return None
    a, b = summed(a), summed(b)
    used: set[str] = set()
    batch: list[Dim] = []
    shape = env.shape(node)
    lead = max(la, lb) - 2
    for i in range(lead):
        options = [
            s.dims[i - (lead + 2 - len(s.dims))]
            for s, n in ((a, left), (b, right))
            if i - (lead + 2 - len(s.dims)) >= 0
            and env.shape(n)[i - (lead + 2 - len(s.dims))] == shape[i]
        ]
        chosen = max(options, key=lambda d: sum(len(f.axes) for f in d), default=whole(shape[i]))
        batch.append(_only(chosen, used))
        used |= _axes(batch[-1])
    rows = _only(a.dims[-2], used)
    used |= _axes(rows)
    columns = _only(b.dims[-1], used)
    used |= _axes(columns)
    inner_left, inner_right = a.dims[-1], b.dims[-2]
    inner: Dim = whole(env.shape(left)[-1])
    partial: tuple[str, ...] = ()
    if inner_left == inner_right and _axes(inner_left) and not _axes(inner_left) & used:
        inner, partial = inner_left, tuple(x for f in inner_left for x in f.axes)
    want_left = Spec((*_lead(batch, left, env, shape), rows, inner))
    want_right = Spec((*_lead(batch, right, env, shape), inner, columns))
    out = Spec((*batch, rows, columns), partial)
    wants = {left: want_left, right: want_right}
    extra = _addend(node)
    if extra is not None:
        if partial:
            return None
        wants[extra] = _broadcast_to(extra, out, env)
    lost = (set(a.axes) | set(b.axes)) - set(out.axes) - set(partial)
    gave_up = set(a.axes) - set(want_left.axes) or set(b.axes) - set(want_right.axes)
    reason = "two sharded dims meet in a matrix product" if lost or gave_up else ""
    return Decision(wants, out, gathered=reason)


def _operands(node: Node) -> tuple[Node, Node]:
    if op_name(node) in ("aten.addmm", "aten.baddbmm"):
        return node.args[1], node.args[2]
    return node.args[0], node.args[1]


def _addend(node: Node) -> Node | None:
    return node.args[0] if op_name(node) in ("aten.addmm", "aten.baddbmm") else None


def _vector_product(node: Node, env: Env, left: Node, right: Node) -> Decision | None:
    a, b = summed(env.spec(left)), summed(env.spec(right))
    if len(b.dims) == 1 and len(a.dims) >= 2:
        want = unsharded(a, [len(a.dims) - 1])
        return Decision({left: want, right: unsharded(b, [0])}, Spec(want.dims[:-1]))
    return None


def _lead(batch: Sequence[Dim], node: Node, env: Env, shape: Sequence[object]) -> tuple[Dim, ...]:
    own = env.shape(node)
    offset = len(batch) - (len(own) - 2)
    return tuple(
        batch[i + offset] if own[i] == shape[i + offset] else whole(own[i])
        for i in range(len(own) - 2)
    )


def _broadcast_to(node: Node, out: Spec, env: Env) -> Spec:
    own = env.shape(node)
    offset = len(out.dims) - len(own)
    return Spec(
        tuple(
            out.dims[i + offset] if size == out.size(i + offset) else whole(size)
            for i, size in enumerate(own)
        )
    )


def _axes(dim: Dim) -> set[str]:
    return {a for f in dim for a in f.axes}


def _only(dim: Dim, used: set[str]) -> Dim:
    return merged(tuple(Factor(f.size, tuple(a for a in f.axes if a not in used)) for f in dim))


def embedding_rule(node: Node, env: Env) -> Decision:
    """weight [V, D] looked up by indices of any placement."""
    weight, index = node.args[:2]
    spec = summed(env.spec(index))
    if argument(node, 3, "scale_grad_by_freq", False) or argument(node, 4, "sparse", False):
        raise _embedding_error(node)
    axis = env.mesh.tensor
    if env.role(node) == "vocabulary" and axis is not None:
        spec = spec.without([axis])
        out = Spec((*spec.dims, whole(env.shape(node)[-1])), (axis,))
        words = {"words": int(env.shape(weight)[0])}
        wants = {weight: _weight(weight, node, env), index: spec}
        return Decision(wants, out, form="vocabulary", attributes=words)
    out = Spec((*spec.dims, whole(env.shape(node)[-1])))
    return Decision({weight: _whole(weight, env), index: spec}, out)


def _embedding_error(node: Node) -> PlanError:
    by_frequency = argument(node, 3, "scale_grad_by_freq", False)
    name = "scale_grad_by_freq" if by_frequency else "sparse"
    return PlanError(
        [
            diagnostic(
                "SC302",
                where=place_of(node),
                found=f"an embedding with {name}=True",
                legal=f"{name}=False",
                help=f"build the embedding with {name}=False",
            )
        ]
    )


def einsum_rule(node: Node, env: Env) -> Decision | None:
    """Every letter is one dim; a sharded letter that is summed makes the result partial."""
    equation, operands = node.args[0].replace(" ", ""), list(node.args[1])
    if "..." in equation or "->" not in equation or len(set(operands)) != len(operands):
        return None
    inputs, output = equation.split("->")
    letters: dict[str, Dim] = {}
    for names, operand in zip(inputs.split(","), operands, strict=True):
        if len(set(names)) != len(names):
            return None
        for name, dim in zip(names, env.spec(operand).dims, strict=True):
            if name not in letters or (_axes(dim) and not _axes(letters[name])):
                letters[name] = dim
    used: set[str] = set()
    for name in (*output, *(n for n in letters if n not in output)):
        letters[name] = _only(letters[name], used)
        used |= _axes(letters[name])
    wants = {}
    gave_up = False
    for names, operand in zip(inputs.split(","), operands, strict=True):
        wants[operand] = Spec(tuple(letters[n] for n in names))
        gave_up |= bool(set(env.spec(operand).axes) - set(wants[operand].axes))
    partial = tuple(a for n in letters if n not in output for f in letters[n] for a in f.axes)
    if any(set(partial) - set(w.axes) for w in wants.values()):
        return None  # an operand without the summed letter would be counted once per rank
    out = Spec(tuple(letters[n] for n in output), partial)
    reason = "two sharded dims meet in an einsum" if gave_up else ""
    return Decision(wants, out, gathered=reason)


CONTRACT_RULES: dict[str, Rule] = {
    "aten.linear": linear_rule,
    "aten.embedding": embedding_rule,
    "aten.einsum": einsum_rule,
    **dict.fromkeys(
        ("aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.__matmul__"),
        matmul_rule,
    ),
}
