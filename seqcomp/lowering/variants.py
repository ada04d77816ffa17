"""One call -> one lowered program; which calls share a program."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from seqcomp.capture.call import BATCH, SEQ, Call, InputDims
from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.export import export_call
from seqcomp.capture.facts import facts_of
from seqcomp.capture.recognise import recognise_attention
from seqcomp.capture.sizes import SpecialisedSizeError
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic, errors_in, raise_for_errors
from seqcomp.lowering import ops
from seqcomp.lowering.context import LoweringContext, run_passes
from seqcomp.lowering.parameters import Cut
from seqcomp.lowering.passes import PASSES
from seqcomp.lowering.program import Program
from seqcomp.lowering.scopes import ScopeBuilder
from seqcomp.placement.rule import MeshView
from seqcomp.plan.facts import ModelFacts
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.plan.rules import check_plan


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


def mesh_view(resolved: ResolvedPlan) -> MeshView:
    """The plan's mesh without axes of size 1."""
    degrees = {a: n for a, n in resolved.axes.items() if n > 1}
    return MeshView(
        degrees=degrees,
        sequence=tuple(a for a in resolved.sequence_axes if a in degrees),
        batch=tuple(a for a in resolved.batch_axes if a in degrees),
        tensor=resolved.tensor_axis if resolved.tensor_axis in degrees else None,
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
                            help="pass the full sequence of the same batch in every input",
                        )
                    ]
                )
    batch, length = found.get(BATCH), found.get(SEQ)
    return CallSizes(batch[0] if batch else None, length[0] if length else None)


def variant_of(module: torch.nn.Module, call: Call, dims: tuple[InputDims | None, ...]) -> Variant:
    """The variant of a call in the current modes (train/eval, grad, autocast)."""
    if torch.is_inference_mode_enabled():
        grad = "inference"
    else:
        grad = "grad" if torch.is_grad_enabled() else "no_grad"
    kinds = sorted({leaf.device.type for leaf in call.leaves if isinstance(leaf, torch.Tensor)})
    autocast = tuple(
        (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
        for kind in kinds
    )
    leaves = tuple(_leaf_key(leaf, dim) for leaf, dim in zip(call.leaves, dims, strict=True))
    return Variant(
        modes=tuple(m.training for m in module.modules()),
        grad=grad,
        autocast=autocast,
        leaves=leaves,
        structure=str(call.treespec),
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


def check_length(resolved: ResolvedPlan, length: int | None) -> None:
    """Raises PlanError SC206 for a length that the plan cannot divide."""
    if length is not None:
        raise_for_errors(errors_in(check_plan(resolved.plan, seq_len=length)))


def build_program(
    module: torch.nn.Module,
    call: Call,
    dims: tuple[InputDims | None, ...],
    sizes: CallSizes,
    resolved: ResolvedPlan,
    *,
    name: str,
    dump: Path | None,
) -> Program:
    """Captures and lowers one call. The same on every rank.

    Raises PlanError with everything that stands in the way.
    """
    where = type(module).__name__
    _refuse_hooks(module)
    mesh = mesh_view(resolved)
    if mesh.degrees and sizes.batch is None and sizes.length is None:
        raise PlanError(
            [
                diagnostic(
                    "SC503",
                    where=where,
                    found="no input with a batch and a sequence dim",
                    legal="a tensor [batch, sequence, ...] among the inputs",
                    help="name the dims in the plan: inputs: {x: {batch: 0, seq: 1}}",
                )
            ]
        )
    try:
        graph, context, facts = _lowered(
            module, call, dims, sizes, resolved, name=name, dump=dump, symbolic=True
        )
    except SpecialisedSizeError:
        # Some operation fixed a size that others keep symbolic: one program for these sizes.
        graph, context, facts = _lowered(
            module, call, dims, sizes, resolved, name=name, dump=dump, symbolic=False
        )
    capture, attentions = context.capture, context.attentions
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    builder = ScopeBuilder(graph, capture.state, _aliases(module), name)
    root = builder.build([placeholders[n] for n in capture.inputs])
    layout = resolved.layout_for(sizes.length, facts.all_causal)
    return Program(
        name=name,
        capture=capture,
        flat=graph,
        pieces=tuple(builder.pieces),
        root=root,
        out_spec=capture.out_spec,
        attentions=attentions,
        findings=tuple(dict.fromkeys(context.findings)),
        layout=layout,
        facts=facts,
        cuts=_cuts(context),
    )


def _lowered(
    module: torch.nn.Module,
    call: Call,
    dims: tuple[InputDims | None, ...],
    sizes: CallSizes,
    resolved: ResolvedPlan,
    *,
    name: str,
    dump: Path | None,
    symbolic: bool,
) -> tuple[torch.fx.Graph, LoweringContext, ModelFacts]:
    where, mesh = type(module).__name__, mesh_view(resolved)
    capture = export_call(
        module, call, dims, data_degree=mesh.degree(mesh.batch), where=where, symbolic=symbolic
    )
    canonicalise(capture)
    if symbolic and capture.is_specialised():
        raise SpecialisedSizeError("an assertion of the capture fixes a size")
    attentions = recognise_attention(capture, module)
    facts = facts_of(capture, attentions, module)
    paths = [path for path, _ in module.named_modules() if path]
    found = check_plan(
        resolved.plan, facts, world_size=resolved.world_size, seq_len=sizes.length,
        module_paths=paths,
    )  # fmt: skip
    _check_names(resolved, capture.output_names, call, found)
    raise_for_errors(errors_in(found))
    context = LoweringContext(
        capture=capture,
        mesh=mesh,
        attentions=attentions,
        transports={a.where: resolved.transport_for(a.where) for a in attentions},
        output_modes=tuple(_mode(resolved, n) for n in capture.output_names),
        grad=torch.is_grad_enabled(),
        findings=[f for f in found if f.severity != "error"],
        dump=dump / name if dump is not None else None,
    )
    graph = run_passes(capture.graph, context, PASSES)
    graph = _lifted_constants(graph, capture.constants, capture.state)
    return graph, context, facts


def _cuts(context: LoweringContext) -> dict[str, Cut]:
    """Parameters that the tensor axis divides, by name."""
    placement, axis = context.placement, context.mesh.tensor
    assert placement is not None
    if axis is None or placement.tensor is None:
        return {}
    return {
        context.capture.state[node.name]: Cut(
            next(i for i in range(len(spec.dims)) if axis in spec.axes_of(i)), axis
        )
        for node, spec in placement.tensor.specs.items()
    }


def _mode(resolved: ResolvedPlan, name: str) -> str:
    """An entry for a container covers what is in it."""
    parts = name.split(".")
    prefixes = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    given = resolved.plan.outputs
    return next((given[p] for p in prefixes if p in given), "full")


def _check_names(
    resolved: ResolvedPlan, outputs: tuple[str, ...], call: Call, found: list[Diagnostic]
) -> None:
    known = {".".join(n.split(".")[:i]) for n in outputs for i in range(1, n.count(".") + 2)}
    found.extend(
        diagnostic(
            "SC111",
            where=f"outputs.{name}",
            found=name,
            legal=tuple(sorted(known)),
            help="name an output of this call",
        )
        for name in resolved.plan.outputs
        if name not in known
    )


def _refuse_hooks(module: torch.nn.Module) -> None:
    hooked = [
        path or "<root>"
        for path, sub in module.named_modules()
        if sub._forward_hooks
        or sub._forward_pre_hooks
        or sub._backward_hooks
        or sub._backward_pre_hooks
    ]
    if hooked:
        raise PlanError(
            [
                diagnostic(
                    "SC306",
                    where=path,
                    found="hooks registered before the capture",
                    legal="modules without hooks",
                    help="remove the hooks, compile, and register them again",
                )
                for path in hooked
            ]
        )


def _lifted_constants(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor], state: dict[str, str]
) -> torch.fx.Graph:
    """Lifted tensors become operations that return them: no module owns them."""
    anchor = next(n for n in graph.nodes if n.op != "placeholder")
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        name = state.get(node.name)
        if name not in constants:
            continue
        with graph.inserting_before(anchor):
            new = graph.call_function(ops.Constant(constants[name]), ())
        new.meta["val"] = node.meta["val"]
        new.meta["nn_module_stack"] = {}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        del state[node.name]
    return graph


def _aliases(module: torch.nn.Module) -> dict[str, list[str]]:
    """All names of each tensor that has several (tied parameters)."""
    names: dict[int, list[str]] = {}
    for name, tensor in itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def fingerprint(program: Program) -> str:
    """Equal on ranks that lowered the same program."""
    text = "\n".join(piece.path + piece.code for piece in program.pieces)
    targets = "\n".join(
        str(n.target) for n in program.flat.nodes if isinstance(n.target, ops.Op)
        and not isinstance(n.target, ops.Constant)
    )  # fmt: skip
    return hashlib.sha256((text + targets).encode()).hexdigest()[:16]


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
