"""One call -> one lowered program."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import sympy
import torch

from seqcomp.capture.blocks import blocks_of
from seqcomp.capture.call import Call, InputDims
from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.export import Capture, exported
from seqcomp.capture.facts import facts_of
from seqcomp.capture.inner import name_length, patches_pass
from seqcomp.capture.recognise import recognise_attention
from seqcomp.capture.rows import recognise_rows
from seqcomp.capture.sizes import LENGTH_SYMBOL, SpecialisedSizeError
from seqcomp.capture.windows import recognise_windows
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic, errors_in, raise_for_errors
from seqcomp.lowering import ops
from seqcomp.lowering.context import LoweringContext, run_passes
from seqcomp.lowering.fsdp_units import candidates, read_inside
from seqcomp.lowering.hooks import refuse_hooks
from seqcomp.lowering.memory import checkpoints
from seqcomp.lowering.no_sequence import no_one_sequence
from seqcomp.lowering.parameters import Cut
from seqcomp.lowering.passes import PASSES
from seqcomp.lowering.program import Program
from seqcomp.lowering.scopes import ScopeBuilder
from seqcomp.lowering.snapshot import snapshot
from seqcomp.lowering.variants import CallSizes, mesh_view
from seqcomp.placement.units import unit_notes
from seqcomp.plan.facts import ModelFacts
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.plan.rules import check_plan


@dataclass(frozen=True)
class Request:
    """One call to compile: of what, with which plan, under which name."""

    module: torch.nn.Module
    call: Call
    dims: tuple[InputDims | None, ...]
    sizes: CallSizes
    resolved: ResolvedPlan
    name: str
    dump: Path | None = None
    keep_global: bool = False
    sharded: bool = False  # whether FSDP holds the parameters


def build_program(request: Request) -> Program:
    """Captures and lowers one call. The same on every rank.

    Raises PlanError with everything that stands in the way.
    """
    module, sizes, resolved = request.module, request.sizes, request.resolved
    refuse_hooks(module)
    mesh = mesh_view(resolved)
    if mesh.batch and sizes.batch is None and sizes.length is None:
        raise _no_dim(module, "no input with a batch and a sequence dim")
    try:
        graph, context, facts = _lowered(request, symbolic=True)
    except SpecialisedSizeError:
        # Some operation fixed a size that others keep symbolic: one program for these sizes.
        graph, context, facts = _lowered(request, symbolic=False)
    kept = snapshot(graph, context)
    for node, traced in context.traced.items():
        node.meta["spec"] = traced.spec
    capture, attentions = context.capture, context.attentions
    graph = _lifted_constants(graph, capture.constants, capture.state)
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    aliases = _aliases(module)
    builder = ScopeBuilder(graph, capture.state, aliases, request.name)
    own = () if capture.dropout_keys is None else (capture.dropout_keys,)
    root = builder.build([placeholders[n] for n in (*capture.inputs, *own)])
    layout = resolved.layout_for(sizes.length or facts.length, facts.all_causal)
    again, notes = checkpoints(module, builder.calls(), resolved.plan.memory, grad=context.grad)
    context.findings.extend(notes)
    return Program(
        name=request.name,
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
        checkpoints=again,
        unmet=tuple(context.unmet),
        grad=context.grad,
        aliases=aliases,
        fsdp_units=None
        if context.fsdp_units is None
        else read_inside(builder.reads, context.fsdp_units),
        kept=kept,
    )


def _no_dim(module: torch.nn.Module, found: str) -> PlanError:
    return PlanError(
        [
            diagnostic(
                "SC503",
                message="there is nothing for the plan to divide",
                where=type(module).__name__,
                found=found,
                legal="a tensor [batch, sequence, ...] among the inputs, or one sequence over "
                "which all attention of the model runs",
                help="name the dims in the plan: inputs: {x: {batch: 0, seq: 1}}",
            )
        ]
    )


def _lowered(
    request: Request, *, symbolic: bool
) -> tuple[torch.fx.Graph, LoweringContext, ModelFacts]:
    mesh = mesh_view(request.resolved)
    with exported(
        request.module,
        request.call,
        request.dims,
        data_degree=mesh.degree(mesh.batch),
        where=type(request.module).__name__,
        symbolic=symbolic,
        is_unit=request.resolved.is_token_local,
    ) as capture:
        return _lower(capture, request, symbolic=symbolic)


def _lower(
    capture: Capture, request: Request, *, symbolic: bool
) -> tuple[torch.fx.Graph, LoweringContext, ModelFacts]:
    module, resolved, mesh = request.module, request.resolved, mesh_view(request.resolved)
    canonicalise(capture)
    if symbolic and capture.is_specialised():
        raise SpecialisedSizeError("an assertion of the capture fixes a size")
    attentions = recognise_attention(capture, module)
    recognise_windows(capture)
    recognise_rows(capture)
    facts = facts_of(capture, attentions, module)
    if mesh.sequence and capture.length is None:
        if facts.length is None:
            found = "no input with a sequence dim, and none that is made inside"
            raise no_one_sequence(capture) or _no_dim(module, found)
        capture.length = sympy.Integer(facts.length)
        patches_pass(capture, facts.length)
        if resolved.layout_for(facts.length, facts.all_causal).padded(facts.length) != facts.length:
            name_length(capture, facts.length)
    if capture.length != LENGTH_SYMBOL:
        _refuse_padding(request, facts)
    paths = [path for path, _ in module.named_modules() if path]
    found = check_plan(
        resolved.plan, facts, world_size=resolved.world_size, seq_len=request.sizes.length,
        module_paths=paths,
    )  # fmt: skip
    _check_names(resolved, capture.output_names, found)
    raise_for_errors(errors_in(found))
    context = LoweringContext(
        capture=capture,
        mesh=mesh,
        attentions=attentions,
        transports={a.where: resolved.transport_for(a.where) for a in attentions},
        output_modes=tuple(output_mode(resolved, n) for n in capture.output_names),
        grad=torch.is_grad_enabled(),
        findings=[
            *(f for f in found if f.severity != "error"),
            *_dropped_cache(request),
            *unit_notes(capture.units.found, mesh),
        ],
        dump=request.dump / request.name if request.dump is not None else None,
        keep_global=request.keep_global,
        is_gathered=resolved.is_gathered,
        fsdp_units=candidates(module) if request.sharded else None,
        mean_over=mesh.batch if resolved.gradients == "mean" else (),
        loss_chunks=resolved.plan.memory.loss_chunks,
        mlps_of=blocks_of(module) if resolved.plan.memory.checkpoint == "selective" else (),
    )
    return run_passes(capture.graph, context, PASSES), context, facts


def _refuse_padding(request: Request, facts: ModelFacts) -> None:
    """SC212: a length that the model fixes cannot grow."""
    length, resolved = request.sizes.length, request.resolved
    if resolved.plan.padding == "none" or length is None:
        return
    layout = resolved.layout_for(length, facts.all_causal)
    if layout.padded(length) != length:
        raise PlanError(
            [
                diagnostic(
                    "SC212",
                    where=type(request.module).__name__,
                    found=f"an operation fixes the length {length}",
                    legal=layout.nearest(length),
                    help="use a legal length",
                )
            ]
        )


def _dropped_cache(request: Request) -> list[Diagnostic]:
    """SC310 where the model would make a KV cache by its own default."""
    config = getattr(request.module, "config", None)
    if not getattr(config, "use_cache", False) or request.call.kwargs.get("use_cache") is not False:
        return []
    return [
        diagnostic(
            "SC310",
            where=type(request.module).__name__,
            found="config.use_cache=True",
            legal="use_cache=False in compiled calls",
            help="nothing to do; set config.use_cache = False to silence this",
        )
    ]


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


def output_mode(resolved: ResolvedPlan, name: str) -> str:
    """full, sharded or drop. An entry for a container covers what is in it."""
    parts = name.split(".")
    prefixes = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    given = resolved.plan.outputs
    return next((given[p] for p in prefixes if p in given), "full")


def _check_names(resolved: ResolvedPlan, outputs: tuple[str, ...], found: list[Diagnostic]) -> None:
    known = {".".join(n.split(".")[:i]) for n in outputs for i in range(1, n.count(".") + 2)}
    found.extend(
        diagnostic(
            "SC111",
            where=f"outputs.{name}",
            found=name,
            legal=tuple(sorted(known)),
            help="name an output of this call, or leave the entry out: outputs are whole then",
        )
        for name in resolved.plan.outputs
        if name not in known
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


_NUMBERED = re.compile(r"(device\(type='\w+'), index=\d+")
"""A device in a program's text: every rank of a machine has one of another number."""


def fingerprint(program: Program) -> str:
    """Equal on ranks that lowered the same program."""
    text = "\n".join(piece.path + piece.code for piece in program.pieces)
    targets = "\n".join(
        str(n.target) for n in program.flat.nodes if isinstance(n.target, ops.Op)
        and not isinstance(n.target, ops.Constant)
    )  # fmt: skip
    alike = _NUMBERED.sub(r"\1", text + targets)
    return hashlib.sha256(alike.encode()).hexdigest()[:16]
