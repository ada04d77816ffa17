"""The page in a browser: nothing is wider than it, hard to read, or wrong in its console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seqcomp.report.build import Report
from tests.fixtures.browser import REASON, browser, measured
from tests.fixtures.reports import every_strategy, long_ring

pytestmark = pytest.mark.skipif(browser() is None, reason=REASON)
BAD = "<body style='background:#888;color:#666'><p style='width:3000px'>gray<svg role=img></svg>"
PAGES = [(every_strategy, 400), (every_strategy, 1600), (long_ring, 400), (long_ring, 1600)]


@pytest.fixture(scope="module", params=["light", "dark"])
def seen(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("pages")
    shown = [(report().to_html(budget=1 << 20), width) for report, width in PAGES]
    return request.param, *measured([*shown, (BAD, 400)], folder, dark=request.param == "dark")


def test_the_page(seen: Any) -> None:
    scheme, (*pages, bad), console = seen
    assert [line for line in console if "the probe ran" not in line] == []
    assert len(console) == 1
    for (report, width), page in zip(PAGES, pages, strict=True):
        assert page["dark"] == (scheme == "dark")
        assert width - 20 <= page["wide"] <= width
        assert page["needed"] <= page["wide"]
        assert page["texts"] > 100
        assert page["worst"][0][0] >= 4.5, page["worst"]
        assert (page["unnamed"], page["unreachable"], page["twice"]) == (0, 0, 0)
        assert page["elements"] == "1:0"
        said_in(page["text"], report())
    assert bad["needed"] > bad["wide"]
    assert bad["worst"][0][0] < 2
    assert bad["unnamed"] == 1


def said_in(text: str, report: Report) -> None:
    """Every place and every finding is in the page as a browser reads it."""
    assert report.tokens is not None
    for place in report.tokens.places:
        first = place.ranges[0]
        assert f"{first.start:,} to {first[-1]:,}" in text
        assert f"rank{'s' if len(place.ranks) > 1 else ''} {place.ranks[0]}" in text
    for finding in report.findings:
        assert finding.code in text
        assert finding.message in text
