"""Attention and token losses: the operations whose placement is the point of the exercise."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from seqcomp.capture.edit import argument, is_tensor, module_path, op_name, place_of
from seqcomp.capture.pair_masks import BATCH_DIM, HEAD_DIM, MaskInput
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.capture.sizes import Size
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.placement.pointwise import pointwise_rule
from seqcomp.placement.rule import Decision, Env, Rule, align, summed
from seqcomp.placement.spec import Dim, Factor, Spec, replicated, whole


def attention_rule(node: Node, env: Env) -> Decision:
    """q, k, v [B, H, S, d] sharded by tokens; masks are descriptions on global positions.

    Queries that are sharded against memory that is not (cross attention, full mask) stay local:
    every rank sees all keys. Unsharded attention is repeated on every rank.
    """
    info: AttentionInfo = node.meta["attention"]
    q, k, v, mask = node.args[:4]
    sinks = node.args[7]
    shape = env.shape(node)
    tokens = _token_axes(env, q)
    batch = _batch_dim(env, (q, k, v))
    length = env.shape(q)[2]
    broadcast = any(env.shape(n)[0] != shape[0] for n in (q, k, v))
    if broadcast:
        tokens = ()  # one memory for all samples: kernels of blocks do not broadcast
    by_head, tokens = _head_axes(env, shape[1], tokens)
    # Where heads stand before the samples, the axis that cuts them is in the first dim.
    (batch,) = Spec((batch,)).without(by_head).dims

    def heads_of(item: Node) -> Dim:
        count = env.shape(item)[-3]
        cut = by_head and int(count) % env.mesh.degree(by_head) == 0
        return (Factor(count, by_head),) if cut else whole(count)

    def placed(item: Node, axes: tuple[str, ...]) -> Spec:
        own = env.shape(item)
        rows: Dim = (Factor(own[2], axes),) if axes else whole(own[2])
        lead = batch if own[0] == shape[0] else whole(own[0])
        return Spec((lead, heads_of(item), rows, whole(own[3])))

    sliced = bool(by_head) and not any(f.axes for f in heads_of(k))
    extra: dict[Node, Spec] = {}
    if is_tensor(sinks):
        extra[sinks] = Spec(
            ((Factor(env.shape(sinks)[0], by_head),),) if by_head else (whole(info.heads),)
        )
    keys = env.shape(k)[2]
    attributes = {"tokens": tokens, "sliced": sliced, "by_head": by_head, "keys": keys}
    everywhere = tuple(a for a in env.mesh.sequence if a not in by_head)
    square = keys == length
    tiled = info.pairs is not None and tokens == everywhere and not broadcast
    tiled = tiled and (square or bool(tokens))
    if info.modified and not tiled:
        raise _mask_error(node, f"{info.mask_found} where the queries' tokens are not shared")
    extra |= {part: env.spec(part) for part in node.args[9]}
    extra |= {given: replicated(env.shape(given)) for given in node.args[10:11]}
    # With dropout in tiles also where no axis shares anything out: torch would hold all pairs.
    alone = bool(info.dropout) and tokens == everywhere == () and square and not broadcast
    alone = alone and info.mask is not None
    if not tokens and not tiled and not alone:
        wants = {n: placed(n, ()) for n in (q, k, v)} | extra
        if is_tensor(mask):
            wants[mask] = _mask_rows(mask, batch, heads_of, whole(length), env)
        out = Spec((batch, heads_of(q), whole(length), whole(shape[3])))
        lost = "attention broadcasts its memory over the batch" if broadcast else ""
        return Decision(wants, out, form="heads", attributes=attributes, gathered=lost)
    rows: Dim = (Factor(length, tokens),) if tokens else whole(length)
    out = Spec((batch, heads_of(q), rows, whole(shape[3])))
    if not square:
        if node.args[4]:
            raise _mask_error(node, "is_causal=True between sequences of different lengths")
        wants = {q: placed(q, tokens), k: placed(k, ()), v: placed(v, ())} | extra
        if is_tensor(mask):
            wants[mask] = _mask_rows(mask, batch, heads_of, rows, env)
        return Decision(wants, out, "drops" if info.dropout else "local", attributes)
    if info.mask is None and not tiled:
        raise _mask_error(node, info.mask_found)
    wants = {n: placed(n, tokens) for n in (q, k, v)} | extra
    if is_tensor(mask):  # its description goes to the operation, not the tensor
        wants[mask] = env.spec(mask)
    if info.pairs is not None:
        attributes["inputs"] = tuple(
            _mask_input(item, batch, by_head, env) for item in info.pairs.inputs
        )
    return Decision(wants, out, form="attention", attributes=attributes)


def _token_axes(env: Env, q: Node) -> tuple[str, ...]:
    """The axes that share out the queries' tokens."""
    tokens = env.spec(q).dims[2]
    if len(tokens) != 1:
        return ()  # tokens and something else in one dim: not a sequence that can be dealt out
    return tuple(a for a in tokens[0].axes if a in env.mesh.sequence)


def _head_axes(
    env: Env, heads: Size, tokens: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes that share out heads, axes that share out tokens) at attention."""
    axis = env.mesh.tensor
    if axis is None:
        return (), tokens
    # Samples that stand where heads do are of any number.
    cut = heads.is_Integer and int(heads) % env.mesh.degrees[axis] == 0
    return (axis,) if cut else (), tuple(a for a in tokens if a != axis)


def _batch_dim(env: Env, operands: tuple[Node, ...]) -> Dim:
    full = max((env.shape(n)[0] for n in operands), key=lambda size: size != 1)
    whole_batch = [env.spec(n).dims[0] for n in operands if env.shape(n)[0] == full]
    return max(whole_batch, key=lambda d: sum(len(f.axes) for f in d))


def _mask_rows(
    mask: Node, batch: Dim, heads_of: Callable[[Node], Dim], rows: Dim, env: Env
) -> Spec:
    """A mask as an operand: of the rank's own samples, heads and queries, and of all keys."""
    own = env.shape(mask)
    dims = [whole(size) for size in own]
    for dim, cut in ((-2, rows), (-3, None), (-4, batch)):
        if len(own) >= -dim and own[dim] != 1:
            dims[dim] = heads_of(mask) if cut is None else cut
    return Spec(tuple(dims))


def _mask_input(item: MaskInput, batch: Dim, by_head: tuple[str, ...], env: Env) -> Spec:
    """Whole over the sequence, of the rank's own samples and heads."""
    dims: list[Dim] = []
    for dim, size in zip(item.dims, env.shape(item.node), strict=True):
        if dim == BATCH_DIM and size != 1:
            dims.append(batch)
        elif dim == HEAD_DIM and size != 1 and by_head:
            dims.append((Factor(size, by_head),))
        else:
            dims.append(whole(size))
    return Spec(tuple(dims))


def _mask_error(node: Node, found: str) -> PlanError:
    where = module_path(node) or "**"
    return PlanError(
        [
            diagnostic(
                "SC303",
                where=place_of(node),
                found=found,
                legal="masks and biases [.., queries, keys] of positions, documents, padding or "
                "other data, without is_causal=True beside them",
                help="run it on the whole sequence: "
                f'overrides: [{{match: "{where}", gather: true}}]',
            )
        ]
    )


def token_loss_rule(node: Node, env: Env) -> Decision | None:
    """cross_entropy and nll_loss with reduction sum (partial) or none (per token).

    The classes are whole; logits [N, C] or [N, C, d1, ...] and targets [N, d1, ...] agree.
    """
    logits, target = node.args[:2]
    weight = argument(node, 2, "weight")
    reduction = argument(node, 3, "reduction", 1)
    own = env.shape(logits)
    classes = 1 if len(own) > 1 else 0
    by_class: tuple[str, ...] = ()
    lost = ""
    if target.meta["val"].is_floating_point():
        wants, dims = align([logits, target], own, env)
        if any(f.axes for f in dims[classes]):
            return None
        rest = [d for i, d in enumerate(dims) if i != classes]
    else:
        spec = summed(env.spec(logits))
        by_class = _class_axes(node, env, spec, classes)
        if not by_class:
            lost = "this loss needs every class" if spec.axes_of(classes) else ""
            spec = spec.without(spec.axes_of(classes))
        tokens = [d for i, d in enumerate(spec.dims) if i != classes]
        at = summed(env.spec(target)).without(by_class)
        rest = [
            a if sum(len(f.axes) for f in a) >= sum(len(f.axes) for f in b) else b
            for a, b in zip(tokens, at.dims, strict=True)
        ]
        wants = {
            logits: Spec((*rest[:classes], spec.dims[classes], *rest[classes:])),
            target: Spec(tuple(rest)),
        }
    wants = {n: summed(s) for n, s in wants.items()}
    if is_tensor(weight):
        wants[weight] = Spec((whole(env.shape(weight)[0]),))
    form = "vocabulary_loss" if by_class else "local"
    attributes = {
        "axes": by_class,
        "classes": classes,
        "words": int(own[classes]) if by_class else 0,
    }
    if reduction == 0:
        return Decision(wants, Spec(tuple(rest)), form, attributes, gathered=lost)
    partial = tuple(a for dim in rest for f in dim for a in f.axes)
    if reduction == 1 and partial:
        return None
    return Decision(wants, Spec((), partial), form, attributes, gathered=lost)


def _class_axes(node: Node, env: Env, spec: Spec, classes: int) -> tuple[str, ...]:
    """The tensor axis where the loss can be computed on its cut of the vocabulary."""
    plain = (
        op_name(node) == "aten.cross_entropy_loss"
        and argument(node, 2, "weight") is None
        and argument(node, 5, "label_smoothing", 0.0) == 0.0
    )
    axes = spec.axes_of(classes)
    return axes if plain and axes == (env.mesh.tensor,) else ()


def element_loss_rule(node: Node, env: Env) -> Decision:
    """mse_loss, l1_loss, ...: element-wise, then mean (1), sum (2) or nothing (0)."""
    position = _ELEMENT_LOSSES[op_name(node)]
    reduction = argument(node, position, "reduction", 1)
    if reduction == 0:
        return pointwise_rule(node, env)
    # Weights of an element or a class broadcast like any operand.
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    shape = max((env.shape(n) for n in node.args[:2] if is_tensor(n)), key=len)
    wants, dims = align(operands, shape, env)
    wants = {n: summed(s) for n, s in wants.items()}
    partial = tuple(a for dim in dims for f in dim for a in f.axes)
    if reduction == 1 and partial:
        return Decision(wants, Spec((), partial), "mean", {"degree": env.mesh.degree(partial)})
    return Decision(wants, Spec((), partial))


_ELEMENT_LOSSES = {
    "aten.mse_loss": 2,
    "aten.l1_loss": 2,
    "aten.smooth_l1_loss": 2,
    "aten.huber_loss": 2,
    "aten.binary_cross_entropy_with_logits": 4,
    "aten.binary_cross_entropy": 3,
    "aten.kl_div": 2,
}

SPECIAL_RULES: dict[str, Rule] = {
    "attention": attention_rule,
    **dict.fromkeys(
        ("aten.cross_entropy_loss", "aten.nll_loss_nd", "aten.nll_loss"), token_loss_rule
    ),
    **dict.fromkeys(_ELEMENT_LOSSES, element_loss_rule),
}
