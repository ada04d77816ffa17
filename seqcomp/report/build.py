"""A report of one lowered program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from seqcomp.diagnostics import Diagnostic
from seqcomp.lowering.program import Program
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.report.attention import CONVENTION, WorkRow, work_rows
from seqcomp.report.busiest import busiest_rank
from seqcomp.report.footprint import FootprintRow, footprint_rows
from seqcomp.report.graph import Regions, regions_of
from seqcomp.report.local import Saved, local_values
from seqcomp.report.memory import Again, memory_rows
from seqcomp.report.render import (
    as_text,
    comm_table,
    footprint_table,
    kernel_table,
    memory_line,
    readable,
    work_table,
)
from seqcomp.report.rows import (
    CommRow,
    Event,
    KernelRow,
    comm_events,
    comm_rows,
    kernel_rows,
)
from seqcomp.report.storages import MemoryRow
from seqcomp.report.tiles import TileGrid, tile_grids
from seqcomp.report.tokens import Tokens, tokens_of
from seqcomp.runtime.comm import RankContext


@dataclass(frozen=True)
class Report:
    """What one call of a program does on one rank; ranks of a mesh nearly all do the same.

    Where the tensor axis does not divide a vocabulary the last ranks have a little less, and under
    a window of attention those along the ring need and send different keys: then rows are those of
    place `ring_rank` along the ring, a rank's own or, in a mesh that need not exist, of the
    `busiest`, which sends most (both None where all places send the same).

    `comm` counts one forward and its backward; `events` are its rows one by one, by operation.
    `batch` is the rank's own, `length` the full one (None where the model has no such dim). `mesh`
    lists the axes, outermost first. `tokens`, `tiles` and `graph` are of the whole mesh.
    `documents`: lengths of those that every sequence packs; None where a sequence is one.
    """

    program: str
    mesh: dict[str, int]
    batch: int | None
    length: int | None
    comm: tuple[CommRow, ...]
    kernels: tuple[KernelRow, ...]
    findings: tuple[Diagnostic, ...]
    memory: tuple[MemoryRow, ...] = ()
    work: tuple[WorkRow, ...] = ()
    footprint: tuple[FootprintRow, ...] = ()
    tokens: Tokens | None = None
    tiles: tuple[TileGrid, ...] = ()
    events: tuple[Event, ...] = ()
    graph: Regions | None = None
    ring_rank: int | None = None
    busiest: int | None = None
    documents: str | None = None

    def bytes_sent(self, phase: str | None = None) -> int:
        """Bytes that one rank sends, in one phase or in both."""
        return sum(row.bytes_sent for row in self.comm if phase in (None, row.phase))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values with exactly the fields of this class."""
        return {
            "program": self.program,
            "mesh": dict(self.mesh),
            "batch": self.batch,
            "length": self.length,
            "documents": self.documents,
            "comm": [row.to_json() for row in self.comm],
            "kernels": [row.to_json() for row in self.kernels],
            "work": [row.to_json() for row in self.work],
            "footprint": [row.to_json() for row in self.footprint],
            "memory": [row.to_json() for row in self.memory],
            "tokens": self.tokens and self.tokens.to_json(),
            "tiles": [grid.to_json() for grid in self.tiles],
            "events": [event.to_json() for event in self.events],
            "graph": self.graph and self.graph.to_json(),
            "ring_rank": self.ring_rank,
            "busiest": self.busiest,
            "findings": [finding.to_json() for finding in self.findings],
        }

    def to_html(self, *, title: str = "", budget: int | None = None) -> str:
        """One page that needs no network and no other file; `budget`: bytes of one rank."""
        from seqcomp.report.html.page import to_html

        return to_html(self, title=title, budget=budget)

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        forward, backward = (readable(self.bytes_sent(p)) for p in ("forward", "backward"))
        sends = "sends at most" if any(row.at_most for row in self.comm) else "sends"
        who, place = "each rank", self.ring_rank
        if place is not None:
            most = (
                "which sends most" if place == self.busiest else f"rank {self.busiest} sends most"
            )
            who = f"rank {place} along the ring ({most})"
        packed = "" if self.documents is None else f" in documents of {self.documents[:100]}"
        headline = (
            f"program {self.program} on {axes}; batch {self.batch}, length {self.length}{packed}; "
            f"{who} {sends} {forward} forward, {backward} backward"
        )
        return as_text(
            [
                headline,
                *([kernel_table(self.kernels)] if self.kernels else []),
                *([work_table(self.work)] if self.work else []),
                *([CONVENTION] if self.work else []),
                *([comm_table(self.comm)] if self.comm else []),
                *([footprint_table(self.footprint)] if self.footprint else []),
                *map(memory_line, self.memory),
                *(str(finding) for finding in self.findings),
            ]
        )


def build_report(
    program: Program,
    batch: int | None,
    length: int | None,
    resolved: ResolvedPlan,
    context: RankContext,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    *,
    any_rank: bool = False,
) -> Report:
    """The report of one call of `program` with this rank's `batch` and the full `length`.

    any_rank: the context stands for all, and rows are those of the busiest place along the ring.
    dtypes: in which parameters are kept, by name, where that is not how they compute.
    """
    saved: Saved = {}
    values = local_values(program, batch, length, resolved.axes, saved)
    again = Again(program, saved)
    busiest = busiest_rank(program, values, resolved)
    ring_rank = context.coords.get(resolved.ring_axis or "", 0)
    if any_rank and busiest is not None:
        ring_rank = busiest
    on_host = context.device.type != "cpu"
    events = comm_events(program, values, resolved, again, ring_rank)
    report = Report(
        program=program.name,
        mesh=dict(resolved.axes),
        batch=batch,
        length=length,
        comm=comm_rows(events),
        kernels=kernel_rows(program, values, resolved, context.device),
        memory=memory_rows(program, values, saved, resolved, on_host=on_host),
        work=work_rows(program, values, resolved),
        footprint=footprint_rows(program, values, saved, resolved, dtypes, on_host=on_host),
        findings=program.findings,
        tokens=tokens_of(program.layout, length, resolved),
        tiles=tile_grids(program, values, resolved.ulysses_size),
        events=events,
        graph=regions_of(program, values, events),
        ring_rank=None if busiest is None else ring_rank,
        busiest=busiest,
    )
    saved.clear()  # or what was imagined and the hooks that hold it live for good
    return report
