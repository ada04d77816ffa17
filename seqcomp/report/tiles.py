"""Which pairs of blocks each ring rank computes, and in which step of the ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from seqcomp.capture.facts import mask_name
from seqcomp.layout.intervals import visible_area
from seqcomp.layout.masks import Band, Full, Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import travel_of
from seqcomp.lowering import ops
from seqcomp.lowering.program import Program

EMPTY, FULL, LOWER, UPPER, PARTIAL, UNKNOWN = ".", "#", "L", "U", "/", "?"
"""Kinds of tiles: no pair is seen; all; some, with the last query and the first key but not the
first query and the last key (LOWER), or the other way round (UPPER), or else (PARTIAL); the data of
a call decides."""
PARTS = (LOWER, UPPER, PARTIAL)
"""Kinds of which some pairs are seen."""


@dataclass(frozen=True)
class TileGrid:
    """The attention of `modules`: its tiles on `ring` ranks.

    `blocks`: the ring rank and the positions of each block of queries, rank by rank; those of keys
    likewise (`keys`). `kinds`: for each block of queries a letter for each block of keys. `areas`:
    for each rank the visible pairs of its queries with the keys of each rank. `steps`: in step t a
    rank computes with the keys of rank - steps[t]; what is in no step nobody needs.
    `divided`: False where one rank computes with the whole sequence.
    """

    modules: tuple[str, ...]
    mask: str
    ring: int
    layout: str
    blocks: tuple[tuple[int, range], ...]
    keys: tuple[tuple[int, range], ...]
    kinds: tuple[str, ...]
    areas: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    transport: str
    divided: bool = True

    def to_json(self) -> dict[str, Any]:
        def listed(blocks: tuple[tuple[int, range], ...]) -> list[dict[str, Any]]:
            return [{"rank": r, "range": [p.start, p.stop, p.step]} for r, p in blocks]

        return {
            "modules": list(self.modules),
            "mask": self.mask,
            "ring": self.ring,
            "layout": self.layout,
            "blocks": listed(self.blocks),
            "keys": listed(self.keys),
            "kinds": list(self.kinds),
            "areas": [list(row) for row in self.areas],
            "steps": list(self.steps),
            "transport": self.transport,
            "divided": self.divided,
        }


def tile_grids(program: Program, values: Mapping[Node, Any], ulysses: int) -> tuple[TileGrid, ...]:
    """One grid for all attentions that have the same; `ulysses`: ranks between which heads go."""
    found: dict[Any, list[str]] = {}
    for node in program.flat.nodes:
        info = node.meta.get("attention")
        if info is None:
            continue
        q, k = [values[x] for x in node.args if isinstance(x, Node)][:2]
        op = node.target if isinstance(node.target, ops.Attention) else None
        divided = op is not None and not op.whole
        layout = program.layout if divided else SequenceLayout("contiguous")
        parts = layout.ring * (ulysses if divided else 1)
        transport = op.transport if op is not None and divided and layout.ring > 1 else "none"
        sizes = (q.shape[2] * parts, k.shape[2] * parts)
        key = (info.mask, mask_name(info), layout, *sizes, transport, divided)
        found.setdefault(key, []).append(info.where)
    return tuple(_grid(tuple(modules), *key) for key, modules in found.items())


def _grid(
    modules: tuple[str, ...],
    mask: Mask | None,
    name: str,
    layout: SequenceLayout,
    queries: int,
    keys: int,
    transport: str,
    divided: bool,
) -> TileGrid:
    rule, ring = mask or Full(), layout.ring
    ranks = range(ring)
    rows = [(r, part) for r in ranks for part in layout.ring_ranges(queries, r)]
    columns = [(r, part) for r in ranks for part in layout.ring_ranges(keys, r)]
    kinds, areas = [], [[0] * ring for _ in ranks]
    for rank, q in rows:
        line = ""
        for source, k in columns:
            area = visible_area(rule, (q,), (k,))
            areas[rank][source] += area
            line += UNKNOWN if mask is None else _kind(rule, q, k, area)
        kinds.append(line)
    travel = travel_of(rule, layout, keys) if queries == keys else None
    return TileGrid(
        modules=modules,
        mask=_text(name, mask),
        ring=ring,
        layout=layout.kind,
        blocks=tuple(rows),
        keys=tuple(columns),
        kinds=tuple(kinds),
        areas=tuple(map(tuple, areas)),
        steps=tuple(ranks) if travel is None else (0, *travel.steps),
        transport=transport,
        divided=divided,
    )


def _kind(mask: Mask, q: range, k: range, area: int) -> str:
    if area in (0, len(q) * len(k)):
        return FULL if area else EMPTY
    lower, upper = (bool(mask.visible(i, j)) for i, j in ((q[-1], k[0]), (q[0], k[-1])))
    return PARTIAL if lower == upper else LOWER if lower else UPPER


def _text(name: str, mask: Mask | None) -> str:
    if isinstance(mask, Band) and mask.low == 0:
        return f"window of {mask.high + 1}"
    return name
