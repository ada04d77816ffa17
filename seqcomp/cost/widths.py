"""A run as ranks see it under a plan: its length, layout and widths of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from seqcomp.cost.run import ELEMENT_BYTES, Run
from seqcomp.cost.shape import ModelShape
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.plan.resolve import ResolvedPlan


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element: of activations, of parameters as kept, of parameters as gathered."""

    activation: int
    kept: int
    gathered: int

    @property
    def gradient(self) -> int:
        """As gradients are summed."""
        return max(self.kept, 4)


def padded(plan: ResolvedPlan, model: ModelShape, run: Run) -> Run:
    """The run as ranks see it: with the tokens that fill the sequence up."""
    return run.with_length(layout_of(plan, model, run).padded(run.seq_len))


def layout_of(plan: ResolvedPlan, model: ModelShape, run: Run) -> SequenceLayout:
    """As ranks choose it: a mask that depends on documents is no causal one to ``auto``."""
    return plan.layout_for(run.seq_len, model.all_causal and run.packed is None)


def dtype_of(plan: ResolvedPlan, run: Run) -> tuple[str, int]:
    """In which a plan computes, by name and in bytes."""
    fsdp = plan.plan.strategies.fsdp
    name = run.dtype if fsdp is None or fsdp.mixed_precision == "none" else fsdp.mixed_precision
    return name, ELEMENT_BYTES[name]


def widths_of(plan: ResolvedPlan, run: Run) -> Widths:
    """``fsdp: mixed_precision`` keeps weights in the dtype that the model has."""
    computes = dtype_of(plan, run)[1]
    return Widths(computes, run.element_bytes, computes)
