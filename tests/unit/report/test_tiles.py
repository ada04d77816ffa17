"""Tiles, tokens and the order of collectives, beside masks written out and compiled layouts."""

from __future__ import annotations

import pytest

from seqcomp.layout.masks import Band, Causal, Full, Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from seqcomp.report.rows import CommRow, Event
from seqcomp.report.tiles import EMPTY, FULL, LOWER, PARTIAL, UNKNOWN, UPPER, TileGrid, _grid
from seqcomp.report.timeline import timelines
from seqcomp.report.tokens import tokens_of
from tests.fixtures.reports import every_strategy

LENGTH = 32
LAYOUTS = [SequenceLayout(kind, 4) for kind in ("contiguous", "zigzag", "striped")]


def grid_of(mask: Mask | None, layout: SequenceLayout) -> TileGrid:
    return _grid(("a",), mask, "name", layout, LENGTH, LENGTH, "p2p", True)


@pytest.mark.parametrize("mask", [Full(), Causal(), Band(0, 5), Band(-3, 9)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
def test_tiles_are_what_a_dense_mask_shows(mask: Mask, layout: SequenceLayout) -> None:
    grid = grid_of(mask, layout)
    owned = sorted(p for _, part in grid.blocks for p in part)
    assert owned == list(range(LENGTH))
    areas = [[0] * 4 for _ in range(4)]
    for line, (rank, q) in zip(grid.kinds, grid.blocks, strict=True):
        for kind, (source, k) in zip(line, grid.keys, strict=True):
            seen = [[bool(mask.visible(i, j)) for j in k] for i in q]
            count = sum(map(sum, seen))
            areas[rank][source] += count
            corners = (seen[-1][0], seen[0][-1])
            want = {(True, False): LOWER, (False, True): UPPER}.get(corners, PARTIAL)
            whole = {0: EMPTY, len(q) * len(k): FULL}
            assert kind == whole.get(count, want)
    assert [list(row) for row in grid.areas] == areas
    steps = [(rank - source) % 4 for rank in range(4) for source in range(4) if areas[rank][source]]
    assert set(steps) <= set(grid.steps)


def test_what_data_decides_is_unknown() -> None:
    grid = grid_of(None, LAYOUTS[1])
    assert set("".join(grid.kinds)) == {UNKNOWN}


def test_a_narrow_window_needs_few_steps() -> None:
    assert grid_of(Band(0, 5), LAYOUTS[0]).steps == (0, 1)
    assert grid_of(Causal(), LAYOUTS[0]).steps == (0, 1, 2, 3)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_tokens_of_every_rank(kind: str) -> None:
    text = (
        f"mesh: {{ulysses: 2, data: 3, ring: 2}}\npadding: pad\n"
        f"strategies: {{ring: {{layout: {kind}}}, ulysses: {{}}, data: {{}}}}\n"
    )
    resolved = resolve(load_plan(text))
    layout = resolved.layout_for(30, True)
    tokens = tokens_of(layout, 30, resolved)
    assert (tokens.padded, tokens.layout, tokens.ring, tokens.inner) == (32, kind, 2, 2)
    assert sorted(rank for place in tokens.places for rank in place.ranks) == list(range(12))
    held = [p for place in tokens.places for part in place.ranges for p in part]
    assert sorted(held) == list(range(32))
    for index, place in enumerate(tokens.places):
        assert [p for part in place.ranges for p in part] == layout.token_index(32, index)
        assert (place.coords["ring"], place.coords["ulysses"]) == divmod(index, 2)
        for rank in place.ranks:  # row-major in the mesh: ulysses, data, ring
            assert (rank // 6, rank % 2) == (place.coords["ulysses"], place.coords["ring"])


def test_the_report_of_a_program_adds_up() -> None:
    report = every_strategy()
    for phase in ("forward", "backward"):
        sent = sum(
            row.bytes_sent * len(line.paths)
            for line in timelines(report.events)
            for row in (line.forward if phase == "forward" else line.backward)
        )
        assert sent == report.bytes_sent(phase)
    pairs = {grid.modules: sum(map(sum, grid.areas)) for grid in report.tiles}
    assert sum(map(len, pairs)) == len(report.work)
    ((modules, total),) = pairs.items()
    row = report.work[0]
    assert row.module == modules[0]
    assert sum(row.flops) % total == 0


def test_the_order_of_one_layer() -> None:
    """Written out: FSDP fetches a layer before it and gives its gradients back after it."""
    (_, layer, outside) = timelines(every_strategy().events)
    assert (layer.paths, outside.paths) == (("layers.1",), ("",))
    fetch, give = ("all_gather", "data+ring+ulysses"), ("reduce_scatter", "data+ring+ulysses")
    gather, scatter = ("all_gather", "tensor"), ("reduce_scatter", "tensor")
    heads, hop = ("all_to_all", "ulysses"), ("p2p", "ring")
    assert [(row.kind, row.axis) for row in layer.forward] == [
        fetch, gather, heads, hop, heads, scatter, gather, scatter,
    ]  # fmt: skip
    assert [(row.kind, row.axis) for row in layer.backward] == [
        fetch, gather, gather, scatter,  # MLP: its output's, its input again, its input's
        gather, heads, hop, hop, heads, gather, scatter, give,
    ]  # fmt: skip
    queries, output = [row.bytes_sent for row in layer.forward if row.kind == "all_to_all"]
    assert queries == 2 * output  # Q, K and V of half as many heads, beside the output
    back = [row.bytes_sent for row in layer.backward if row.kind == "all_to_all"]
    assert back == [output, queries]


def test_equal_layers_share_a_line() -> None:
    def event(module: str, node: str, size: int) -> Event:
        row = CommRow(module, "p2p", "ring", 1, size, "forward", True)
        return Event(node, row)

    found = timelines([event(f"m.{i}.attn", f"n{i}", 4 if i != 2 else 8) for i in range(4)])
    assert [line.paths for line in found] == [("m.0", "m.1", "m.3"), ("m.2",)]
