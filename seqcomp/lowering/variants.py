"""Which calls share a program: what a call is like, and its sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from seqcomp.capture.call import BATCH, SEQ, Call, InputDims
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.placement.rule import MeshView
from seqcomp.plan.resolve import ResolvedPlan


@dataclass(frozen=True)
class CallSizes:
    """Sizes of one call: this rank's batch and the full length (None: no such dim)."""

    batch: int | None
    length: int | None


@dataclass(frozen=True)
class Variant:
    """What a program is valid for, besides sizes: equal variants may share one."""

    modes: tuple[bool, ...]
    grad: str
    autocast: tuple[Any, ...]
    leaves: tuple[Any, ...]
    structure: str
    rates: tuple[float, ...] = ()  # of dropout modules that are on


def mesh_view(resolved: ResolvedPlan) -> MeshView:
    """The plan's mesh without axes of size 1."""
    degrees = {a: n for a, n in resolved.axes.items() if n > 1}
    return MeshView(
        degrees=degrees,
        sequence=tuple(a for a in resolved.sequence_axes if a in degrees),
        batch=tuple(a for a in resolved.batch_axes if a in degrees),
        tensor=resolved.tensor_axis if resolved.tensor_axis in degrees else None,
        pads=resolved.plan.padding == "pad" and any(a in degrees for a in resolved.sequence_axes),
        striped=resolved.ring_axis
        if resolved.layout_for(None, True).kind == "striped" and resolved.ring_axis in degrees
        else None,
    )


def sizes_of(call: Call, dims: tuple[InputDims | None, ...]) -> CallSizes:
    """Batch and length of a call.

    Raises PlanError SC503 when inputs that should share them do not.
    """
    found: dict[str, tuple[int, str]] = {}
    for leaf, dim in zip(call.leaves, dims, strict=True):
        if dim is None:
            continue
        for size, role in zip(leaf.shape, dim.dims, strict=True):
            if role is None:
                continue
            known = found.setdefault(role, (int(size), dim.name))
            if known[0] != size:
                raise PlanError(
                    [
                        diagnostic(
                            "SC503",
                            where=dim.name,
                            found=f"{role} size {size}; {known[1]} has {known[0]}",
                            legal=f"the same {role} size in all inputs",
                            help="pass the full sequence of the same batch in every input"
                            + (_left_whole(call, dims, known[0]) if role == SEQ else ""),
                        )
                    ]
                )
    batch, length = found.get(BATCH), found.get(SEQ)
    return CallSizes(batch[0] if batch else None, length[0] if length else None)


def _left_whole(call: Call, dims: tuple[InputDims | None, ...], length: int) -> str:
    """What to write where inputs of that length are another sequence: what others attend to."""
    found = {
        dim.name: dim.dims.index(BATCH) if BATCH in dim.dims else None
        for leaf, dim in zip(call.leaves, dims, strict=True)
        if dim is not None and SEQ in dim.dims and leaf.shape[dim.dims.index(SEQ)] == length
    }
    each = (f"{name}: {{batch: {'null' if at is None else at}}}" for name, at in found.items())
    return f"; a sequence that others attend to stays whole: inputs: {{{', '.join(each)}}}"


def variant_of(
    modules: Sequence[torch.nn.Module], call: Call, dims: tuple[InputDims | None, ...]
) -> Variant:
    """The variant of a call in the current modes (train/eval of each module, grad, autocast)."""
    if torch.is_inference_mode_enabled():
        grad = "inference"
    else:
        grad = "grad" if torch.is_grad_enabled() else "no_grad"
    found = {leaf.device.type for leaf in call.leaves if isinstance(leaf, torch.Tensor)}
    kinds = sorted(found - {"meta"})
    autocast = tuple(
        (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
        for kind in kinds
    )
    leaves = tuple(_leaf_key(leaf, dim) for leaf, dim in zip(call.leaves, dims, strict=True))
    return Variant(
        modes=tuple(m.training for m in modules),
        grad=grad,
        autocast=autocast,
        leaves=leaves,
        structure=str(call.treespec),
        rates=tuple(
            m.p
            for m in modules
            if m.training and isinstance(m, torch.nn.modules.dropout._DropoutNd)
        ),
    )


def _leaf_key(leaf: Any, dims: InputDims | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    assert dims is not None
    shape = tuple(
        size if role is None or size == 1 else role
        for size, role in zip(leaf.shape, dims.dims, strict=True)
    )
    return (str(leaf.dtype), leaf.device.type, shape, leaf.requires_grad)


def describe_call(
    bound: tuple[Call, tuple[InputDims | None, ...], CallSizes, Variant],
) -> dict[str, str]:
    """What ranks must agree on, per argument."""
    call, _, _, variant = bound
    result = {
        name: f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for name, leaf in zip(call.names, call.leaves, strict=True)
    }
    result["modes"] = hashlib.sha256(repr(variant).encode()).hexdigest()[:12]
    result["training"] = str(any(variant.modes))
    result["grad mode"] = variant.grad
    return result
