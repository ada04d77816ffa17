"""Why the best plan is what it is: each decision changed alone, and what that would cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from seqcomp.cost.estimate import Estimate
from seqcomp.search.composition import Composition
from seqcomp.search.pricing import Pricer
from seqcomp.search.rank import Ranked
from seqcomp.search.space import Space, arrangements_of, orders_of, shardings_of

DECISIONS = ("order", "layout", "transport", "fsdp", "checkpoint", "loss_chunks")


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan with one decision taken otherwise."""

    value: str
    step_seconds: float
    peak_bytes: int
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values with exactly the fields of this class."""
        return {
            "value": self.value,
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True)
class Reason:
    """What was chosen, and what else there was: the fastest that fits first, then what does not."""

    decision: str
    chosen: str
    instead: tuple[Alternative, ...]

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values with exactly the fields of this class."""
        return {
            "decision": self.decision,
            "chosen": self.chosen,
            "instead": [item.to_json() for item in self.instead],
        }


def reasons_for(best: Ranked[Estimate], pricer: Pricer, space: Space) -> tuple[Reason, ...]:
    """One reason for each decision that had an alternative."""
    found: list[Reason] = []
    for decision in DECISIONS:
        others = [
            Alternative(
                value_of(composition, decision),
                price.step_seconds,
                price.peak_bytes,
                price.fits,
            )
            for composition in _taken_otherwise(best.composition, decision, pricer, space)
            if composition != best.composition
            for price in (pricer.price(composition),)
        ]
        others.sort(key=lambda item: (not item.fits, item.step_seconds))
        if others:
            found.append(Reason(decision, value_of(best.composition, decision), tuple(others)))
    return tuple(found)


def value_of(composition: Composition, decision: str) -> str:
    """What a composition decided, as text."""
    if decision == "order":
        return " x ".join(f"{axis} {size}" for axis, size in composition.mesh.items())
    if decision == "fsdp":
        again = "" if composition.reshard else ", kept gathered"
        return f"over {' and '.join(composition.fsdp)}{again}" if composition.fsdp else "none"
    return str(getattr(composition, decision))


def _taken_otherwise(
    best: Composition, decision: str, pricer: Pricer, space: Space
) -> Iterator[Composition]:
    """`best` with every value of one decision, its own included."""
    if decision == "order":
        for order in orders_of(best.degrees, pricer.cluster):
            fsdp = tuple(axis for axis in order if axis in best.fsdp)
            yield replace(best, order=order, fsdp=fsdp)
    elif decision in ("layout", "transport"):
        limits = pricer.limits(padding=best.padded)
        for other in arrangements_of(best.degrees, best.order, limits, space):
            if decision == "layout" and other.transport == best.transport:
                yield replace(best, layout=other.layout, padded=other.padded)
            elif decision == "transport" and other.layout == best.layout:
                yield replace(best, transport=other.transport)
    elif decision == "fsdp":
        for axes, reshard in shardings_of(best.degrees, space):
            fsdp = tuple(axis for axis in best.order if axis in axes)
            yield replace(best, fsdp=fsdp, reshard=reshard)
    elif decision == "checkpoint":
        for checkpoint in space.checkpoint:
            yield replace(best, checkpoint=checkpoint)
    else:
        for chunks in space.loss_chunks:
            yield replace(best, loss_chunks=chunks)
