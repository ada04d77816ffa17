"""Every row of a report, and its findings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from seqcomp.diagnostics import Diagnostic
from seqcomp.report.build import Report
from seqcomp.report.html.markup import Markup, el, joined, plural, table
from seqcomp.report.render import count_of, readable

Rows = Iterable[tuple[str, ...]]


def findings_section(findings: Iterable[Diagnostic]) -> Markup:
    """Those that differ in their places only are one."""
    ordered = sorted(findings, key=lambda d: ("error", "warning", "note").index(d.severity))
    if not ordered:
        return el("p", "None: nothing is degraded.")
    places: dict[Diagnostic, list[str]] = {}
    for item in ordered:
        places.setdefault(replace(item, where=""), []).append(item.where)
    return el("ul", *itertools.starmap(_finding, places.items()), class_="findings")


def _finding(item: Diagnostic, places: list[str]) -> Markup:
    told = [
        (name, _text(value))
        for name, value in (("found", item.found), ("allowed", item.legal), ("fix", item.help))
        if value
    ]
    pairs = [part for name, text in told for part in (el("dt", name), el("dd", text))]
    first, *others = dict.fromkeys(filter(None, places)) or ("",)
    more = [
        el("summary", f"and at {plural(len(others), 'more place')}"),
        el("ul", *(el("li", place) for place in others)),
    ]
    return el(
        "li",
        el("p", el("span", item.severity, class_="severity"), " ", el("b", item.code),
           f" at {first}: " if first else ": ", item.message),
        el("details", *more) if others else "",
        el("dl", *pairs) if pairs else "",
        class_=f"finding is-{item.severity}",
    )  # fmt: skip


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def tables_section(report: Report) -> Markup:
    comm: Rows = (
        (r.module, r.kind, r.axis, r.phase, "yes" if r.overlappable else "no", f"{r.count:,}",
         f"{'at most ' if r.at_most else ''}{r.bytes_sent:,}")
        for r in report.comm
    )  # fmt: skip
    kernels: Rows = (
        (r.module, r.kernel, r.dtype, f"{r.heads} / {r.kv_heads} x {r.head_dim}", r.mask, r.layout,
         r.transport)
        for r in report.kernels
    )  # fmt: skip
    work: Rows = (
        (r.module, r.mask, ", ".join(map(count_of, r.flops)),
         "depends on data" if r.balance is None else f"{r.balance:.6g}")
        for r in report.work
    )  # fmt: skip
    held: Rows = (
        (r.what, f"{'at least ' if r.at_least else ''}{r.bytes:,}", readable(r.bytes),
         "formula" if r.formula else "graph", "host" if r.on_host else "device", r.note)
        for r in report.footprint
    )  # fmt: skip
    return joined(
        (
            _folded("Sent by one rank", len(report.comm), ("module", "collective", "axis", "phase",
                    "can overlap", "calls", "bytes"), comm, c5="number", c6="number"),
            _folded("Attention kernels", len(report.kernels), ("module", "kernel", "dtype",
                    "heads / KV x dim", "mask", "layout", "K/V travel"), kernels),
            _folded("Attention work, forward", len(report.work), ("module", "mask",
                    "FLOPs of each ring rank", "max / mean"), work, c3="number"),
            _folded("Held by one rank", len(report.footprint), ("held", "bytes", "", "from", "in",
                    "note"), held, c1="number", c2="number"),
        )
    )  # fmt: skip


def _folded(caption: str, count: int, head: tuple[str, ...], rows: Rows, **cells: str) -> Markup:
    summary = el("summary", f"{caption} ({plural(count, 'row')})")
    return el("details", summary, table(caption, head, rows, **cells))
