"""What one rank holds, beside a budget."""

from __future__ import annotations

from collections.abc import Sequence

from seqcomp.report.footprint import FootprintRow
from seqcomp.report.html.markup import Markup, el, joined, percent
from seqcomp.report.render import memory_line, readable
from seqcomp.report.storages import MemoryRow

HUES = 8


def memory_section(
    rows: Sequence[FootprintRow], options: Sequence[MemoryRow], budget: int | None
) -> Markup:
    """budget: bytes of one rank."""
    on_device = [row for row in rows if not row.on_host]
    total = sum(row.bytes for row in on_device)
    scale = max(total, budget or 0, 1)
    least = "at least " if any(row.at_least for row in rows) else ""
    sentence = f"All rows together are {least}{readable(total)} on the device of a rank"
    if budget:
        room = "within" if total <= budget else "more than"
        sentence += f", {room} the budget of {readable(budget)} ({percent(total / budget)} of it)"
    note = (
        "The largest rank where ranks differ. Rows may share tensors (logits that are saved, and "
        "outputs), so that the sum counts some twice; work space of kernels and buffers of "
        "collectives are not in it."
    )
    pieces = [
        el(
            "i",
            class_=f"piece rank{i % HUES}",
            style=f"width:{100 * row.bytes / scale:.3f}%",
        )
        for i, row in enumerate(on_device)
    ]
    mark = (
        el("i", class_="budget", style=f"left:{min(100 * budget / scale, 100):.3f}%")
        if budget
        else ""
    )
    text = "; ".join(f"{row.what} {readable(row.bytes)}" for row in on_device)
    bar = el(
        "div", *pieces, mark, class_="strip stack", role="img", aria_label=f"{sentence}: {text}"
    )
    lines = [_row(row, i, scale) for i, row in enumerate([*on_device, *_rest(rows)])]
    return joined(
        (
            el("p", f"{sentence}."),
            bar,
            el("ol", *lines, class_="bars memory", aria_label="what one rank holds"),
            *(el("p", memory_line(option)) for option in options),
            el("p", note, class_="note"),
        )
    )


def _rest(rows: Sequence[FootprintRow]) -> list[FootprintRow]:
    return [row for row in rows if row.on_host]


def _row(row: FootprintRow, index: int, scale: int) -> Markup:
    least = "at least " if row.at_least else ""
    where = "in host memory; " if row.on_host else ""
    source = "by formula" if row.formula else "from the graph"
    own = el("i", class_=f"rank{index % HUES}", style=f"width:{100 * row.bytes / scale:.3f}%")
    return el(
        "li",
        el("span", row.what, class_="who"),
        el("span", own, class_="bar", aria_hidden="true"),
        el("span", el("b", f"{least}{readable(row.bytes)}"), f" {where}{source}",
           f" ({row.note})" if row.note else ""),
    )  # fmt: skip
