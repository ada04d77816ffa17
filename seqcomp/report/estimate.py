"""An estimate as plain text; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.table import Table

from seqcomp.cost.balance import Busiest
from seqcomp.cost.estimate import Estimate
from seqcomp.cost.flops import CONVENTIONS
from seqcomp.cost.run import Run
from seqcomp.cost.timeline import Event
from seqcomp.report.text import as_text, count_of, readable


def estimate_text(found: Estimate) -> str:
    """Time, where it goes, one layer's timeline, memory, FLOPs and findings."""
    axes = " x ".join(f"{axis} {size}" for axis, size in found.mesh.items())
    run = found.run
    headline = (
        f"{found.model} on {axes} of {found.cluster}; {run.mode}, batch {run.batch} a data rank, "
        f"length {run.seq_len}, {run.dtype}{packed_as(run)}"
    )
    waiting = ", ".join(f"{axis} {seconds_of(s)}" for axis, s in found.exposed.items())
    money = "" if found.price is None else f", price {found.price:.4g}"
    step = f"one step {seconds_of(found.step_seconds)}: {seconds_of(found.compute_seconds)}"
    wait = f"computing, {seconds_of(found.exposed_seconds)} waiting for communication"
    rate, each = found.tokens_per_second, found.tokens_per_second / math.prod(found.mesh.values())
    hours = found.gpu_hours
    lines = [
        headline,
        f"{step} {wait}" + (f" ({waiting})" if waiting else ""),
        f"{count_of(rate)} tokens/s, {count_of(each)} a GPU; {hours:.4g} GPU hours{money}",
    ]
    room = found.capacity - found.peak_bytes
    left = f"{readable(room)} left" if room >= 0 else f"{readable(-room)} too much"
    return as_text(
        [
            *lines,
            *_busiest(found.busiest),
            *([_timeline(found.timeline)] if found.timeline else []),
            _memory(found),
            f"peak {readable(found.peak_bytes)} of {readable(found.capacity)}: {left}",
            _flops(found),
            *(str(finding) for finding in found.findings),
        ]
    )


def packed_as(run: Run) -> str:
    """What a headline adds for packed documents."""
    words = str(run.packed or "")
    return f", documents of {words[:100]}{'...' if len(words) > 100 else ''}" if words else ""


def _busiest(ranks: Busiest) -> Iterator[str]:
    parts = {"attends to most pairs": ranks.attends, "sends most keys": ranks.sends}
    told = [f"rank {rank} {what}" for what, rank in parts.items() if rank is not None]
    if told:
        yield f"of the ranks along the ring, {' and '.join(told)}: times and bytes are of these"


def seconds_of(seconds: float) -> str:
    """A time with a unit, three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _timeline(events: tuple[Event, ...]) -> Table:
    table = Table("stream", "what", title="one layer, ms")
    for name in ("start", "end", "takes"):
        table.add_column(name, justify="right")
    for event in sorted(events, key=lambda e: e.start):
        times = (event.start, event.end, event.end - event.start)
        table.add_row(event.stream, event.what, *(f"{1e3 * t:.3f}" for t in times))
    return table


def _memory(found: Estimate) -> Table:
    table = Table("held", title="held by one rank")
    table.add_column("bytes", justify="right")
    table.add_column("note")
    for row in found.memory:
        host = "; in host memory" if row.on_host else ""
        table.add_row(row.what, readable(row.bytes), row.note + host)
    return table


def _flops(found: Estimate) -> Table:
    table = Table("convention", title="FLOPs of one step")
    table.add_column("FLOPs", justify="right")
    table.add_column("of peak", justify="right")
    table.add_column("what is counted")
    for name, text in CONVENTIONS.items():
        table.add_row(name, count_of(found.flops[name]), f"{100 * found.mfu[name]:.1f} %", text)
    return table
