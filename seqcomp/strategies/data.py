"""Data parallelism, with whole parameters or (fsdp, Zhao et al., 2023) sharded ones.

Nothing is sent per layer at attention: the batch is sliced. What is sent belongs to the
parameters and is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqcomp.strategies.base import AttentionShape, CommStep, Kind, Phase, part


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
    """Parameters sharded over ``degree`` ranks along ``axis``.

    With ``replicas`` > 1 along ``replica_axis`` as many groups hold the same shards (HSDP).
    """

    degree: int
    axis: str = "data"
    reshard: bool = True
    replicas: int = 1
    replica_axis: str = ""

    def legal_degrees(self, shape: AttentionShape) -> None:
        """Any degree: shards may be uneven."""
        del shape

    def comm_steps(self, shape: AttentionShape) -> tuple[CommStep, ...]:
        """Nothing at attention."""
        del shape
        return ()

    def gradient_steps(
        self, parameter_bytes: int, gradient_bytes: int | None = None
    ) -> tuple[CommStep, ...]:
        """All-gather before use (again in backward if resharded), reduce-scatter of gradients.

        gradient_bytes: of what is trained, as it is summed; like the parameters by default. Shards
        are then summed over the replicas. What has no bytes takes no step.
        """
        learnt = parameter_bytes if gradient_bytes is None else gradient_bytes
        again = (("all_gather", "backward"),) if self.reshard else ()
        gathers: tuple[tuple[Kind, Phase], ...] = (("all_gather", "forward"), *again)
        scatter: tuple[Kind, Phase] = ("reduce_scatter", "backward")
        moved = [(kind, phase, parameter_bytes) for kind, phase in gathers]
        steps = [
            CommStep(kind, self.axis, part((self.degree - 1) * size, self.degree), 1, phase, True)
            for kind, phase, size in [*moved, (*scatter, learnt)]
            if self.degree > 1 and size
        ]
        if self.replicas > 1 and learnt:
            shard = part(learnt, self.degree)
            sent = 2 * (self.replicas - 1) * shard // self.replicas
            steps.append(CommStep("all_reduce", self.replica_axis, sent, 1, "backward", True))
        return tuple(steps)
