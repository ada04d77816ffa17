"""The regions of a program as a picture, and the same in words."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files

from seqcomp.report.graph import Flow, Region, Regions
from seqcomp.report.html.markup import Markup, clean, el, joined, plural, scrolled
from seqcomp.report.layered import Box, Drawing, Point, layered
from seqcomp.report.render import readable

WIDTH, LINE, PAD = 236.0, 15.0, 9.0
LETTERS, BOLD = 34, 31
"""Letters of one line of a box, and of its first."""
MARGIN = 12.0
TAG = 14.0
"""Height of what an edge carries."""
FRAME = 16.0
"""Room above for the name of a frame."""


def graph_section(graph: Regions) -> Markup:
    picture = scrolled("the graph of regions", graph_svg(graph))
    listed = el("ol", *_sentences(graph), class_="sentences")
    return joined(
        (
            el("p", *_lead(graph)),
            picture,
            el("details", el("summary", "The same in words"), listed),
        )
    )


def standalone(graph: Regions, title: str) -> str:
    """An SVG document."""
    style = files("seqcomp.report.html").joinpath("graph.css").read_text(encoding="utf-8")
    return f"{graph_svg(graph, title=title, style=Markup(style))}\n"


def graph_text(graph: Regions) -> str:
    """One line for each region and for what it gives."""
    names = {r.id: r for r in graph.regions}
    lines = []
    for region in graph.regions:
        lines.append(f"{region.id:>3}  {_title(region)}  {_where(region)}{_sends(region)}".rstrip())
        lines += [
            f"       -> {f.target} {names[f.target].label}: {readable(f.bytes)}; "
            + _counted(f.values)
            for f in graph.flows
            if f.source == region.id
        ]
    return clean("\n".join(lines))


def _lead(graph: Regions) -> Iterable[str]:
    yield (
        "Local work in boxes, redistributions in rounded ones, from top to bottom as in the "
        "forward; what they send is said for forward and backward. At the edges: where a value "
        "lives (S(1) ring: dim 1 is cut over ring; P: summands; whole) and its bytes on one rank."
    )
    for paths in graph.repeats:
        yield f" {paths[0]} stands for {plural(len(paths), 'equal block')}."


def graph_svg(graph: Regions, *, title: str = "", style: Markup | None = None) -> Markup:
    """The picture; `title` and `style` where it stands alone."""
    lines = {r.id: _lines(r) for r in graph.regions}
    boxes = {i: Box(WIDTH, 2 * PAD + LINE * len(text) - 3) for i, text in lines.items()}
    drawn = layered(boxes, [(f.source, f.target) for f in graph.flows])
    tags = list(_tags(graph, drawn))
    left = max([0.0, *(tag.half - tag.x for tag in tags)]) + MARGIN
    right = max([drawn.width, *(tag.x + tag.half for tag in tags)]) + MARGIN
    wide, high = left + right, drawn.height + 2 * MARGIN + FRAME
    content = [
        _frames(graph, drawn, boxes),
        *(_arrow(flow, drawn.paths[flow.source, flow.target]) for flow in graph.flows),
        *(_box(r, lines[r.id], drawn.corners[r.id], boxes[r.id]) for r in graph.regions),
        *map(_label, tags),
    ]
    head = [el("title", title)] if title else []
    head += [el("style", style)] if style else []
    paper = [el("rect", width=wide, height=high, class_="paper")] if style else []
    counted = f"{plural(len(graph.regions), 'region')}, {plural(len(graph.flows), 'edge')}"
    return el(
        "svg", *head, *paper,
        el("g", *content, transform=f"translate({left:.1f} {MARGIN + FRAME:g})"),
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {wide:g} {high:g}", width=wide,
        height=high, class_="graph", role="img",
        aria_label=f"graph of {counted}" + ("" if style else "; the list below has the same"),
    )  # fmt: skip


def _lines(region: Region) -> list[str]:
    where = _where(region)
    lines = textwrap.wrap(_title(region), BOLD, max_lines=2, placeholder="…")
    if where:
        lines.append(_short(where, LETTERS))
    if region.forward or region.backward:
        lines.append(f"sends {readable(region.forward)} / {readable(region.backward)} back")
    return lines


def _title(region: Region) -> str:
    many = f" x {region.times}" if region.times > 1 else ""
    plain = region.label == "local work"
    counted = f", {plural(region.ops, 'operation')}" if plain else ""
    return f"{region.label}{counted}{many}"


def _where(region: Region) -> str:
    """Modules without the block that they share."""
    if region.kind in ("input", "output"):
        return ""
    prefix = f"{region.block}."
    own = [m.removeprefix(prefix) for m in region.modules if m]
    last = list(dict.fromkeys(m for m in own if not any(o.startswith(f"{m}.") for o in own)))
    return ", ".join(last)


def _sends(region: Region) -> str:
    if not (region.forward or region.backward):
        return ""
    return f"  sends {readable(region.forward)} forward, {readable(region.backward)} backward"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _box(region: Region, lines: list[str], corner: Point, box: Box) -> Markup:
    x, y = corner
    bold = len(lines) - bool(_where(region)) - bool(region.forward or region.backward)
    texts = [
        el(
            "text",
            line,
            x=x + PAD,
            y=y + PAD + LINE * (i + 1) - 6,
            class_="head" if i < bold else None,
        )
        for i, line in enumerate(lines)
    ]
    return el(
        "g",
        el("title", f"{_title(region)}: {', '.join(m or 'the root' for m in region.modules)}"),
        el("rect", x=x, y=y, width=box.width, height=box.height, class_=f"box {region.kind}",
           rx=0 if region.kind == "work" else 12),
        *texts,
    )  # fmt: skip


def _arrow(flow: Flow, points: tuple[Point, ...]) -> Markup:
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        half = (y0 + y1) / 2
        straight = abs(x0 - x1) < 0.5
        path += (
            f"L{x1:.1f} {y1:.1f}"
            if straight
            else f"C{x0:.1f} {half:.1f} {x1:.1f} {half:.1f} {x1:.1f} {y1:.1f}"
        )
    x, y = points[-1]
    tip = f"M{x - 4:.1f} {y - 7:.1f}L{x:.1f} {y:.1f}L{x + 4:.1f} {y - 7:.1f}"
    return el("path", d=path + tip, class_="arrow")


@dataclass(frozen=True)
class _Tag:
    """What an edge carries, with the middle of its place and half its width."""

    flow: Flow
    text: str
    x: float
    y: float
    half: float

    def hits(self, other: _Tag) -> bool:
        near = abs(self.x - other.x) < self.half + other.half
        return near and abs(self.y - other.y) < TAG


def _tags(graph: Regions, drawn: Drawing) -> Iterator[_Tag]:
    """At the middle of the first part of each edge; side by side, or one over the other."""
    taken: list[_Tag] = []
    for flow in graph.flows:
        (x0, y0), (x1, y1) = drawn.paths[flow.source, flow.target][:2]
        text = _carried(flow)
        tags = [
            _Tag(flow, text, (x0 + x1) / 2, (y0 + y1) / 2 + TAG * row, 2.8 * len(text) + 5)
            for row in (0, -1, 1)
        ]
        taken.append(next((t for t in tags if not any(map(t.hits, taken))), tags[0]))
        yield taken[-1]


def _label(tag: _Tag) -> Markup:
    return el(
        "g",
        el("title", _counted(tag.flow.values)),
        el("rect", x=tag.x - tag.half, y=tag.y - TAG / 2, width=2 * tag.half, height=TAG,
           class_="tag"),
        el("text", tag.text, x=tag.x, y=tag.y + 3.6, text_anchor="middle", class_="flow"),
    )  # fmt: skip


def _counted(values: Iterable[str]) -> str:
    """Equal ones once, with their number."""
    counts = Counter(values)
    return "; ".join(text + (f" ({n} times)" if n > 1 else "") for text, n in counts.items())


def _carried(flow: Flow) -> str:
    first = flow.values[0].split(": ")[-1] if flow.values else ""
    first = re.sub(r"dim (\d+) over ", r"S(\1) ", first).replace("summands over ", "P ")
    more = f" (+{len(flow.values) - 1})" if len(flow.values) > 1 else ""
    return ", ".join(filter(None, (f"{first}{more}", readable(flow.bytes))))


def _frames(graph: Regions, drawn: Drawing, boxes: dict[int, Box]) -> Markup:
    """A frame round each block whose regions stand together."""
    blocks: dict[str, list[int]] = {}
    for region in graph.regions:
        if region.block:
            blocks.setdefault(region.block, []).append(region.id)
    frames = []
    for block, members in blocks.items():
        (x0, y0), (x1, y1) = _around(members, drawn, boxes)
        others = [r.id for r in graph.regions if r.id not in members]
        if any(_overlaps((x0, y0, x1, y1), i, drawn, boxes) for i in others):
            continue
        times = next(r.times for r in graph.regions if r.id == members[0])
        name = f"{block} x {times}" if times > 1 else block
        frames.append(
            el("rect", x=x0 - 8, y=y0 - 20, width=x1 - x0 + 16, height=y1 - y0 + 28,
               class_="block", rx=6)
        )  # fmt: skip
        frames.append(el("text", clean(name), x=x0, y=y0 - 7, class_="head"))
    return el("g", *frames)


def _around(members: list[int], drawn: Drawing, boxes: dict[int, Box]) -> tuple[Point, Point]:
    corners = [drawn.corners[i] for i in members]
    ends = [
        (drawn.corners[i][0] + boxes[i].width, drawn.corners[i][1] + boxes[i].height)
        for i in members
    ]
    return (
        (min(x for x, _ in corners), min(y for _, y in corners)),
        (max(x for x, _ in ends), max(y for _, y in ends)),
    )


def _overlaps(
    frame: tuple[float, float, float, float], index: int, drawn: Drawing, boxes: dict[int, Box]
) -> bool:
    (x, y), box = drawn.corners[index], boxes[index]
    x0, y0, x1, y1 = frame
    return x < x1 + 8 and x + box.width > x0 - 8 and y < y1 + 8 and y + box.height > y0 - 20


def _sentences(graph: Regions) -> Iterable[Markup]:
    names = {r.id: r for r in graph.regions}
    for region in graph.regions:
        given = [
            el("li", f"to {_title(names[f.target])}: {_counted(f.values)}, {readable(f.bytes)}")
            for f in graph.flows
            if f.source == region.id
        ]
        where = _where(region)
        yield el(
            "li",
            el("b", _title(region)),
            f" in {where}" if where else "",
            _sends(region),
            el("ul", *given) if given else "",
        )
