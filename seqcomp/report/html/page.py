"""The page: a summary, its sections, and a list of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.resources import files

from seqcomp.report.build import Report
from seqcomp.report.html.graph import graph_section
from seqcomp.report.html.markup import Markup, el
from seqcomp.report.html.memory import memory_section
from seqcomp.report.html.tables import findings_section, tables_section
from seqcomp.report.html.tiles import tiles_section
from seqcomp.report.html.timeline import Seconds, timeline_section
from seqcomp.report.html.tokens import tokens_section
from seqcomp.report.render import readable
from seqcomp.report.timeline import timelines

# Whatever a page is made to hold, it loads nothing and sends nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def to_html(
    report: Report, *, title: str = "", budget: int | None = None, seconds: Seconds | None = None
) -> str:
    """One page that needs no network and no other file.

    Args:
        title: what was explained, such as the plan and the model.
        budget: memory of one rank in bytes, drawn beside what a rank holds.
        seconds: the time of a row of `report.comm`, where it is known; bars of the timeline are
            as long as bytes otherwise.
    """
    heading = title or f"program {report.program}"
    parts = list(_sections(report, budget, seconds))
    sections = [
        el("section", el("h2", name, id=anchor), content, aria_labelledby=anchor)
        for anchor, name, content in parts
    ]
    contents = [el("li", el("a", name, href=f"#{anchor}")) for anchor, name, _ in parts]
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="generator", content="seqcomp"),
        el("title", f"seqcomp: {heading}"),
        el("style", Markup(_file("page.css") + _file("graph.css"))),
    )
    body = el(
        "body",
        el("a", "Skip to the contents", href="#main", class_="skip"),
        el("header", el("p", "seqcomp explain", class_="brand"), el("h1", heading),
           el("p", *_subtitle(report))),
        el("nav", el("ul", *contents), aria_label="sections"),
        el("main", _summary(report), *sections, id="main"),
        el("script", Markup(_file("page.js"))),
    )  # fmt: skip
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _file(name: str) -> str:
    return files("seqcomp.report.html").joinpath(name).read_text(encoding="utf-8")


def _subtitle(report: Report) -> Iterator[str]:
    axes = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    yield f"{math.prod(report.mesh.values()):,} ranks = {axes}"
    if report.batch is not None:
        yield f"; {report.batch:,} in the batch of a data rank"
    if report.length is not None:
        yield f"; {report.length:,} tokens each"
    if report.documents is not None:
        yield f", in documents of {report.documents[:100]}"
    yield ". What one training step does on a rank, from the lowered graph; nothing was run."


def _sections(
    report: Report, budget: int | None, seconds: Seconds | None
) -> Iterator[tuple[str, str, Markup]]:
    yield "findings", "Findings", findings_section(report.findings)
    if report.tokens is not None:
        yield "tokens", "Mesh and tokens", tokens_section(report.tokens, report.mesh, report.length)
    if report.tiles:
        yield "attention", "Attention work", tiles_section(report.tiles, report.work)
    if report.events:
        content = timeline_section(timelines(report.events), seconds)
        yield "timeline", "Communication in order", content
    if report.footprint:
        yield "memory", "Memory of a rank", memory_section(report.footprint, report.memory, budget)
    if report.graph is not None:
        yield "graph", "Regions", graph_section(report.graph)
    yield "rows", "All rows", tables_section(report)


def _summary(report: Report) -> Markup:
    """The figures that one looks for first."""
    most = "at most " if any(row.at_most for row in report.comm) else ""
    tiles = [
        ("sent forward", f"{most}{readable(report.bytes_sent('forward'))}", "by a rank"),
        ("sent backward", f"{most}{readable(report.bytes_sent('backward'))}", "by a rank"),
    ]
    if report.tokens is not None and report.tokens.padded is not None:
        each = report.tokens.padded // len(report.tokens.places)
        tiles.insert(0, ("tokens", f"{each:,}", "of a sequence on a rank"))
    if report.footprint:
        held = sum(row.bytes for row in report.footprint if not row.on_host)
        tiles.append(("held", readable(held), "by a rank, all rows"))
    balances = [row.balance for row in report.work if row.balance is not None]
    if balances:
        tiles.append(("attention balance", f"{max(balances):.4g}", "busiest over mean"))
    counts = [
        f"{n} {severity}{'s' if n > 1 else ''}"
        for severity in ("error", "warning", "note")
        if (n := sum(f.severity == severity for f in report.findings))
    ]
    tiles.append(("findings", str(len(report.findings)), ", ".join(counts) or "nothing degraded"))
    pairs = [
        el("div", el("dt", name), el("dd", value), el("dd", what, class_="note"))
        for name, value, what in tiles
    ]
    return el("dl", *pairs, class_="summary")
