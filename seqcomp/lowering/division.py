"""How the parameters of one module are divided among ranks: by the tensor axis, and by FSDP."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqcomp.capture.call import Call
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.lowering.parameters import CutParameters
from seqcomp.lowering.program import Program
from seqcomp.lowering.sharded import ShardedParameters
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.runtime.comm import RankContext


class Division:
    """Divides the parameters once, as the first program uses them, and gives them back."""

    def __init__(
        self, module: nn.Module, context: RankContext, resolved: ResolvedPlan, tensor: str | None
    ):
        self._module = module
        self._where = type(module).__name__
        self._shards = ShardedParameters.of(module, context, resolved)
        common = self._shards.tensor_mesh if self._shards else None
        self._cut = CutParameters(module, context, tensor, common) if tensor else None

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP holds the parameters, or will."""
        return self._shards is not None

    @property
    def is_done(self) -> bool:
        """Whether this rank holds parts of parameters by now."""
        cut = self._cut is not None and self._cut.cuts is not None
        return cut or (self._shards is not None and self._shards.units is not None)

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """For a capture: parameters of full shape, in the dtype in which they compute."""
        if self._shards is not None and (self._shards.units is not None or self._shards.dtype):
            return self._shards.whole()
        return self._cut.whole() if self._cut is not None else contextlib.nullcontext()

    def example(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """An example call as a real one would come, or on meta where the parameters are."""
        inputs: tuple[Any, Any] = (args, kwargs)
        if self._shards is not None and self._shards.dtype is not None:
            inputs = self._shards.cast(inputs)
        if any(parameter.is_meta for parameter in self._module.parameters()):
            # It tells how to divide the parameters; calls with values are compiled anew.
            inputs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), inputs)
        return inputs

    def problem(self, program: Program) -> PlanError | None:
        """Why the parameters cannot be, or were not, divided as `program` needs them."""
        return self._other_cuts(program) or self._other_units(program)

    def apply(self, program: Program) -> None:
        """Divides the parameters, unless they are."""
        if self._cut is not None and self._cut.cuts is None:
            self._cut.apply(program.cuts)
        if self._shards is not None and self._shards.units is None:
            assert program.fsdp_units is not None
            self._shards.apply(program.fsdp_units, program.cuts)

    def leave_call(self) -> None:
        """At the end of a call without gradients: FSDP would keep some parameters whole."""
        if self._shards is not None:
            self._shards.leave()

    def abandon_call(self) -> None:
        """After a call that was refused: FSDP's hooks began one."""
        if self._shards is not None:
            self._shards.abandon()

    def restore(self) -> None:
        """Plain, whole parameters again. Collective over the axes that divided them."""
        if self._shards is not None and self._shards.units is not None:
            self._shards.restore()
        if self._cut is not None:
            self._cut.restore()

    def refuse_meta(self, call: Call) -> None:
        """SC507: parameters that have no values yet."""
        blank = [name for name, p in self._module.named_parameters() if p.is_meta]
        if not blank or all(x.is_meta for x in call.leaves if isinstance(x, Tensor)):
            return
        raise PlanError(
            [
                diagnostic(
                    "SC507",
                    where=self._where,
                    found=f"{len(blank)} parameters on meta, the first {blank[0]}",
                    legal="parameters and buffers with values",
                    help="seqcomp.training.materialise.materialise(model, device), or "
                    "model.to_empty(device=...) and a checkpoint; buffers too",
                )
            ]
        )

    def _other_cuts(self, program: Program) -> PlanError | None:
        if self._cut is None or self._cut.cuts is None or self._cut.cuts == program.cuts:
            return None
        changed = {name for name, _ in set(self._cut.cuts.items()) ^ set(program.cuts.items())}
        return self._changed(f"other weights to cut in this call: {sorted(changed)}")

    def _other_units(self, program: Program) -> PlanError | None:
        if self._shards is None:
            return None
        assert program.fsdp_units is not None
        if self._shards.units is None:
            return self._shards.problem(program.fsdp_units)
        outside = set(self._shards.units) - set(program.fsdp_units)
        return self._changed(f"weights used outside of {sorted(outside)}") if outside else None

    def _changed(self, found: str) -> PlanError:
        return PlanError(
            [
                diagnostic(
                    "SC211",
                    where=self._where,
                    found=found,
                    legal="calls that use the divided weights alike",
                    help="pass example_inputs that are like the calls of the training step",
                )
            ]
        )
