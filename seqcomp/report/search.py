"""The result of a search as text: the plans, why the first, what the second would change."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from seqcomp.report.estimate import packed_as, seconds_of
from seqcomp.report.text import as_text, readable
from seqcomp.search.diff import Difference
from seqcomp.search.reasons import Alternative, Reason
from seqcomp.search.search import Found

MOST_SHOWN = 3
"""Alternatives to one decision; all of them are in the JSON."""


def search_text(found: Found) -> str:
    """Tables and notes, without the plan itself."""
    return as_text(list(_parts(found)))


def _parts(found: Found) -> Iterator[Table | str]:
    run, counts = found.pricer.run, found.counts
    yield (
        f"{found.pricer.model.name} on {found.gpus} GPUs of {found.pricer.cluster.name}; "
        f"{run.mode}, batch {run.batch} in all, length {run.seq_len}, {run.dtype}{packed_as(run)}"
    )
    sets = "one set" if counts.degrees == 1 else f"{counts.degrees} sets"
    yield (
        f"{found.space} compositions of {sets} of degrees ({counts.unfit} of them "
        f"too large for memory); {counts.priced} estimated, the others cannot be faster"
    )
    yield _ranking(found)
    if found.reasons:
        yield _reasons(found)
    if found.runner_up is not None:
        yield _difference(found.runner_up)
    yield from map(str, found.notes)


def _ranking(found: Found) -> Table:
    table = Table(
        "", "mesh", "layout", "fsdp", "memory", title="the fastest of each set of degrees"
    )
    for name in ("step", "compute", "exposed", "peak of a GPU", "MFU (causal)"):
        table.add_column(name, justify="right")
    for place, item in enumerate(found.ranked, start=1):
        composition, price = item.composition, item.price
        table.add_row(
            str(place),
            " x ".join(f"{axis} {size}" for axis, size in composition.mesh.items()),
            _ring(composition.layout, composition.transport) if "ring" in composition.mesh else "",
            " + ".join(composition.fsdp) + ("" if composition.reshard else " (kept)"),
            _memory(composition.checkpoint, composition.loss_chunks),
            seconds_of(price.step_seconds),
            seconds_of(price.compute_seconds),
            seconds_of(price.exposed_seconds),
            readable(price.peak_bytes),
            f"{price.mfu['causal']:.1%}",
        )
    return table


def _ring(layout: str, transport: str) -> str:
    return layout if transport == "p2p" else f"{layout}, {transport}"


def _memory(checkpoint: str, chunks: int) -> str:
    parts = [] if checkpoint == "none" else [checkpoint]
    return ", ".join([*parts, *([f"{chunks} loss chunks"] if chunks > 1 else [])])


def _reasons(found: Found) -> Table:
    table = Table("decision", "chosen", "instead", title="why: one decision changed at a time")
    for reason in found.reasons:
        table.add_row(reason.decision, reason.chosen, _instead(reason, found))
    return table


def _instead(reason: Reason, found: Found) -> str:
    best = found.best.price
    memory = found.pricer.cluster.device.memory

    def effect(item: Alternative) -> str:
        if not item.fits:
            return f"{item.value}: {readable(item.peak_bytes - memory)} too much"
        return f"{item.value}: {percent(item.step_seconds, best.step_seconds)}"

    shown = [effect(item) for item in reason.instead[:MOST_SHOWN]]
    left = len(reason.instead) - len(shown)
    return "; ".join(shown) + (f"; {left} more" if left else "")


def _difference(difference: Difference) -> Table:
    table = Table("", "best", "second", "change", title="what the second would change")
    for column in table.columns[1:]:
        column.justify = "right"
    for term in difference.terms:
        show = seconds_of if term.unit == "s" else _bytes
        table.add_row(
            term.what,
            *(show(value) for value in (term.before, term.after)),
            percent(term.after, term.before),
        )
    return table


def _bytes(value: float) -> str:
    return readable(round(value))


def percent(value: float, base: float) -> str:
    """Change against `base`."""
    if value == base:
        return "same"
    if base == 0:
        return "new"
    change = value / base - 1
    return f"{change:+.1%}" if abs(change) < 10 else f"x {value / base:.3g}"
