"""The collectives of one layer in the order in which they happen; equal layers together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seqcomp.lowering.regions import block_of
from seqcomp.report.rows import CommRow, Event
from seqcomp.strategies.base import Phase


@dataclass(frozen=True)
class Timeline:
    """What the modules `paths` send, each of them; "" is what is in no layer."""

    paths: tuple[str, ...]
    forward: tuple[CommRow, ...]
    backward: tuple[CommRow, ...]


def timelines(events: Iterable[Event]) -> tuple[Timeline, ...]:
    """One for each kind of layer, in order; what is in no layer last."""
    layers: dict[str, list[Event]] = {}
    for event in events:
        layers.setdefault(_layer(event.row.module), []).append(event)
    outside = layers.pop("", None)
    kinds: dict[object, list[str]] = {}
    for path, own in layers.items():
        alike = tuple((e.row.module.replace(path, ""), *_told(e.row)) for e in own)
        kinds.setdefault(alike, []).append(path)
    found = [
        Timeline(tuple(paths), *(_ordered(layers[paths[0]], p) for p in ("forward", "backward")))
        for paths in kinds.values()
    ]
    if outside:
        phases = (_ordered(outside, phase) for phase in ("forward", "backward"))
        found.append(Timeline(("",), *phases))
    return tuple(found)


def _layer(module: str) -> str:
    return block_of(module.removeprefix("fsdp ")) if module != "fsdp" else ""


def _told(row: CommRow) -> tuple[object, ...]:
    return (row.kind, row.axis, row.count, row.bytes_sent, row.phase, row.overlappable)


def _ordered(events: Sequence[Event], phase: Phase) -> tuple[CommRow, ...]:
    """Operations in their order, or against it; FSDP gathers before them and scatters after."""
    nodes: dict[str, list[CommRow]] = {}
    for event in events:
        if event.row.phase == phase:
            nodes.setdefault(event.node, []).append(event.row)
    around = nodes.pop("", [])
    groups = [_inside(rows, phase) for rows in nodes.values()]
    own = [row for group in (groups if phase == "forward" else groups[::-1]) for row in group]
    before = [row for row in around if row.kind == "all_gather"]
    return (*before, *own, *(row for row in around if row.kind != "all_gather"))


def _inside(rows: list[CommRow], phase: Phase) -> list[CommRow]:
    """Of an attention: Ulysses exchanges heads before the ring turns, and after it."""
    exchanges = [row for row in rows if row.kind == "all_to_all"]
    if len(exchanges) != 2:
        return rows
    first, last = exchanges if phase == "forward" else exchanges[::-1]
    return [first, *(row for row in rows if row.kind != "all_to_all"), last]
