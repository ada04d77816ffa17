"""Places for the boxes of a graph without cycles, layer below layer (Sugiyama et al., 1981).

Edges over several layers get bends in the layers between, so that they go round boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

Point = tuple[float, float]
SWEEPS = 6


@dataclass(frozen=True)
class Box:
    """Size of one node, in units of the picture."""

    width: float
    height: float


@dataclass(frozen=True)
class Drawing:
    """Upper left corners of boxes, and the points of each edge from box to box."""

    corners: Mapping[int, Point]
    paths: Mapping[tuple[int, int], tuple[Point, ...]]
    width: float
    height: float


def layered(
    boxes: Mapping[int, Box],
    edges: Iterable[tuple[int, int]],
    *,
    gap: Point = (28.0, 54.0),
    bend: float = 14.0,
) -> Drawing:
    """gap: between boxes of a layer, and between layers. bend: width kept for an edge."""
    edges = list(edges)
    graph: nx.DiGraph[int] = nx.DiGraph(edges)
    graph.add_nodes_from(boxes)
    if not boxes:
        return Drawing({}, {}, 0.0, 0.0)
    layer = _layers(graph)
    names = itertools.count(max(boxes) + 1)
    routes: dict[tuple[int, int], list[int]] = {}
    links: nx.DiGraph[int] = nx.DiGraph()
    links.add_nodes_from(boxes)
    sizes = dict(boxes)
    for source, target in edges:
        route = [source]
        for between in range(layer[source] + 1, layer[target]):
            name = next(names)
            layer[name], sizes[name] = between, Box(bend, 0.0)
            route.append(name)
        routes[source, target] = [*route, target]
        nx.add_path(links, routes[source, target])
    rows = _ordered(links, layer)
    middles = _middles(links, rows, sizes, gap[0])
    tops, top = [], 0.0
    for row in rows:
        tops.append(top)
        top += max(sizes[n].height for n in row) + gap[1]
    heights = [max(sizes[n].height for n in row) for row in rows]
    left = min(middles[n] - sizes[n].width / 2 for n in sizes)
    width = max(middles[n] + sizes[n].width / 2 for n in sizes) - left

    def points(route: Sequence[int]) -> tuple[Point, ...]:
        first, last = route[0], route[-1]
        found = [(middles[first] - left, tops[layer[first]] + sizes[first].height)]
        for name in route[1:-1]:
            at = tops[layer[name]]
            found += [(middles[name] - left, at), (middles[name] - left, at + heights[layer[name]])]
        return (*found, (middles[last] - left, tops[layer[last]]))

    corners = {n: (middles[n] - left - sizes[n].width / 2, tops[layer[n]]) for n in boxes}
    return Drawing(corners, {e: points(r) for e, r in routes.items()}, width, top - gap[1])


def _layers(graph: nx.DiGraph[int]) -> dict[int, int]:
    """The longest way from a source; what comes before everything moves to where it is used."""
    order = list(nx.topological_sort(graph))
    early: dict[int, int] = {}
    for node in order:
        early[node] = 1 + max((early[p] for p in graph.predecessors(node)), default=-1)
    late: dict[int, int] = {}
    for node in reversed(order):
        users = [late[s] for s in graph.successors(node)]
        late[node] = min(users) - 1 if users else early[node]
    used = {level: i for i, level in enumerate(sorted(set(late.values())))}
    return {node: used[level] for node, level in late.items()}


def _ordered(links: nx.DiGraph[int], layer: Mapping[int, int]) -> list[list[int]]:
    """Each layer from left to right, so that few edges cross: means of neighbours, up and down."""
    rows: list[list[int]] = [[] for _ in range(max(layer[n] for n in links) + 1)]
    for node in sorted(links):
        rows[layer[node]].append(node)
    place = {node: float(i) for row in rows for i, node in enumerate(row)}
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else rows[::-1]:
            near = links.predecessors if down else links.successors
            wanted = {
                node: sum(place[n] for n in around) / len(around) if around else place[node]
                for node in row
                for around in [list(near(node))]
            }
            row.sort(key=lambda node: wanted[node])
            place.update({node: i - (len(row) - 1) / 2 for i, node in enumerate(row)})
    return rows


def _middles(
    links: nx.DiGraph[int], rows: Sequence[Sequence[int]], sizes: Mapping[int, Box], gap: float
) -> dict[int, float]:
    """Horizontal middles: near those of neighbours, none over another."""
    middles: dict[int, float] = {}
    for row in rows:
        at = -sum(sizes[n].width + gap for n in row) / 2
        for node in row:
            middles[node] = at + (sizes[node].width + gap) / 2
            at += sizes[node].width + gap
    for sweep in range(2 * SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wanted = {}
            for node in row:
                around = [*links.predecessors(node), *links.successors(node)]
                wanted[node] = (
                    sum(middles[n] for n in around) / len(around) if around else middles[node]
                )
            middles.update(_apart(row, wanted, sizes, gap))
    return middles


def _apart(
    row: Sequence[int], wanted: Mapping[int, float], sizes: Mapping[int, Box], gap: float
) -> dict[int, float]:
    """The mean of packing from the left and from the right: both keep the order and the gaps."""

    def packed(nodes: Sequence[int], sign: int) -> dict[int, float]:
        found: dict[int, float] = {}
        edge: float | None = None
        for node in nodes:
            half = sizes[node].width / 2
            at = sign * wanted[node]
            at = at if edge is None else max(at, edge + gap + half)
            found[node], edge = sign * at, at + half
        return found

    right, left = packed(row, 1), packed(list(reversed(row)), -1)
    return {node: (right[node] + left[node]) / 2 for node in row}
