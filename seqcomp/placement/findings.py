"""What placement tells the user about one operation."""

from __future__ import annotations

from torch.fx import Node

from seqcomp.capture.edit import place_of
from seqcomp.capture.sizes import evaluate
from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.placement.rule import Decision, Env
from seqcomp.placement.spec import Spec


def travel_finding(node: Node, decision: Decision) -> Diagnostic:
    """SC408: what travels instead of the sequence."""
    return diagnostic(
        "SC408",
        where=place_of(node),
        found=f"{decision.attributes['travels']}, at most {decision.attributes['bytes']} bytes "
        "per rank at this size",
        legal="any operation that needs little of the sequence",
        help="nothing to do: exact, and the sequence is not gathered",
    )


def gather_findings(node: Node, decision: Decision, env: Env) -> list[Diagnostic]:
    """SC401 for every operand that gave up axes."""
    findings = []
    for operand, want in decision.wants.items():
        native = env.native[operand]
        if not isinstance(native, Spec):
            continue
        lost = [a for a in native.axes if a not in want.axes]
        if not lost:
            continue
        size = operand.meta["val"].element_size()
        for extent in env.shape(operand):
            size *= evaluate(extent, env.capture.hints)
        degree = env.mesh.degree(lost)
        findings.append(
            diagnostic(
                "SC401",
                where=place_of(node),
                found=f"{decision.gathered}: {operand.name} gathered over {'+'.join(lost)}, "
                f"{size * (degree - 1) // degree} bytes received per rank at this size",
                legal="operations that act on each token alone, or sums and means over tokens",
                help="exact as it is; move the operation out of the sharded part to save it",
            )
        )
    return findings
