"""What masks cost: nothing of size S x S is made, and what is computed is what is visible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqcomp.layout.masks import Tile
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import AttentionPlan, attention
from seqcomp.runtime.attention.pair_mask import (
    Apply,
    Leaf,
    Lookup,
    PairMask,
    Position,
    Score,
)
from seqcomp.runtime.attention.tiling import DataTiling
from seqcomp.runtime.threads import run_ranks

aten = torch.ops.aten
DEVICE = torch.device("cpu")
GAP = Apply(aten.sub.Tensor, (Position("query"), Position("key")))
CAUSAL = Apply(aten.ge.Scalar, (GAP, 0))
LAYOUTS = ("contiguous", "striped", "zigzag")


def both(*terms: Apply) -> Apply:
    return Apply(aten.logical_and.default, terms)


def window(width: int) -> PairMask:
    return PairMask(both(CAUSAL, Apply(aten.lt.Scalar, (GAP, width))))


DOCUMENTS = PairMask(both(CAUSAL, Apply(aten.eq.Tensor, (Leaf(0), Leaf(1)))))


def numbers(length: int, each: int) -> list[Tensor]:
    """Documents of `each` tokens, for queries and for keys."""
    number = torch.arange(length) // each
    return [number.view(1, 1, -1, 1), number.view(1, 1, 1, -1)]


class Largest(TorchDispatchMode):
    """Remembers the most elements that one tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
                self.total += x.numel()
        return out


def computed(tiling: DataTiling, degree: int) -> int:
    pairs = [(r, s) for r in range(degree) for s in range(degree)]
    return sum(task.area for pair in pairs for task in tiling.tasks(*pair))


# Blocks are 1/64 of a rank's tokens: what is computed may exceed what is seen by their edges.
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_what_is_computed_is_what_is_visible(layout: str) -> None:
    length, degree = 16384, 2
    make = SequenceLayout(layout, degree)
    for mask, leaves, seen in (
        (window(1024), [], 1024 * length - 1024 * 1023 // 2),
        (DOCUMENTS, numbers(length, 2048), length // 2048 * 2048 * 2049 // 2),
    ):
        area = computed(DataTiling(mask, leaves, make, length, DEVICE), degree)
        assert seen <= area <= 1.15 * seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_of_128k_tokens_costs_s_times_w(layout: str) -> None:
    length, degree, width = 131072, 2, 1024
    tiling = DataTiling(window(width), [], SequenceLayout(layout, degree), length, DEVICE)
    with Largest() as largest:
        area = computed(tiling, degree)
    # Neighbours in a striped block lie `degree` tokens apart.
    slack = 1.6 if layout != "striped" else 2.2
    assert area <= slack * length * width
    blocks = (length // degree // 256) ** 2
    assert largest.elements <= max(blocks, length)
    assert largest.total <= length**2 // 25  # blocks on the diagonal: length x 256 pairs


@pytest.mark.parametrize("kind", ["window", "documents"])
def test_no_square_is_made_and_memory_stays_small(kind: str) -> None:
    length = 32768
    mask, leaves = (window(512), []) if kind == "window" else (DOCUMENTS, numbers(length, 1024))
    layout = SequenceLayout("zigzag", 2)
    torch.manual_seed(0)
    whole = [torch.randn(1, 1, length // 2, 8) for _ in range(3)]

    def fn(context: Any) -> int:
        inputs = [x.clone().requires_grad_() for x in whole]
        tiling = DataTiling(mask, leaves, layout, length, DEVICE)
        with Largest() as largest:
            plan = AttentionPlan(None, layout)
            out = attention(*inputs, plan, tiling, ring=context.comm(("ring",)))
            out.sum().backward()
        return largest.elements

    for elements in run_ranks(fn, {"ring": 2}):
        assert elements <= length * 64  # S^2 / 512


def test_a_score_mod_is_evaluated_tile_by_tile() -> None:
    """Also its backward, and that of the table that it looks up."""
    length, layout = 8192, SequenceLayout("zigzag", 2)
    bias = Lookup(0, GAP)
    mod = Apply(aten.tanh.default, (Apply(aten.add.Tensor, (Score(), bias)),))
    near = both(CAUSAL, Apply(aten.lt.Scalar, (GAP, 512)))
    program = PairMask(near, trained=(0,), tables=(0,), mod=mod)
    torch.manual_seed(0)
    whole = [torch.randn(1, 1, length // 2, 8) for _ in range(3)]

    def fn(context: Any) -> tuple[int, float]:
        table = torch.zeros(length, 1, 1, 1, requires_grad=True)
        inputs = [x.clone().requires_grad_() for x in whole]
        tiling = DataTiling(program, [table], layout, length, DEVICE)
        with Largest() as largest:
            plan = AttentionPlan(None, layout)
            out = attention(*inputs, plan, tiling, ring=context.comm(("ring",)))
            out.square().sum().backward()
        assert table.grad is not None
        assert not table.grad[512:].any()
        return largest.elements, float(table.grad[:512].abs().min())

    for elements, least in run_ranks(fn, {"ring": 2}):
        assert elements <= length * 128  # S^2 / 64
        assert least > 0


def test_control_a_dense_mask_would_be_seen() -> None:
    length = 1024
    with Largest() as largest:
        position = torch.arange(length)
        _ = position[:, None] >= position[None, :]
    assert largest.elements == length**2


def test_tiles_of_equal_masks_are_the_same_in_every_layer() -> None:
    tiling = DataTiling(window(100), [], SequenceLayout("zigzag", 2), 1024, DEVICE)
    first = tiling.tasks(0, 1)
    with Largest() as largest:
        assert tiling.tasks(0, 1) is first
    assert largest.total == 0
    assert {task.kind for task in tiling.tasks(0, 0)} == {
        Tile.CAUSAL,
        Tile.FULL,
        Tile.PARTIAL,
    }
