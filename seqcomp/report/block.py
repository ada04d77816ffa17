"""What blocks save for the backward and keep where they run again, by call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seqcomp.lowering import ops
from seqcomp.lowering.program import Program
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.report.local import Saved
from seqcomp.report.memory import Count, state_of
from seqcomp.report.storages import Values


@dataclass(frozen=True)
class BlocksBytes:
    """Of each call that runs again, in their order; of what comes into them and does not learn
    (`tables`: of positions, masks), which serves all; and of all that is `outside` of them."""

    calls: tuple[CallBytes, ...]
    tables: int
    outside: int


@dataclass(frozen=True)
class CallBytes:
    """Of one call of the block at `path`, in bytes: what it saves where it does not run again
    (`without`), of that what divided attention alone saves, without its log-sum-exp (`attended`),
    and what it keeps of its first run (`kept`). Of what several calls share the first has it, but
    for tables.
    """

    path: str
    without: int
    attended: int
    kept: int


def bytes_by_call(
    program: Program, values: Values, saved: Saved, resolved: ResolvedPlan
) -> BlocksBytes:
    """Bytes by call of a block; arguments as of `memory_rows`."""
    reruns = list(program.checkpoints.values())
    inside = {node for rerun in reruns for node in rerun.nodes}
    count = Count(values, saved, resolved, state_of(program, values))
    outside = count.saved_by(n for n in program.flat.nodes if n not in inside)
    count.known |= outside.keys()
    tables = {k: n for rerun in reruns for k, n in count.inputs_of(rerun, learns=False).items()}
    count.known |= tables.keys()
    kept, whole, rows = set[Any](), set[Any](), []
    for rerun in reruns:
        attentions = {n for n in rerun.nodes if isinstance(n.target, ops.Attention)}
        rest = count.saved_by(n for n in rerun.nodes if n not in attentions)
        attended, own = count.saved_by(attentions), count.kept_of(rerun)
        alone = attended.keys() - rest.keys() - {(n, "lse") for n in attentions}
        without = rest | attended
        rows.append(
            CallBytes(
                rerun.path,
                without=sum(size for key, size in without.items() if key not in whole),
                attended=sum(attended[key] for key in alone),
                kept=sum(size for key, size in own.items() if key not in kept),
            )
        )
        kept |= own.keys()
        whole |= without.keys()
    return BlocksBytes(tuple(rows), sum(tables.values()), sum(outside.values()))
