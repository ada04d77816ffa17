"""The public entry points: parallelize and of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import networkx as nx
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from seqcomp.capture.example import example_call
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.lowering.compiled import CompiledModule, compiled_of
from seqcomp.lowering.consensus import agree
from seqcomp.lowering.program import ProgramCache
from seqcomp.lowering.regions import region_graph
from seqcomp.plan.load import dump_plan, load_plan
from seqcomp.plan.resolve import ResolvedPlan, resolve
from seqcomp.plan.schema import Plan
from seqcomp.report.build import Report, build_report
from seqcomp.runtime import collectives
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.dist import process_context
from seqcomp.runtime.uneven import pad_to

Module = TypeVar("Module", bound=torch.nn.Module)


class Compiled(CompiledModule):
    """Everything seqcomp knows about one compiled module; `seqcomp.of(model)` returns it."""

    def graph(self, path: str = "") -> str:
        """Source code of the local forward of the module at `path`, of the last program."""
        program, _ = self.last_program()
        found = [piece.code for piece in program.pieces if piece.path == path]
        if not found:
            raise PlanError(
                [
                    diagnostic(
                        "SC504",
                        message="no such module in the program",
                        where=path,
                        found=path,
                        legal=tuple(dict.fromkeys(p.path for p in program.pieces)),
                        help="name a module that the forward calls",
                    )
                ]
            )
        return "\n".join(found)

    def regions(self) -> nx.DiGraph[int]:
        """Regions of local work and the redistributions between them, of the last program."""
        program, _ = self.last_program()
        return region_graph(program.flat, program.capture.inputs)

    def token_index(self, length: int | None = None) -> Tensor:
        """Global positions of this rank's tokens [S / P], of the last call or of `length`.

        None of them where the model has no sequence.
        """
        program, sizes = self.last_program()
        length = length if length is not None else sizes.length
        if length is None:
            return torch.empty(0, dtype=torch.long, device=self._context.device)
        layout = self._resolved.layout_for(length, program.facts.all_causal)
        rank = self._context.comm(self._mesh.sequence).rank if self._mesh.sequence else 0
        own = layout.token_index(layout.padded(length), rank)
        return torch.tensor([p for p in own if p < length], device=self._context.device)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """A sharded output [.., S / P, ..] as the whole [.., S, ..] in token order.

        What is computed from the result is the same on every rank of the sequence group and
        counts once: the backward is this rank's slice.
        """
        if not self._mesh.sequence:
            return x
        program, sizes = self.last_program()
        comm = self._context.comm(self._mesh.sequence)
        length = sizes.length if self._mesh.pads else x.shape[dim] * comm.size
        layout = self._resolved.layout_for(length, program.facts.all_causal)
        if self._mesh.pads and length is not None:
            x = pad_to(x, dim % x.dim(), layout.padded(length) // comm.size)
        return collectives.gather(
            x, dim, comm, layout, cotangent="replicated", length=length, label="gather"
        )

    def global_sum(self, x: Tensor) -> Tensor:
        """Sum of x over the data axes: of token counts or losses of the ranks' batch slices.

        Every rank of a sequence group passes the same x. The cotangent passes unchanged.
        """
        if not self._mesh.batch:
            return x.clone()
        comm = self._context.comm(self._mesh.batch)
        return collectives.all_reduce(x, comm, cotangent="replicated", label="global_sum")

    def report(self) -> Report:
        """What the last call's program does: communication by module, kernels, findings."""
        program, sizes = self.last_program()
        dtypes = {n: p.dtype for n, p in self._module.named_parameters(remove_duplicate=False)}
        return build_report(program, sizes.batch, sizes.length, self.resolved, self.context, dtypes)


def parallelize(
    model: Module,
    plan: Plan | Mapping[str, Any] | str | Path,
    *,
    mesh: DeviceMesh | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
) -> Module:
    """Spreads the sequence of `model` over the ranks of a mesh as `plan` says.

    The same module object comes back with its forwards replaced; parameters, names, class and
    config stay. Every rank of a sequence group calls it with the same full inputs, ranks along a
    data axis with their slices of the batch. Compilation happens at the first call of each kind,
    or here when `example_inputs` (dict = kwargs, tuple = args; sizes only) are given.

    plan: path, preset name ("usp_2x2", "data_2+ring_2"), dict or Plan.
    mesh: a DeviceMesh with the axes of the plan; by default one over all ranks, in plan order.

    Raises PlanError, the same on every rank and before any collective of the model: unreadable or
    illegal plans, a world size that does not match (SC104), no process group (SC105), a mesh that
    does not match (SC106), ranks that disagree (SC504), and whatever stops the compilation.
    """
    if not (dist.is_available() and dist.is_initialized()):
        _require_alone(plan)
        return attach(model, resolve(load_plan(plan), world_size=1), _alone())
    resolved: ResolvedPlan | None = None
    failure: PlanError | None = None
    try:
        resolved = _resolve(plan, mesh, model)
    except PlanError as error:
        failure = error
    everyone = process_context({"world": dist.get_world_size()})
    try:
        agree(everyone, failure, {"plan": _digest(resolved)} if resolved else {})
    finally:
        everyone.close()
    assert resolved is not None
    context = process_context(dict(resolved.axes), mesh)
    return attach(model, resolved, context, example_inputs=example_inputs)


def attach(
    model: Module,
    resolved: ResolvedPlan,
    context: RankContext,
    *,
    cache: ProgramCache | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    keep_global: bool = False,
) -> Module:
    """Compiles `model` for one rank whose place in the mesh is `context`.

    keep_global: programs keep their global graph, for the verifier.

    Raises PlanError as `parallelize` does.
    """
    previous = compiled_of(model)
    if previous is not None:
        previous.close()
    derived = example_inputs is None and (resolved.tensor_size > 1 or bool(resolved.fsdp_axes))
    if derived:
        example_inputs = _derived_example(model, resolved)
    dump = os.environ.get("SEQCOMP_DUMP")
    compiled = Compiled(
        model, resolved, context,
        cache=cache or ProgramCache(), dump=Path(dump) if dump else None,
        keep_global=keep_global,
    )  # fmt: skip
    if example_inputs is not None:
        named = isinstance(example_inputs, Mapping)
        args = () if named else tuple(example_inputs)
        kwargs = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
        try:
            compiled.prepare(args, kwargs)
        except PlanError as error:
            compiled.close()
            if derived:
                raise _of_derived(error) from error
            raise
    return model


def _derived_example(model: torch.nn.Module, resolved: ResolvedPlan) -> dict[str, Any]:
    """Parameters are cut before an optimizer sees them, so a call is made up where possible."""
    factor = resolved.layout_for(None, True).factor
    # Without its logits and without a loss a model computes nothing, and reads no parameter.
    dropped = "drop" in resolved.plan.outputs.values()
    return example_call(model, length=factor * max(2, 32 // factor), labels=dropped)


def _of_derived(error: PlanError) -> PlanError:
    """What torch cannot capture may be the call that was made up, not the model."""
    more = "; or pass example_inputs={...}: this call was made up from the signature of forward"
    return PlanError(
        [replace(d, help=f"{d.help}{more}") if d.code == "SC301" else d for d in error.diagnostics]
    )


def of(model: torch.nn.Module) -> Compiled:
    """What seqcomp knows of a compiled module.

    Raises PlanError SC309 for a module that was not compiled.
    """
    compiled = compiled_of(model)
    if not isinstance(compiled, Compiled):
        raise PlanError(
            [
                diagnostic(
                    "SC309",
                    message="the module is not compiled",
                    where=type(model).__name__,
                    found="a plain module",
                    legal="a module returned by seqcomp.parallelize",
                    help="call seqcomp.parallelize(model, plan=...) first",
                )
            ]
        )
    return compiled


def _resolve(plan: Any, mesh: DeviceMesh | None, model: torch.nn.Module) -> ResolvedPlan:
    loaded = load_plan(plan)
    if mesh is not None:
        _check_mesh(loaded, mesh)
    world = mesh.size() if mesh is not None else dist.get_world_size()
    paths = [path for path, _ in model.named_modules() if path]
    return resolve(loaded, world_size=world, module_paths=paths)


def _check_mesh(plan: Plan, mesh: DeviceMesh) -> None:
    names = tuple(mesh.mesh_dim_names or ())
    sizes = tuple(mesh.mesh.shape)
    if names == tuple(plan.mesh) and sizes == tuple(plan.mesh.values()):
        return
    raise PlanError(
        [
            diagnostic(
                "SC106",
                where="mesh",
                found=str(dict(zip(names, sizes, strict=False)) if names else sizes),
                legal=str(dict(plan.mesh)),
                help=f"init_device_mesh(device, {tuple(plan.mesh.values())}, "
                f"mesh_dim_names={tuple(plan.mesh)})",
            )
        ]
    )


def _require_alone(plan: Any) -> None:
    loaded = load_plan(plan)
    size = 1
    for degree in loaded.mesh.values():
        size *= degree
    if size == 1:
        return
    raise PlanError(
        [
            diagnostic(
                "SC105",
                where="torch.distributed",
                found="not initialised (1 process)",
                legal=f"{size} processes, the product of mesh {dict(loaded.mesh)}",
                help=f"start with torchrun --nproc-per-node {size} and call "
                "torch.distributed.init_process_group() before parallelize",
            )
        ]
    )


def _alone() -> RankContext:
    from seqcomp.runtime.threads import ThreadWorld

    return ThreadWorld({"ring": 1}).context(0)


def _digest(resolved: ResolvedPlan) -> str:
    return hashlib.sha256(dump_plan(resolved.plan).encode()).hexdigest()[:16]
