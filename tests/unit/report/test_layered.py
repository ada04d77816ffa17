"""Places of boxes: none over another, edges go down."""

from __future__ import annotations

import itertools
import random

from seqcomp.report.layered import Box, layered


def overlap(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return (
        first[0] < second[2] and second[0] < first[2]
        and first[1] < second[3] and second[1] < first[3]
    )  # fmt: skip


def test_random_graphs() -> None:
    draw = random.Random(0)
    for _ in range(20):
        count = draw.randint(1, 25)
        boxes = {i: Box(draw.uniform(10, 200), draw.uniform(10, 60)) for i in range(count)}
        pairs = itertools.combinations(range(count), 2)
        edges = [pair for pair in pairs if draw.random() < 0.12]
        drawn = layered(boxes, edges)
        rects = [
            (x, y, x + boxes[i].width, y + boxes[i].height) for i, (x, y) in drawn.corners.items()
        ]
        assert len(rects) == count
        assert not any(itertools.starmap(overlap, itertools.combinations(rects, 2)))
        assert all(r[0] >= -1e-6 and r[2] <= drawn.width + 1e-6 for r in rects)
        assert all(r[1] >= 0 and r[3] <= drawn.height + 1e-6 for r in rects)
        for (source, target), points in drawn.paths.items():
            heights = [y for _, y in points]
            assert heights == sorted(heights)
            assert heights[0] == rects[source][3]
            assert heights[-1] == rects[target][1]


def test_a_long_edge_goes_round_the_boxes_between() -> None:
    boxes = {i: Box(100, 30) for i in range(4)}
    drawn = layered(boxes, [(0, 1), (1, 2), (2, 3), (0, 3)])
    inside = [
        (i, p)
        for p in drawn.paths[0, 3]
        for i, (x, y) in drawn.corners.items()
        if x < p[0] < x + 100 and y < p[1] < y + 30
    ]
    assert inside == []
    assert len(drawn.paths[0, 3]) == 6
    assert len(drawn.paths[0, 1]) == 2


def test_what_is_used_late_stands_where_it_is_used() -> None:
    boxes = {i: Box(10, 10) for i in range(5)}
    drawn = layered(boxes, [(0, 1), (1, 2), (2, 3), (4, 3)])
    assert drawn.corners[4][1] == drawn.corners[2][1]


def test_nothing() -> None:
    assert layered({}, []).corners == {}
