"""Modules that run as one unit on the tokens of a rank: everything they take and give is cut alike.

The user vouches that such a module treats each token alone, so any share of the tokens will do;
what must hold is that its arguments share them out in the same way, and that its results have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch.fx import Node

from seqcomp.capture.sizes import Size, evaluate, product
from seqcomp.capture.units import Unit
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.placement.rule import Decision, Env, MeshView, Rule, outputs_of, summed
from seqcomp.placement.spec import Dim, Factor, Spec, merged, replicated, whole


def unit_rule(node: Node, env: Env) -> Decision:
    """(inputs, parameters) of a unit: inputs cut by tokens alike, parameters whole.

    Raises PlanError SC314 where no input, or not every output, has the tokens.
    """
    unit: Unit = node.target
    if unit.counters and env.mesh.pads:
        raise _counts_padding(unit)
    inputs, parameters = node.args
    cut = {n: env.inner_tokens(_tokens_alone(summed(env.spec(n)), env)) for n in inputs}
    lead = max(cut.values(), key=lambda spec: len(spec.axes))
    axes = set(lead.axes)
    shared_by = env.mesh.sequence or env.mesh.batch
    if shared_by and not axes & set(shared_by):
        raise _refused(unit, "no argument that has the tokens, shared out over the ranks")
    wants = {n: replicated(env.shape(n)) for n in parameters}
    for item, spec in cut.items():
        wants[item] = spec if set(spec.axes) == axes else _as_lead(item, lead, unit, env)
    outs = []
    for index, shape in enumerate(outputs_of(node, env)):
        out = Spec(_like(shape, lead, env))
        if set(out.axes) != axes:
            raise _refused(unit, f"result {index} of shape {list(shape)} has no dim of tokens")
        outs.append(out)
    _check_local(unit, env, [wants[n] for n in inputs], outs)
    lost = any(set(env.spec(n).axes) - set(wants[n].axes) for n in inputs)
    reason = "a module that takes whole tokens" if lost else ""
    return Decision(wants, tuple(outs), form="unit", gathered=reason)


def _is_token(factor: Factor, env: Env) -> bool:
    return factor.size in (env.capture.batch, env.capture.length)


def _tokens_alone(spec: Spec, env: Env) -> Spec:
    """The spec with features whole."""
    return replace(
        spec,
        dims=tuple(
            merged(tuple(f if _is_token(f, env) else Factor(f.size) for f in dim))
            for dim in spec.dims
        ),
    )


def _as_lead(item: Node, lead: Spec, unit: Unit, env: Env) -> Spec:
    """An argument that is not cut as the others are: cut like them, or without tokens."""
    shape = env.shape(item)
    spec = Spec(_like(shape, lead, env))
    if set(spec.axes) == set(lead.axes):
        return spec
    if spec.axes or any(size.free_symbols or size == env.capture.length for size in shape):
        raise _refused(unit, f"an argument of shape {list(shape)} has its tokens elsewhere")
    return replicated(shape)


def _like(shape: Sequence[Size], lead: Spec, env: Env) -> tuple[Dim, ...]:
    """Dims that are tokens of `lead`, one or several in a row, are cut as they are there."""
    tokens = [f for dim in lead.dims for f in dim if f.axes or _is_token(f, env)]
    dims: list[Dim] = []
    for size in shape:
        runs = [
            (start, stop)
            for start in range(len(tokens))
            for stop in range(len(tokens), start, -1)
            if product(f.size for f in tokens[start:stop]) == size
        ]
        if not runs:
            dims.append(whole(size))
            continue
        start, stop = runs[0]
        dims.append(merged(tuple(tokens[start:stop])))
        tokens = tokens[:start] + tokens[stop:]
    return tuple(dims)


def _check_local(unit: Unit, env: Env, given: Sequence[Spec], outs: Sequence[Spec]) -> None:
    """Where sizes are plain numbers a dim may only look like tokens: tried with a rank's own."""
    factors = [f for spec in (*given, *outs) for dim in spec.dims for f in dim]
    if not any(f.axes and f.size.is_Integer for f in factors):
        return
    found = env.capture.units.probes[unit].at([_local(spec, env) for spec in given])
    wanted = tuple(_local(spec, env) for spec in outs)
    if found.shapes != wanted:
        raise _refused(unit, f"of a rank's tokens it makes {found.shapes}, not {wanted}")


def _local(spec: Spec, env: Env) -> tuple[int, ...]:
    return tuple(
        evaluate(spec.size(i), env.capture.hints) // env.mesh.degree(spec.axes_of(i))
        for i in range(len(spec.dims))
    )


def _refused(unit: Unit, found: str) -> PlanError:
    return PlanError(
        [
            diagnostic(
                "SC314",
                where=unit.path,
                found=found,
                legal="arguments and results [batch, sequence, ...] or [batch * sequence, ...]",
                help="mark a module around it or inside it that takes and returns all tokens, "
                "or use gather: true"
                if unit.marked
                else "mark the module around it with token_local: true, or gather: true",
            )
        ]
    )


def _counts_padding(unit: Unit) -> PlanError:
    names = ", ".join(name for name, _ in unit.counters)
    return PlanError(
        [
            diagnostic(
                "SC307",
                where=unit.path,
                found=f"{names}, which would count the tokens that fill up the length",
                legal="padding: none, with modules that count their tokens",
                help="leave out padding: pad and pass a length that the plan divides, or call "
                "eval() where nothing is counted",
            )
        ]
    )


def unit_notes(units: Sequence[Unit], mesh: MeshView) -> Iterator[Diagnostic]:
    """SC409 for each kind of module that is a unit without the plan's word; SC405 for weights."""
    kinds: dict[str, list[str]] = {}
    for unit in units:
        if not unit.marked:
            kinds.setdefault(unit.kind, []).append(unit.path)
        if mesh.tensor is not None and unit.names:
            yield diagnostic(
                "SC405",
                where=unit.path,
                found="weights of a module that runs as it is",
                legal="column-parallel linears whose outputs meet one row-parallel linear",
                help="exact as it is: the weights are whole on every rank, the work is cut by "
                "tokens",
            )
    for kind, paths in kinds.items():
        yield diagnostic(
            "SC409",
            where=paths[0],
            found=f"{len(paths)} x {kind}, known to treat each token alone",
            legal="token_local: true in an override, for modules that are not known",
            help="nothing to do; seqcomp verify compares them like everything else",
        )


UNIT_RULES: dict[str, Rule] = {"token_local": unit_rule}
