"""Data parallelism, with whole parameters or (fsdp, Zhao et al., 2023) sharded ones.

Nothing is sent per layer at attention: the batch is sliced. What is sent belongs to the
parameters and is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqcomp.strategies.base import AttentionShape, CommStep, part


@dataclass(frozen=True, slots=True)
class Data:
    """``degree`` slices of the batch along ``axis``."""

    degree: int
    axis: str = "data"

    def legal_degrees(self, shape: AttentionShape) -> None:
        """Any degree."""
        del shape

    def comm_steps(self, shape: AttentionShape) -> tuple[CommStep, ...]:
        """Nothing at attention."""
        del shape
        return ()

    def gradient_steps(self, parameter_bytes: int) -> tuple[CommStep, ...]:
        """One all-reduce of the gradients: 2(P-1)/P of their bytes."""
        if self.degree == 1:
            return ()
        sent = part(2 * (self.degree - 1) * parameter_bytes, self.degree)
        return (CommStep("all_reduce", self.axis, sent, 1, "backward", True),)


@dataclass(frozen=True, slots=True)
class Fsdp:
    """Parameters sharded over ``degree`` ranks along ``axis``."""

    degree: int
    axis: str = "data"
    reshard: bool = True

    def legal_degrees(self, shape: AttentionShape) -> None:
        """Any degree: shards may be uneven."""
        del shape

    def comm_steps(self, shape: AttentionShape) -> tuple[CommStep, ...]:
        """Nothing at attention."""
        del shape
        return ()

    def gradient_steps(self, parameter_bytes: int) -> tuple[CommStep, ...]:
        """All-gather before use (again in backward if resharded), reduce-scatter of gradients."""
        if self.degree == 1:
            return ()
        sent = part((self.degree - 1) * parameter_bytes, self.degree)
        gather = CommStep("all_gather", self.axis, sent, 1, "forward", True)
        again = CommStep("all_gather", self.axis, sent, 1, "backward", True)
        scatter = CommStep("reduce_scatter", self.axis, sent, 1, "backward", True)
        return (gather, again, scatter) if self.reshard else (gather, scatter)
