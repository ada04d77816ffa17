"""What one layer sends, step by step, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seqcomp.report.html.markup import Markup, el, joined, plural
from seqcomp.report.render import readable
from seqcomp.report.rows import CommRow
from seqcomp.report.timeline import Timeline

Seconds = Callable[[CommRow], float]
WORDS = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all",
    "p2p": "ring exchange", "all_reduce": "all-reduce",
}  # fmt: skip


def timeline_section(timelines: Sequence[Timeline], seconds: Seconds | None = None) -> Markup:
    """seconds: the time of a row, where it is known; lengths are bytes where it is not."""
    lengths = "time" if seconds else "bytes, not time"
    note = (
        f"The length of a bar is {lengths}. Order is that of the forward, and against it in the "
        "backward. A striped bar can overlap with computation that does not need its result; a "
        "filled one is exposed."
    )
    return joined((el("p", note, class_="note"), *(_layer(t, seconds) for t in timelines)))


def _layer(timeline: Timeline, seconds: Seconds | None) -> Markup:
    phases = [
        _phase(name, rows, timeline, seconds)
        for name, rows in (("forward", timeline.forward), ("backward", timeline.backward))
        if rows
    ]
    return el("article", el("h3", _title(timeline.paths)), el("div", *phases, class_="beside"))


def _title(paths: Sequence[str]) -> str:
    if paths == ("",):
        return "Outside of the layers"
    if len(paths) == 1:
        return paths[0]
    shown = ", ".join(paths) if len(paths) < 4 else f"{paths[0]}, {paths[1]} ... {paths[-1]}"
    return f"{shown}: each of {plural(len(paths), 'layer')}"


def _phase(
    name: str, rows: Sequence[CommRow], timeline: Timeline, seconds: Seconds | None
) -> Markup:
    weights = [seconds(row) if seconds else float(row.bytes_sent) for row in rows]
    total, at = sum(weights) or 1.0, 0.0
    lines = []
    for row, weight in zip(rows, weights, strict=True):
        lines.append(_event(row, 100 * at / total, 100 * weight / total, timeline.paths))
        at += weight
    sent = readable(sum(row.bytes_sent for row in rows))
    least = "at most " if any(row.at_most for row in rows) else ""
    return el(
        "section",
        el("h4", f"{name}: {least}{sent} sent by a rank"),
        el("ol", *lines, class_="events"),
    )


def _event(row: CommRow, left: float, wide: float, paths: Sequence[str]) -> Markup:
    times = f" in {row.count}" if row.count > 1 else ""
    size = f"{'at most ' if row.at_most else ''}{readable(row.bytes_sent)}{times}"
    module = row.module.replace(f"{paths[0]}.", "", 1) if paths[0] else row.module
    module = "the layer" if module == paths[0] != "" else module or "the root"
    when = "can overlap" if row.overlappable else "exposed"
    bar = el(
        "i",
        class_=f"{row.kind}" + (" hidden-time" if row.overlappable else ""),
        style=f"left:{left:.3f}%;width:{max(wide, 0.4):.3f}%",
    )
    return el(
        "li",
        el("b", WORDS.get(row.kind, row.kind)),
        el("span", f"over {row.axis}"),
        el("span", size, class_="size"),
        el("span", when, class_="when"),
        el("span", module, class_="where"),
        el("span", bar, class_="track", aria_hidden="true"),
    )
