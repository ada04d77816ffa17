"""Attention's work: which tiles each ring rank computes, in which step, and how even that is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from seqcomp.report.attention import CONVENTION, WorkRow
from seqcomp.report.html.markup import Markup, el, joined, percent, plural, table
from seqcomp.report.render import count_of, pattern
from seqcomp.report.tiles import EMPTY, FULL, LOWER, PARTIAL, PARTS, UNKNOWN, UPPER, TileGrid

MOST_LABELS = 16
"""Blocks along a side up to which cells say their step."""
MOST_RANKS = 64
SIZE = 320.0
LEFT, TOP = 44.0, 22.0
NAMES = {
    FULL: "full: every query sees every key",
    LOWER: "partial: a query sees the keys before it",
    UPPER: "partial: a query sees the keys after it, as at the far edge of a window",
    PARTIAL: "partial: some pairs in another pattern",
    EMPTY: "empty: skipped",
    UNKNOWN: "at most: the data of a call decides",
}


def tiles_section(grids: Sequence[TileGrid], work: Sequence[WorkRow]) -> Markup:
    rows = {row.module: row for row in work}
    parts = [_grid(grid, rows.get(grid.modules[0])) for grid in grids]
    return joined((*parts, el("p", f"{CONVENTION}.", class_="note")))


def _grid(grid: TileGrid, row: WorkRow | None) -> Markup:
    where = ", ".join(dict.fromkeys(map(pattern, grid.modules)))
    title = f"{grid.mask} attention of {where}"
    count = plural(len(grid.modules), "layer")
    parts: list[str] = [el("h3", title), el("p", f"{count}. ", *_balance(grid, row))]
    if grid.ring == 1:
        parts.append(el("p", _alone(grid)))
    else:
        parts.append(el("div", _picture(grid, title), _bars(grid, row), class_="beside"))
        parts.append(_schedule(grid))
    return el("article", *parts)


def _alone(grid: TileGrid) -> str:
    if grid.divided:
        return "No ring: a rank computes its heads on the whole sequence, in one tile."
    return "Not divided over the sequence: a rank computes on all of it, in one tile."


def _balance(grid: TileGrid, row: WorkRow | None) -> tuple[str, ...]:
    if row is None:
        return ()
    if row.balance is None:
        return ("How much of it is computed, and how evenly, depends on the data of a call.",)
    busiest = f"The busiest rank has {row.balance:.4g} x the mean"
    return (f"{busiest}: {count_of(max(row.flops))} of {count_of(row.mean)} FLOPs forward.",)


def _picture(grid: TileGrid, title: str) -> Markup:
    """Queries from top to bottom, keys from left to right; in the order of the sequence, each as
    large as the tokens are many."""
    striped = grid.layout == "striped"
    rows, columns = (
        sorted(range(len(b)), key=lambda i: 0 if striped else b[i][1].start)
        for b in (grid.blocks, grid.keys)
    )
    down = _edges([len(grid.blocks[q][1]) for q in rows])
    right = _edges([len(grid.keys[k][1]) for k in columns])
    labels = max(len(rows), len(columns)) <= MOST_LABELS
    cells = [
        _cell(kind, LEFT + right[x], TOP + down[y], right[x + count] - right[x],
              down[y + 1] - down[y], label)
        for y, q in enumerate(rows)
        for x, count, kind, label in _runs(grid, q, columns, labels)
    ]  # fmt: skip
    every = -(-len(rows) // MOST_LABELS)
    names = [
        el("text", f"rank {grid.blocks[q][0]}", x=LEFT - 5,
           y=TOP + (down[y] + down[y + 1]) / 2 + 3.5, text_anchor="end", class_="name")
        for y, q in enumerate(rows) if y % every == 0
    ]  # fmt: skip
    what = "stripe of each rank" if striped else "position"
    head = el("text", f"keys by {what} →", x=LEFT, y=TOP - 8, class_="name")
    seen = [k for k in NAMES if any(k in line for line in grid.kinds)]
    frame = el("rect", x=LEFT, y=TOP, width=SIZE, height=SIZE, class_="cell")
    picture = el(
        "svg", frame, *cells, *names, head,
        viewBox=f"0 0 {LEFT + SIZE + 2:g} {TOP + SIZE + 2:g}", role="img", class_="grid",
        aria_label=f"tiles of the {title}: queries by {what} from top to bottom, keys from left to "
        "right. The table of steps says the same in words.",
    )  # fmt: skip
    legend = el(
        "ul",
        *(
            el("li", el("svg", _cell(k, 1, 1, 14, 14, ""), viewBox="0 0 16 16", class_="key",
                        aria_hidden="true"), NAMES[k])
            for k in seen
        ),
        class_="legend",
    )  # fmt: skip
    note = " The number is the step of the ring in which the rank computes it." if labels else ""
    return el(
        "figure", picture, el("figcaption", f"Rows are queries and who has them.{note}"), legend
    )


def _edges(sizes: Sequence[int]) -> list[float]:
    """Where pieces of these sizes begin along a side, and where the last one ends."""
    total = sum(sizes)
    return [SIZE * at / total for at in itertools.accumulate(sizes, initial=0)]


def _runs(
    grid: TileGrid, q: int, columns: Sequence[int], labels: bool
) -> Iterator[tuple[int, int, str, str]]:
    """(place, length, kind, step) along one row; equal neighbours are one where none is named."""
    step_of = {offset: str(step) for step, offset in enumerate(grid.steps)}
    if labels:
        for x, k in enumerate(columns):
            kind, distance = grid.kinds[q][k], grid.blocks[q][0] - grid.keys[k][0]
            label = step_of.get(distance % grid.ring, "") if kind != EMPTY else ""
            yield x, 1, kind, label
        return
    x = 0
    for kind, run in itertools.groupby(grid.kinds[q][k] for k in columns):
        count = len(list(run))
        if kind == EMPTY:
            x += count
            continue
        pieces = range(x, x + count) if kind in PARTS else (x,)
        for at in pieces:
            yield at, 1 if kind in PARTS else count, kind, ""
        x += count


def _cell(kind: str, x: float, y: float, wide: float, high: float, label: str) -> Markup:
    name = {FULL: "full", EMPTY: "empty", UNKNOWN: "unknown"}.get(kind, "partial")
    parts = [el("rect", x=x, y=y, width=wide, height=high, class_=f"cell {name}")]
    side = min(wide, high)
    ends = {
        LOWER: ((0, 0), (0, 1), (1, 1)),
        UPPER: ((1 - side / wide, 0), (1, 0), (1, side / high)),
        PARTIAL: ((0, 0), (0.3, 0), (1, 0.7), (1, 1), (0.7, 1), (0, 0.3)),
    }.get(kind)
    if ends:
        points = " ".join(f"{x + wide * right:g},{y + high * down:g}" for right, down in ends)
        parts.append(el("polygon", points=points, class_="seen"))
    if label:
        middle = {"x": x + wide / 2, "y": y + high / 2 + 3.8}
        parts.append(el("text", label, **middle, text_anchor="middle", class_="step"))
    return el("g", *parts)


def _bars(grid: TileGrid, row: WorkRow | None) -> Markup:
    """Visible pairs of each ring rank beside the busiest."""
    pairs = [sum(areas) for areas in grid.areas]
    mean, most = sum(pairs) / len(pairs), max(pairs)
    if len(pairs) > MOST_RANKS or not most:
        least = f"{count_of(min(pairs))} to {count_of(most)} visible pairs a rank"
        return el("p", f"{plural(len(pairs), 'ring rank')}: {least}.")
    most_text = "at most " if row is not None and row.at_most else ""
    lines = [
        el(
            "li",
            el("span", f"ring rank {rank}", class_="who"),
            el("span", el("i", style=f"width:{100 * n / most:.3f}%"), class_="bar work",
               aria_hidden="true"),
            el("span", f"{most_text}{count_of(n)} pairs, {percent(n / mean)}"),
        )
        for rank, n in enumerate(pairs)
    ]  # fmt: skip
    head = "Visible pairs of each ring rank, and percent of the mean"
    bars = el("ol", *lines, class_="bars", aria_label=head)
    if len(pairs) > MOST_LABELS:
        spread = f"{percent(min(pairs) / mean)} to {percent(most / mean)}"
        return el("details", el("summary", f"{head}: {spread}"), bars)
    return el("div", el("p", f"{head}:", class_="note"), bars)


def _schedule(grid: TileGrid) -> Markup:
    """Who computes with whose keys in which step."""
    how = {
        "p2p": "the keys of one step travel while the step before is computed",
        "allgather": "all keys arrive in one all-gather before the first step",
    }[grid.transport]
    if len(grid.steps) < grid.ring:
        how += "; only keys that some query sees travel"
    if grid.ring > MOST_LABELS:
        return _steps(grid, how)
    head = ["ring rank", *(f"step {t}" for t in range(len(grid.steps)))]
    rows = [
        [str(rank), *(_part(grid, rank, (rank - offset) % grid.ring) for offset in grid.steps)]
        for rank in range(grid.ring)
    ]
    caption = "Steps: whose keys, and how much of the rank's work"
    content = table(caption, head, rows)
    return el("details", el("summary", f"{caption} ({how})"), content)


def _part(grid: TileGrid, rank: int, source: int) -> str:
    total, own = sum(grid.areas[rank]), grid.areas[rank][source]
    if not own:
        return f"{source}: empty"
    lines = [line for line, (r, _) in zip(grid.kinds, grid.blocks, strict=True) if r == rank]
    kinds = {k for line in lines for k, (r, _) in zip(line, grid.keys, strict=True) if r == source}
    kind = "full" if kinds == {FULL} else "at most" if kinds == {UNKNOWN} else "partial"
    return f"{source}: {kind}, {percent(own / total)}"


def _steps(grid: TileGrid, how: str) -> Markup:
    rows = []
    for step, offset in enumerate(grid.steps):
        pairs = [grid.areas[r][(r - offset) % grid.ring] for r in range(grid.ring)]
        idle = sum(not n for n in pairs)
        rows.append(
            [str(step), f"rank - {offset}" if offset else "its own", count_of(min(pairs)),
             count_of(max(pairs)), str(idle)]
        )  # fmt: skip
    caption = "Steps: visible pairs of all ring ranks"
    head = ("step", "keys of", "fewest pairs", "most pairs", "ranks without any")
    return el(
        "details",
        el("summary", f"{caption} ({how})"),
        table(caption, head, rows, c2="number", c3="number", c4="number"),
    )
