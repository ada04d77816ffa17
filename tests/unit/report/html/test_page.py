"""The page as text: nothing in it but itself, everything escaped, every row of the report."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from seqcomp.report.html.graph import graph_text, standalone
from seqcomp.report.html.markup import Markup, el
from seqcomp.report.html.page import to_html
from seqcomp.report.html.tokens import positions
from seqcomp.report.render import readable
from seqcomp.report.rows import CommRow
from seqcomp.report.timeline import timelines
from tests.fixtures.reports import EVIL, every_strategy, long_ring

VOID = {"meta", "br", "col"}


class Reader(HTMLParser):
    """Collects tags and text, and sees that elements close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data


@pytest.mark.parametrize("report", [every_strategy, long_ring])
def test_a_page_stands_alone(report) -> None:
    page = to_html(report(), title=EVIL)
    found = Reader(page)
    # Nothing is fetched: no address but that of SVG's own names, and a policy that forbids it.
    assert set(re.findall(r"\w+://[^\"'\s)]*", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(", page)
    assert any("default-src 'none'" in (a.get("content") or "") for _, a in found.tags)
    for _, attributes in found.tags:
        assert not {"src", "onclick", "onload"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")
    anchors = {a["href"] for tag, a in found.tags if tag == "a"}
    assert anchors == {f"#{a['id']}" for _, a in found.tags if "id" in a}


def test_what_others_named_is_text() -> None:
    for report in (every_strategy(), long_ring()):
        page = to_html(report, title=EVIL)
        assert sum(tag == "script" for tag, _ in Reader(page).tags) == 1
        assert "<script>alert" not in page
        assert "\x00" not in page
        assert "\u202e" not in page
    shown = Reader(to_html(long_ring())).text
    assert "<script>alert('x')</script>\"&\\u202e\\x00'" in shown


def test_every_row_is_there() -> None:
    report = every_strategy()
    shown = Reader(to_html(report)).text
    for row in report.comm:
        assert f"{row.bytes_sent:,}" in shown
    for line in timelines(report.events):
        for row in (*line.forward, *line.backward):
            assert readable(row.bytes_sent) in shown
    for held in report.footprint:
        assert held.what in shown
        assert f"{held.bytes:,}" in shown
    for finding in report.findings:
        for part in (finding.code, finding.severity, finding.message):
            assert part in shown
    assert report.tokens is not None
    assert len(report.tokens.places) == 8
    for place in report.tokens.places:
        assert all(positions(part) in shown for part in place.ranges)
    for text in ("exposed", "can overlap", "x the mean", "bytes, not time"):
        assert text in shown
    # 8 places of 2 data ranks, all 16 ranks by name.
    lines = re.findall(r"ranks (\d+), (\d+)", shown)
    assert sorted(int(r) for pair in lines for r in pair) == list(range(16))


def test_a_budget() -> None:
    report = every_strategy()
    held = sum(row.bytes for row in report.footprint)
    assert "more than the budget" in to_html(report, budget=held - 1)
    assert "within the budget" in to_html(report, budget=held)
    assert "budget" not in Reader(to_html(report)).text


def test_lengths_are_times_where_they_are_given() -> None:
    def seconds(row: CommRow) -> float:
        return 1.0

    page = to_html(every_strategy(), seconds=seconds)
    assert "The length of a bar is time." in page
    assert "not time" not in page


def test_more_places_than_lines() -> None:
    """Of 128 ranks, those of one ring rank share a line; nothing is lost."""
    report = every_strategy()
    tokens = report.tokens
    assert tokens is not None
    assert tokens.padded is not None
    many = tuple(
        replace(place, ranks=(16 * i + at,), coords=dict(place.coords) | {"ring": i})
        for i in range(16)
        for at, place in enumerate(tokens.places)
    )
    wide = replace(report, tokens=replace(tokens, ring=16, inner=8, places=many))
    shown = Reader(to_html(wide)).text
    assert "A line stands for the 8 places of one ring rank" in shown
    assert len(re.findall(r"ranks \d+ to \d+", shown)) == 16


def test_the_graph_as_a_document_and_as_text() -> None:
    graph = every_strategy().graph
    assert graph is not None
    root = ET.fromstring(standalone(graph, EVIL.replace("\x00", "")))
    boxes = root.findall(".//{*}rect[@rx]")
    assert len([b for b in boxes if "box" in b.attrib["class"]]) == len(graph.regions)
    text = graph_text(graph)
    for region in graph.regions:
        assert region.label in text
    assert "summands over tensor" in text
    assert "dim 1 over ring+ulysses" in text


def test_elements() -> None:
    assert el("p", "a<b", Markup("<br>"), title='"', hidden=True, lang=None) == (
        '<p title="&quot;" hidden>a&lt;b<br></p>'
    )
    assert el("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert positions(range(3, 21, 3)) == "every 3rd from 3 to 18"
    assert positions(range(2048, 4096)) == "2,048 to 4,095"
    assert positions(range(7, 8)) == "7"
