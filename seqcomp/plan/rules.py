"""What must fit together in a plan: one function per rule, each returning diagnostics.

All rules run, so that a user sees every problem at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.plan.axes import fsdp_axes_of, owned_axes
from seqcomp.plan.facts import ModelFacts
from seqcomp.plan.match import covers, matches
from seqcomp.plan.model_rules import check_model
from seqcomp.plan.nearest import nearest
from seqcomp.plan.schema import Plan

Found = Iterator[Diagnostic]


def check_plan(
    plan: Plan,
    facts: ModelFacts | None = None,
    *,
    world_size: int | None = None,
    seq_len: int | None = None,
    module_paths: Iterable[str] | None = None,
) -> list[Diagnostic]:
    """Everything that is wrong with or worth knowing about a plan.

    Rules whose knowledge is missing (no ``facts``, no ``world_size``, ...) are left out.
    """
    found = list(check_language(plan))
    found += world_matches(plan, world_size)
    found += overrides_match(plan, facts, None if module_paths is None else list(module_paths))
    found += check_model(plan, facts, seq_len)
    return found


def check_language(plan: Plan) -> Found:
    """The rules that need nothing but the plan."""
    for rule in (axes_exist, axes_used, axes_used_once, fsdp_axes, overrides_say, inputs_agree):
        yield from rule(plan)
    yield from memory_agrees(plan)


def axes_exist(plan: Plan) -> Found:
    """SC101: every axis of a strategy is in the mesh."""
    for strategy, axis in owned_axes(plan).items():
        if axis not in plan.mesh:
            yield _unknown_axis(plan, strategy, axis, ("strategies", strategy, "axis"))
    fsdp = plan.strategies.fsdp
    for index, axis in enumerate((fsdp.axes or ()) if fsdp else ()):
        if axis not in plan.mesh:
            yield _unknown_axis(plan, "fsdp", axis, ("strategies", "fsdp", "axes", index))


def _unknown_axis(plan: Plan, strategy: str, axis: str, path: tuple[str | int, ...]) -> Diagnostic:
    close = nearest(axis, plan.mesh)
    hint = f"write {close}, or " if close else ""
    return diagnostic(
        "SC101",
        where=plan.where(*path),
        message=f"{strategy} uses the axis {axis!r}, which the mesh does not have",
        found=axis,
        legal=tuple(plan.mesh),
        help=f"{hint}add {axis} with its size to mesh",
    )


def axes_used(plan: Plan) -> Found:
    """SC102: every mesh axis serves a strategy."""
    used = {*owned_axes(plan).values(), *fsdp_axes_of(plan)}
    for axis in plan.mesh:
        if axis not in used:
            yield diagnostic(
                "SC102",
                where=plan.where("mesh", axis),
                message=f"the mesh axis {axis!r} serves no strategy",
                found=axis,
                legal=tuple(sorted(used & set(plan.mesh))),
                help=f"{_use_of(axis)}, or remove it from mesh",
            )


def _use_of(axis: str) -> str:
    own = {"data": "data", "ring": "ring", "ulysses": "ulysses", "tensor": "megatron_sp"}
    if axis in own:
        return f"add `{own[axis]}: {{}}` to strategies"
    return f"name it in a strategy, e.g. `ring: {{axis: {axis}}}`"


def axes_used_once(plan: Plan) -> Found:
    """SC103: no axis serves two strategies."""
    users: dict[str, list[str]] = {}
    for strategy, axis in owned_axes(plan).items():
        users.setdefault(axis, []).append(strategy)
    for axis, names in users.items():
        if len(names) > 1:
            yield diagnostic(
                "SC103",
                where=plan.where("strategies", names[-1], "axis"),
                message=f"the axis {axis!r} is used by {' and '.join(names)}",
                found=tuple(names),
                legal="one strategy per axis (fsdp may share)",
                help="give each strategy an axis of its own in mesh",
            )
    fsdp = plan.strategies.fsdp
    axes = (fsdp.axes or ()) if fsdp else ()
    for index, axis in enumerate(axes):
        if axis in axes[:index]:
            yield diagnostic(
                "SC103",
                where=plan.where("strategies", "fsdp", "axes", index),
                message=f"fsdp names the axis {axis!r} twice",
                found=axis,
                help="name it once",
            )


def fsdp_axes(plan: Plan) -> Found:
    """SC112, SC113: fsdp has an axis, and it is not the tensor axis."""
    if plan.strategies.fsdp is None:
        return
    axes = fsdp_axes_of(plan)
    tensor = owned_axes(plan).get("megatron_sp")
    legal = tuple(axis for axis in plan.mesh if axis != tensor)
    if tensor in axes:
        yield diagnostic(
            "SC112",
            where=plan.where("strategies", "fsdp", "axes"),
            found=axes,
            legal=legal,
            help=f"remove {tensor} from fsdp.axes",
        )
    elif not axes and plan.strategies.fsdp.axes is None:
        yield diagnostic(
            "SC113",
            where=plan.where("strategies", "fsdp"),
            found=tuple(plan.mesh),
            legal=legal,
            help="add a data axis to mesh, or name the axes in fsdp.axes",
        )


def world_matches(plan: Plan, world_size: int | None) -> Found:
    """SC104: the product of the mesh is the world size."""
    product = math.prod(plan.mesh.values())
    if world_size is None or world_size == product:
        return
    sizes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield diagnostic(
        "SC104",
        where=plan.where("mesh"),
        message=f"the mesh has {product} ranks ({sizes}) but the world size is {world_size}",
        found=world_size,
        legal=product,
        help=_world_help(plan, product, world_size),
    )


def _world_help(plan: Plan, product: int, world_size: int) -> str:
    ways = [f"start {product} processes"]
    for axis, size in plan.mesh.items():
        others = product // size
        if world_size > 0 and world_size % others == 0:
            ways.append(f"set mesh.{axis} to {world_size // others}")
    if world_size > 0 and world_size % product == 0 and "data" not in plan.mesh:
        ways.append(f"add data: {world_size // product} to mesh and strategies")
    return ", or ".join(ways)


def overrides_say(plan: Plan) -> Found:
    """SC108, SC109: an override refines a strategy of the plan, in one direction."""
    for index, override in enumerate(plan.overrides):
        where = plan.where("overrides", index)
        chosen = [key for key in ("ring", "token_local", "gather") if getattr(override, key)]
        if override.ring is not None and plan.strategies.ring is None:
            yield diagnostic(
                "SC108",
                where=plan.where("overrides", index, "ring"),
                message="the override concerns ring, which is not among the strategies",
                found="ring",
                legal=tuple(owned_axes(plan)),
                help="add ring to strategies, or remove the override",
            )
        if not chosen or {"token_local", "gather"} <= set(chosen):
            yield diagnostic(
                "SC109",
                where=where,
                found=tuple(chosen),
                legal=("ring: {transport: ...}", "token_local: true", "gather: true"),
                help="set one of them, or remove the override",
            )


def inputs_agree(plan: Plan) -> Found:
    """SC110: batch and seq differ; a length belongs to a sequence dim."""
    for name, spec in plan.inputs.items():
        if spec.batch is not None and spec.batch == spec.seq:
            yield diagnostic(
                "SC110",
                where=plan.where("inputs", name, "seq"),
                message=f"batch and seq of {name!r} are the same dimension",
                found=spec.seq,
                help="name two different dimensions, or leave out the one it does not have",
            )
        if spec.length is not None and spec.seq is None:
            yield diagnostic(
                "SC110",
                where=plan.where("inputs", name, "length"),
                message=f"{name!r} has a length but no seq dimension",
                found=spec.length,
                help="add seq: <dimension>, or remove length",
            )


def memory_agrees(plan: Plan) -> Found:
    """SC117: what waits on the host is what checkpoints keep."""
    if plan.memory.offload != "none" and plan.memory.checkpoint == "none":
        yield diagnostic(
            "SC117",
            where=plan.where("memory", "offload"),
            found=f"offload: {plan.memory.offload}, checkpoint: none",
            legal=("checkpoint: block", "checkpoint: selective"),
            help="add checkpoint: block, or remove offload",
        )


def overrides_match(
    plan: Plan, facts: ModelFacts | None, module_paths: Sequence[str] | None
) -> Found:
    """SC107: every override names a module, and one about the ring names an attention."""
    for index, override in enumerate(plan.overrides):
        if module_paths is not None and not any(matches(override.match, p) for p in module_paths):
            yield _no_match(plan, index, "module", module_paths)
        elif override.ring is not None and facts is not None and facts.attentions:
            attentions = [item.where for item in facts.attentions]
            if not any(covers(override.match, path) for path in attentions):
                yield _no_match(plan, index, "attention", attentions)


def _no_match(plan: Plan, index: int, kind: str, paths: Sequence[str]) -> Diagnostic:
    pattern = plan.overrides[index].match
    close = nearest(pattern, paths[:2000])
    return diagnostic(
        "SC107",
        where=plan.where("overrides", index, "match"),
        message=f"no {kind} matches {pattern!r}",
        found=pattern,
        legal=tuple(path for path in paths if path)[:20],
        help=f"did you mean {close}?" if close else f"name {kind}s of the model, or remove it",
    )
