"""``seqcomp.explain``: what a plan would do to a model, on a mesh that need not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqcomp.capture.call import signature_of
from seqcomp.capture.example import example_call
from seqcomp.capture.facts import makes_cache
from seqcomp.cost.run import Run
from seqcomp.diagnostics import PlanError, diagnostic, errors_in, raise_for_errors
from seqcomp.integrations.models import build_model
from seqcomp.integrations.packed import of_documents, pack
from seqcomp.integrations.sample import wrong_length
from seqcomp.integrations.validate import count_of, run_validation
from seqcomp.layout.documents import Documents
from seqcomp.lowering.binding import bound_call
from seqcomp.lowering.blanks import blank_like, replaced
from seqcomp.lowering.build import Request, build_program
from seqcomp.lowering.compiled import compiled_of
from seqcomp.lowering.program import Program
from seqcomp.lowering.sharded import PRECISIONS
from seqcomp.plan.reader import describe
from seqcomp.plan.resolve import ResolvedPlan, resolve
from seqcomp.report.build import Report, build_report
from seqcomp.report.graph import Regions, regions_of
from seqcomp.report.local import local_values
from seqcomp.runtime.threads import ThreadWorld

T = TypeVar("T")

_OTHERS = (
    "calls are made up for models of tokens, of images and of embedded tokens; others: "
    "seqcomp.explain(module, plan, seq_len=..., example_inputs={...}) in Python"
)

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
        "float64": torch.float64,
    }
)


@dataclass(frozen=True)
class Lowered:
    """A model lowered for a mesh that need not exist, and the sizes of one call of it."""

    program: Program
    batch: int | None
    length: int | None
    resolved: ResolvedPlan
    dtypes: Mapping[str, torch.dtype]  # in which parameters are kept
    documents: Documents | None = None  # that every sequence packs


def explain(
    model: nn.Module | str,
    plan: Any,
    *,
    seq_len: int,
    batch: int = 1,
    dtype: torch.dtype | str | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    documents: Sequence[int] | None = None,
) -> Report:
    """What one call and its backward would do on the first rank of the plan's mesh, or where masks
    make those along the ring send different keys on the one that sends most.

    Collectives and their bytes, the work of attention and its balance, what a rank holds, and
    findings: those of the compiled module on real ranks. Nothing is computed or sent, weights are
    not read, no process group is needed, and the module stays as it is. Under ``torch.no_grad()``
    the call has no backward.

    Args:
        model: a module, or a spec such as ``hf:LlamaForCausalLM?num_hidden_layers=2``. A call is
            made up for models of token ids (with labels where they take them), of images and of
            embedded tokens.
        plan: path, preset name, YAML text, dict or ``Plan``, for any number of ranks.
        seq_len: full sequence length in tokens.
        batch: sequences on each data rank.
        dtype: of weights and buffers ("bf16", "fp16", "fp32", "fp64"); the model's own otherwise.
        example_inputs: keyword arguments of a call, for other models; of tensors the sizes alone
            count, which are those of one data rank's call.
        documents: lengths of those that every sequence packs, one behind the other: attention and
            what it sends stay within each, as where positions that start anew tell them apart.

    Raises:
        PlanError: everything wrong with the plan, the model and the sizes, as ``validate`` finds
            it, and whatever stops the compilation.
    """
    return lowered(
        model, plan, _report,
        seq_len=seq_len, batch=batch, dtype=dtype, example_inputs=example_inputs,
        documents=documents,
    )  # fmt: skip


def graph(
    model: nn.Module | str,
    plan: Any,
    *,
    seq_len: int,
    batch: int = 1,
    dtype: torch.dtype | str | None = None,
    module: str = "",
) -> Regions:
    """The regions of what `explain` explains, or those of the module of that path and around it.

    Of equal blocks one is drawn, which is the one that `module` is in.

    Raises:
        PlanError: as `explain` does, and SC032 for a module that the forward does not call.
    """

    def of(what: Lowered) -> Regions:
        return regions_in(what, module)

    return lowered(model, plan, of, seq_len=seq_len, batch=batch, dtype=dtype)


def regions_in(what: Lowered, module: str) -> Regions:
    """As `graph`, of a model that is lowered already."""
    graphs = (part for part in _graphs(what) if not module or part.has(module))
    found = next(graphs, None)
    if found is None:
        known = dict.fromkeys(p.path for p in what.program.pieces if p.path)
        raise PlanError(diagnostic("SC032", where="module", found=module, legal=tuple(known)[:40]))
    return found.within(module)


def _graphs(what: Lowered) -> Iterator[Regions]:
    """With one block drawn for all that are equal, then with all of them."""
    report = _report(what)
    assert report.graph is not None
    yield report.graph
    program, axes = what.program, what.resolved.axes
    values = local_values(program, what.batch, what.length, axes)
    yield regions_of(program, values, report.events, fold=False)


def lowered(
    model: nn.Module | str,
    plan: Any,
    then: Callable[[Lowered], T],
    *,
    seq_len: int,
    batch: int = 1,
    dtype: torch.dtype | str | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    documents: Sequence[int] | None = None,
) -> T:
    """What `then` makes of the lowered model; arguments and errors as of `explain`."""
    checked = run_validation(plan, seq_len=seq_len)
    found = [*checked.diagnostics, *count_of("batch", batch)[1], *_unknown(dtype)]
    try:
        module = build_model(model) if isinstance(model, str) else _plain(model)
    except PlanError as error:
        raise PlanError([*errors_in(found), *error.diagnostics]) from error
    raise_for_errors(found)
    assert checked.plan is not None, "a plan without errors has been built"
    paths = [path for path, _ in module.named_modules() if path]
    resolved = resolve(checked.plan, seq_len=seq_len, module_paths=paths)
    packed = None if documents is None else Run(seq_len, documents=tuple(documents)).packed
    if packed is not None and resolved.layout_kind == "auto":
        # A mask of documents is no causal one.
        resolved = replace(resolved, layout_kind="contiguous")
    wanted = DTYPES[dtype] if isinstance(dtype, str) else dtype

    def inputs() -> Mapping[str, Any]:
        if example_inputs is not None:
            return _emptied(example_inputs, module, wanted)
        return _call_of(module, seq_len, batch)

    try:
        made = _lowered(module, resolved, inputs, seq_len, wanted)
        return then(replace(made, documents=packed))
    except PlanError:
        raise
    except Exception as error:
        # A model is arbitrary code: whatever it raises is a finding about it.
        reason = f"{type(error).__name__}: {error}"[:500]
        where = model if isinstance(model, str) else type(model).__name__
        raise PlanError(diagnostic("SC022", where=where, found=reason)) from error


def _lowered(
    module: nn.Module,
    resolved: ResolvedPlan,
    inputs: Callable[[], Mapping[str, Any]],
    length: int,
    dtype: torch.dtype | None,
) -> Lowered:
    fsdp = resolved.plan.strategies.fsdp
    low = PRECISIONS.get(fsdp.mixed_precision) if fsdp else None
    kept = {
        name: dtype if dtype is not None and p.is_floating_point() else p.dtype
        for name, p in module.named_parameters(remove_duplicate=False)
    }

    def buffer(old: Tensor) -> Tensor:
        return old.to(dtype) if dtype is not None and old.is_floating_point() else old

    with replaced(module, lambda p: blank_like(p, dtype=low or dtype), buffer):
        call, dims, sizes = bound_call(
            signature_of(module.forward),
            (),
            inputs(),
            resolved,
            where=type(module).__name__,
            stateless=makes_cache(module),
        )
        sharded = bool(resolved.fsdp_axes)
        name = type(module).__name__
        program = build_program(Request(module, call, dims, sizes, resolved, name, sharded=sharded))
    raise_for_errors(program.unmet)
    sizes = program.sizes(sizes)
    if sizes.length not in (None, length):
        raise PlanError(wrong_length(name, length, sizes.length))
    return Lowered(program, sizes.batch, sizes.length, resolved, kept)


def _report(what: Lowered) -> Report:
    # On meta: what depends on the device of the calls is left open.
    rank = ThreadWorld(dict(what.resolved.axes), device=torch.device("meta")).context(0)
    program, packed = what.program, what.documents
    if packed is not None:
        values = local_values(program, what.batch, what.length, what.resolved.axes)
        pack(program, values, what.resolved, packed)
    report = build_report(
        program, what.batch, what.length, what.resolved, rank, what.dtypes, any_rank=True
    )
    return report if packed is None else of_documents(report, packed)


def _plain(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise PlanError(
            diagnostic(
                "SC022",
                where="model",
                found=describe(model),
                legal="a torch.nn.Module, or a spec such as hf:LlamaForCausalLM",
            )
        )
    if compiled_of(model) is not None:
        raise PlanError(
            diagnostic(
                "SC022",
                where=type(model).__name__,
                found="a compiled module",
                legal="a module as it was before parallelize",
                help="seqcomp.of(model).report() says what it does; seqcomp.of(model).close() "
                "gives the module back",
            )
        )
    return model


def _unknown(dtype: Any) -> list[Any]:
    if dtype is None or dtype in DTYPES.values() or (isinstance(dtype, str) and dtype in DTYPES):
        return []
    legal = tuple(DTYPES)
    return [
        diagnostic("SC010", where="dtype", message="unknown dtype", found=str(dtype), legal=legal)
    ]


def _call_of(module: nn.Module, length: int, batch: int) -> dict[str, Any]:
    """A call, with labels where the model has a head that gives logits for every token."""
    try:
        return example_call(module, length=length, batch=batch, labels=True)
    except PlanError as error:
        raise PlanError([replace(item, help=_OTHERS) for item in error.diagnostics]) from error


def _emptied(
    inputs: Mapping[str, Any], module: nn.Module, dtype: torch.dtype | None
) -> Mapping[str, Any]:
    """Tensors of the same sizes where the weights are; dtype: of floating ones, where given."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))

    def emptied(x: Tensor) -> Tensor:
        kind = dtype if dtype is not None and x.is_floating_point() else x.dtype
        return torch.empty(x.shape, dtype=kind, device=device)

    found: Mapping[str, Any] = pytree.tree_map_only(Tensor, emptied, dict(inputs))
    return found
