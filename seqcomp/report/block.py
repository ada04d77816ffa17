"""What one block saves for the backward and keeps where it runs again, split by who else has it."""

from __future__ import annotations

from dataclasses import dataclass

from seqcomp.lowering.program import Program
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.report.local import Saved
from seqcomp.report.memory import Count, state_of
from seqcomp.report.storages import Values


@dataclass(frozen=True)
class BlockBytes:
    """Of one call that runs again, in bytes: what it saves where it does not (`without`), of that
    what attention alone saves, without its log-sum-exp (`attended`), and what it keeps (`kept`);
    neither with what comes in beside the largest (`shared`), which other calls take, too.
    """

    without: int
    attended: int
    kept: int
    shared: int


def block_bytes(
    program: Program, values: Values, saved: Saved, resolved: ResolvedPlan
) -> BlockBytes:
    """Of a program with one such call; arguments as of `memory_rows`."""
    (rerun,) = program.checkpoints.values()
    count = Count(values, saved, resolved, state_of(program, values))
    inputs = count.inputs_of(rerun)
    inside = set(rerun.nodes)
    count.known |= count.saved_by(n for n in program.flat.nodes if n not in inside).keys()
    attentions = {n for n in rerun.nodes if "attention" in n.meta}
    rest = count.saved_by(n for n in rerun.nodes if n not in attentions)
    own = count.saved_by(attentions)
    largest = max(inputs, key=inputs.__getitem__)
    shared = {k: n for k, n in inputs.items() if k != largest and k not in count.known}
    count.known |= shared.keys()
    attended = own.keys() - rest.keys() - {(n, "lse") for n in attentions}
    return BlockBytes(
        without=sum(n for k, n in (rest | own).items() if k not in shared),
        attended=sum(own[key] for key in attended),
        kept=sum(count.kept_of(rerun).values()),
        shared=sum(shared.values()),
    )
