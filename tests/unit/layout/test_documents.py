"""Packed documents: areas by brute force over pairs, keys that travel as the runtime has them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from seqcomp.layout.documents import Documents, lengths_of
from seqcomp.layout.intervals import visible_area, whole_area, work
from seqcomp.layout.masks import Band, Causal, Full, Mask, Tile, tiles
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import travel_of
from seqcomp.runtime.attention.pair_mask import Apply, Leaf, Number, PairMask, Position, Term
from seqcomp.runtime.attention.tiling import DataTiling

aten = torch.ops.aten
RULES: tuple[Mask, ...] = (Causal(), Full(), Band(0, 20))
LAYOUTS = [
    SequenceLayout(kind, ring)  # type: ignore[arg-type]
    for kind in ("contiguous", "zigzag", "striped")
    for ring in (2, 4, 8)
]


def sees(lengths: tuple[int, ...], rule: Mask) -> list[list[bool]]:
    """Of each pair of positions."""
    number = [i for i, n in enumerate(lengths) for _ in range(n)]
    every = range(len(number))
    return [[number[i] == number[j] and bool(rule.visible(i, j)) for j in every] for i in every]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("lengths", [(64,), (1, 30, 33), (7,) * 8 + (8,)], ids=str)
def test_work_is_that_of_the_pairs(rule: Mask, lengths: tuple[int, ...]) -> None:
    mask, seen = Documents(lengths, rule), sees(lengths, rule)
    assert whole_area(mask, 64) == sum(map(sum, seen))
    for layout in LAYOUTS:
        ranks = [layout.ring_ranges(64, rank) for rank in range(layout.ring)]
        owned = [[i for part in rank for i in part] for rank in ranks]
        assert work(mask, layout, 64) == tuple(sum(sum(seen[i]) for i in own) for own in owned)
        for (q, mine), (k, theirs) in product(zip(ranks, owned, strict=True), repeat=2):
            expected = [[seen[i][j] for j in theirs] for i in mine]
            assert visible_area(mask, q, k) == sum(map(sum, expected))
            if rule != Band(0, 20):
                found = torch.zeros(len(mine), len(theirs), dtype=torch.int64)
                for task in tiles(mask, q, k):
                    tile = found[task.q_start : task.q_stop, task.k_start : task.k_stop]
                    assert task.kind is not Tile.PARTIAL
                    tile += torch.ones_like(tile).tril() if task.kind is Tile.CAUSAL else 1
                assert found.tolist() == [[int(x) for x in row] for row in expected]
    position = torch.arange(64)
    assert mask.visible(position[:, None], position[None]).tolist() == seen


def pairs(rule: Mask) -> PairMask:
    """As models write it: of equal document numbers, and the rule."""
    q, k = Position("query"), Position("key")
    term: Term = Apply(aten.eq.Tensor, (Leaf(0), Leaf(1)))
    if rule != Full():
        term = Apply(aten.bitwise_and.Tensor, (term, Apply(aten.le.Tensor, (k, q))))
    if isinstance(rule, Band):
        far = Apply(aten.sub.Tensor, (q, Number(rule.high + 1, torch.int64)))
        term = Apply(aten.bitwise_and.Tensor, (term, Apply(aten.gt.Tensor, (k, far))))
    return PairMask(term)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [(4096,), (1, 2047, 2048), (512,) * 8, (100,) * 40 + (96,), (3000, 1000, 96)],
    ids=str,
)
def test_keys_travel_as_the_runtime_sends_them(rule: Mask, lengths: tuple[int, ...]) -> None:
    number = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
    leaves = number.view(1, 1, -1, 1), number.view(1, 1, 1, -1)
    saved = 0
    for layout in LAYOUTS:
        tiling: Any = DataTiling(pairs(rule), leaves, layout, 4096, torch.device("cpu"))
        found = travel_of(Documents(lengths, rule), layout, 4096)
        assert found == tiling.travel()
        saved += found is not None
    assert saved >= 3 or rule == Full()


def test_what_is_known_is_kept_and_lengths_are_read() -> None:
    mask, layout = Documents((512,) * 8), SequenceLayout("contiguous", 4)
    assert travel_of(mask, layout, 4096) is travel_of(mask, layout, 4096)
    assert mask.under(Full()).under(Causal()) == mask
    assert mask.of_length(4100).lengths == (*(512,) * 7, 516)
    assert mask.of_length(1000).lengths == (512, 488)
    assert mask.of_length(1024).lengths == (512, 512)
    for text, lengths in (("4096x2, 17", (4096, 4096, 17)), ("5", (5,)), ("1x3,2", (1, 1, 1, 2))):
        assert lengths_of(text) == lengths
    assert str(Documents((4096, 4096, 17, 4096))) == "4096x2,17,4096"
    for text in ("", "4096,", "x3", "4096x", "4096x0", "0", "-4", "a", "4096x99999999", "1.5"):
        with pytest.raises(ValueError, match=f"^{text}$"):
            lengths_of(text)
