"""Parameters sharded by FSDP2, with the gradient convention of the plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.lowering.blanks import blank_like, replaced
from seqcomp.lowering.fsdp_units import owner
from seqcomp.lowering.parameters import Cut
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.runtime.comm import RankContext, mesh_dim
from seqcomp.runtime.fsdp import (
    CountedAllGather,
    CountedAllReduce,
    CountedReduceScatter,
    as_plain,
    gather_anew,
    release,
    shard_again,
)

PRECISIONS: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16}
)


def sharding_axes(resolved: ResolvedPlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes over which parameters are sharded, and those over which the shards are copied.

    Both in mesh order, without axes of size 1 where there are others, and without the tensor axis.
    """
    shard, rest = resolved.fsdp_axes, (*resolved.batch_axes, *resolved.sequence_axes)
    wide = tuple(a for a, size in resolved.axes.items() if size > 1 and a != resolved.tensor_axis)
    return (
        tuple(a for a in wide if a in shard) or shard[:1],
        tuple(a for a in wide if a in rest and a not in shard),
    )


def shard_dim(shape: Sequence[int], ways: int, cut: int | None) -> int:
    """The dim of a parameter that FSDP shards, of the local `shape` on a tensor rank.

    The first; where the tensor axis cuts that one, another that divides: two axes on one dim
    interleave, and their parts are then hard to name.
    """
    if cut != 0:
        return 0
    return next((d for d in range(1, len(shape)) if shape[d] % ways == 0), 0)


class ShardedParameters:
    """Gives the parameters of one module to FSDP2, once, and takes them back.

    Gradients are summed, not averaged, over all axes but the tensor axis: over those of
    ``fsdp.axes`` by reduce-scatter, over the others by all-reduce of the shards (HSDP).
    """

    def __init__(self, module: nn.Module, context: RankContext, resolved: ResolvedPlan):
        strategy = resolved.plan.strategies.fsdp
        assert strategy is not None
        self._module = module
        self._context = context
        self._reshard = strategy.reshard
        self._offload = strategy.offload == "cpu"
        self._dtype = PRECISIONS.get(strategy.mixed_precision)
        self._tensor = resolved.tensor_axis if resolved.tensor_size > 1 else None
        self.shard_axes, self.replica_axes = sharding_axes(resolved)
        dims = [self.replica_axes] if self.replica_axes else []
        dims += [self.shard_axes, *([(self._tensor,)] if self._tensor else [])]
        self._mesh = context.device_mesh(dims)
        self.units: tuple[str, ...] | None = None
        """Paths of the modules that are sharded by themselves; None before `apply`."""

    @classmethod
    def of(
        cls, module: nn.Module, context: RankContext, resolved: ResolvedPlan
    ) -> ShardedParameters | None:
        """None where the plan has no fsdp, or ranks are threads: they hold whole parameters."""
        if not resolved.fsdp_axes:
            return None
        made = cls(module, context, resolved)
        return made if made._mesh is not None else None

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The part of the mesh over which parameters are cut; FSDP wants one common mesh."""
        return self._mesh[self._tensor] if self._mesh is not None and self._tensor else None

    @property
    def dtype(self) -> torch.dtype | None:
        """In which the parameters compute (mixed precision); None is their own."""
        return self._dtype

    def cast(self, inputs: Any) -> Any:
        """A tree of inputs as mixed precision computes with them."""

        def narrow(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(self._dtype) if floating else leaf

        return pytree.tree_map(narrow, inputs)

    # --- apply ---------------------------------------------------------------------------

    def problem(self, units: Sequence[str]) -> PlanError | None:
        """Why FSDP cannot shard these units, before anything is changed."""
        kinds: dict[str, set[torch.dtype]] = {}
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and self._dtype is None:
                kinds.setdefault(owner(name, units), set()).add(parameter.dtype)
        found = [
            diagnostic(
                "SC213",
                where=unit or type(self._module).__name__,
                found=f"parameters of {', '.join(sorted(str(d)[6:] for d in dtypes))}",
                legal="one dtype for the trained parameters of a block",
                help="model.float() with fsdp: {mixed_precision: bf16}, or freeze those of "
                "the other dtype",
            )
            for unit, dtypes in kinds.items()
            if len(dtypes) > 1
        ]
        found += [
            diagnostic(
                "SC214",
                where=name,
                found="a parameter of shape []",
                legal="parameters of one dim or more",
                help="make it a parameter of shape [1], or a buffer where it is not trained",
            )
            for name, parameter in self._module.named_parameters()
            if parameter.dim() == 0
        ]
        return PlanError(found) if found else None

    def apply(self, units: Sequence[str], cuts: Mapping[str, Cut]) -> None:
        """Shards the parameters: each unit by itself, the rest with the root."""
        assert self.units is None, "already sharded"
        assert self._mesh is not None
        self.units = tuple(units)
        dims = {id(self._module.get_parameter(name)): cut.dim for name, cut in cuts.items()}
        ways = math.prod(self._context.sizes[a] for a in self.shard_axes)

        def placement(parameter: nn.Parameter) -> Shard:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            return Shard(shard_dim(local.shape, ways, dims.get(id(parameter))))

        with torch.no_grad():
            for parameter in self._module.parameters():
                if not parameter.is_contiguous():
                    parameter.data = parameter.data.contiguous()
        names = [mesh_dim(self.replica_axes)] if self.replica_axes else []
        mesh = self._mesh[(*names, mesh_dim(self.shard_axes))]
        for path in (*self.units, ""):
            part = self._module.get_submodule(path)
            fully_shard(
                part,
                mesh=mesh,
                # The root's are wanted again as soon as the backward begins.
                reshard_after_forward=self._reshard and bool(path),
                shard_placement_fn=placement,
                mp_policy=self._precision(part, is_root=not path),
                offload_policy=CPUOffloadPolicy(pin_memory=self._context.device.type != "cpu")
                if self._offload
                else OffloadPolicy(),
            )
            self._count(part, path)
        assert isinstance(self._module, FSDPModule)
        gather_anew(self._module)

    def _precision(self, part: nn.Module, *, is_root: bool) -> MixedPrecisionPolicy:
        narrow = any(p.dtype.itemsize < 4 for p in part.parameters() if p.is_floating_point())
        wide = torch.float32 if narrow or self._dtype is not None else None
        return MixedPrecisionPolicy(
            param_dtype=self._dtype, reduce_dtype=wide, cast_forward_inputs=is_root
        )

    def _count(self, part: nn.Module, path: str) -> None:
        assert isinstance(part, FSDPModule)
        label = f"fsdp {path}" if path else "fsdp"
        shards = self._context.comm(self.shard_axes)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        part.set_custom_all_gather(CountedAllGather(shards, label))
        part.set_custom_reduce_scatter(CountedReduceScatter(shards, label))
        if self.replica_axes:
            replicas = self._context.comm(self.replica_axes)
            part.set_all_reduce_hook(CountedAllReduce(replicas, label))

    # --- captures ------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """For a capture: the modules as they were, with full parameters that take no memory."""
        device = None if self.units is None else self._context.device

        def blank(parameter: nn.Parameter) -> nn.Parameter:
            return blank_like(parameter, dtype=self._dtype, device=device)

        with replaced(self._module, blank), as_plain(self._parts()):
            yield

    # --- afterwards ----------------------------------------------------------------------

    def abandon(self) -> None:
        """After a call that was refused: FSDP forgets that it began."""
        if isinstance(self._module, FSDPModule):
            self._module.reset_iter_state()

    def leave(self) -> None:
        """At the end of a call without a backward: what users find are shards with gradients."""
        if self.units is not None:
            shard_again(self._parts())

    def restore(self) -> None:
        """Gives the modules whole parameters again. Collective over the axes of FSDP."""
        for part in self._parts():
            release(part, self._context.comm(self.shard_axes), self._context.device)
        self.units = None

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self._module.modules() if isinstance(part, FSDPModule)]
