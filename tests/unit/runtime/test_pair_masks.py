"""Bounds of masks hold, and tiles cover exactly what is visible: any program, any layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqcomp.layout.masks import Tile
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention.hidden_rows import HiddenRows
from seqcomp.runtime.attention.pair_bounds import bounds
from seqcomp.runtime.attention.pair_mask import Apply, Leaf, Number, PairMask, Position, Term
from seqcomp.runtime.attention.tiling import DataTiling, positions

aten = torch.ops.aten
B, H, S = 2, 2, 48
DEVICE = torch.device("cpu")
LAYOUTS = ("contiguous", "striped", "zigzag")
FLOATS = (torch.float64, torch.float32, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.uint8)


def leaves(seed: int) -> list[Tensor]:
    """Vectors over queries or keys, a matrix, per sample and per head, with infinities and NaN."""
    made = torch.Generator().manual_seed(seed)

    def ints(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=made)

    def reals(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    documents = ints(B, 1, S, 1).abs().cumsum(2)
    return [
        documents,
        documents.mT,
        ints(1, 1, 1, S).to(torch.uint8),
        ints(B, 1, 1, S) > 0,
        ints(1, H, S, 1).to(torch.int32),
        reals(1, 1, S, 1),
        reals(B, H, 1, S).bfloat16(),
        reals(1, 1, S, S).double(),
        reals(1, 1, 1, S).masked_fill(ints(1, 1, 1, S) > 2, -torch.inf),
        reals(1, 1, S, 1).masked_fill(ints(1, 1, S, 1) > 2, torch.nan),
        torch.tensor(2.1, dtype=torch.float64).view(1, 1, 1, 1),
    ]


SCALARS = {10}
BASIC = st.one_of(
    st.builds(lambda i: Leaf(i, scalar=i in SCALARS), st.integers(0, 10)),
    st.builds(Position, st.sampled_from(("query", "key"))),
    st.builds(Number, st.sampled_from((-1e30, -2.5, 0.0, 0.1, 3.0)), st.sampled_from(FLOATS)),
    st.builds(Number, st.integers(-3, 40), st.just(torch.int64)),
    st.builds(Number, st.booleans(), st.just(torch.bool)),
)
PLAIN = st.one_of(st.integers(-3, 40), st.sampled_from((0.1, -1.7, 1e-3)))
TENSOR_OPS = ("add", "mul", "lt", "le", "gt", "ge", "eq", "ne", "maximum", "minimum", "div",
              "logical_and", "logical_or", "logical_xor", "floor_divide", "rsub")  # fmt: skip


def _grown(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    def binary(name: str, a: Term, b: Term) -> Term:
        op = getattr(aten, name)
        return Apply(op.Tensor if "Tensor" in op.overloads() else op.default, (a, b))

    def scalar(name: str, a: Term, b: float) -> Term:
        return Apply(getattr(aten, name).Scalar, (a, b))

    return st.one_of(
        st.builds(binary, st.sampled_from(TENSOR_OPS), inner, inner),
        st.builds(
            scalar, st.sampled_from(("add", "mul", "lt", "le", "gt", "ge", "eq", "ne", "rsub",
                                     "div")), inner, PLAIN),
        st.builds(lambda a: Apply(aten.logical_not.default, (a,)), inner),
        st.builds(lambda a, d: Apply(aten.to.dtype, (a, d)), inner,
                  st.sampled_from((*FLOATS, *INTS, torch.bool))),
        st.builds(lambda c, a, b: Apply(aten.where.self, (Apply(aten.to.dtype, (c, torch.bool)),
                                                          a, b)), inner, inner, inner),
        st.builds(lambda a: Apply(aten.abs.default, (a,)), inner),
        st.builds(lambda a: Apply(aten.sin.default, (a,)), inner),  # has no rule
    )  # fmt: skip


PROGRAMS = st.recursive(BASIC, _grown, max_leaves=5)


def evaluated(term: Term, given: list[Tensor], q: Tensor, k: Tensor) -> Tensor | None:
    """None where the program is none: torch refuses some operations on some dtypes."""
    try:
        return PairMask(term).evaluate(given, q, k)
    except RuntimeError:
        return None


def check_bounds(
    term: Term, data: list[Tensor], q: Tensor, k: Tensor, blocks: tuple[int, int]
) -> bool:
    """False where the program is none."""
    exact = evaluated(term, data, q, k)
    if exact is None:
        return False
    found = bounds(PairMask(term), data, q, k, blocks)
    exact = exact.expand(B, H, len(q), len(k)).double()

    def spread(x: Tensor) -> Tensor:
        x = x.repeat_interleave(blocks[0], 2)[:, :, : len(q)]
        return x.repeat_interleave(blocks[1], 3)[..., : len(k)].expand(B, H, len(q), len(k))

    nan = exact.isnan()
    low, high = spread(found.low), spread(found.high)
    assert bool(((exact >= low) | nan).all()), term
    assert bool(((exact <= high) | nan).all()), term
    # A NaN may only stand where nothing is claimed to be hidden or seen.
    assert not bool((nan & (low == high)).any()), term
    return True


@settings(max_examples=1500, deadline=None)
@given(
    term=PROGRAMS,
    seed=st.integers(0, 99),
    layout=st.sampled_from(LAYOUTS),
    rank=st.integers(0, 1),
    blocks=st.tuples(st.sampled_from((1, 5, 16)), st.sampled_from((1, 7, 16))),
)
def test_bounds_contain_every_value_of_their_block(term, seed, layout, rank, blocks):
    ranges = SequenceLayout(layout, 2).ring_ranges
    q, k = positions(ranges(S, rank), DEVICE), positions(ranges(S, 1 - rank), DEVICE)
    check_bounds(term, leaves(seed), q, k, blocks)


@pytest.mark.parametrize("name", [*TENSOR_OPS, "sub"])
def test_bounds_of_each_operation_on_every_two_operands(name):
    """Rounding too: on blocks of one pair the bounds are the value itself or unknown."""
    data, q = leaves(1), torch.arange(8)
    basic = [Leaf(i, scalar=i in SCALARS) for i in range(len(data))]
    basic += [
        Position("query"),
        Position("key"),
        Number(0.1, torch.float32),
        Number(3, torch.int64),
    ]
    op = getattr(aten, name)
    op = op.Tensor if "Tensor" in op.overloads() else op.default
    programs = [Apply(op, (a, b)) for a in basic for b in basic]
    if "Scalar" in getattr(aten, name).overloads():
        programs += [Apply(getattr(aten, name).Scalar, (a, b)) for a in basic for b in (0.1, 3)]
    held = [
        check_bounds(t, data, q + 3, q, blocks) for t in programs for blocks in ((1, 1), (3, 8))
    ]
    assert sum(held) > len(held) / 2


def test_bounds_of_each_unary_operation():
    data, q = leaves(1), torch.arange(8)
    for index in range(len(data)):
        operand = Leaf(index, scalar=index in SCALARS)
        for program in (
            *(Apply(aten.to.dtype, (operand, d)) for d in (*FLOATS, *INTS, torch.bool)),
            *(Apply(getattr(aten, n).default, (operand,)) for n in ("neg", "abs", "logical_not")),
        ):
            for blocks in ((1, 1), (3, 8)):
                check_bounds(program, data, q + 3, q, blocks)


LOW = torch.finfo(torch.float64).min


@settings(max_examples=150, deadline=None)
@given(
    term=PROGRAMS,
    seed=st.integers(0, 99),
    layout=st.sampled_from(LAYOUTS),
    hidden=st.sampled_from((None, -torch.inf, -1e30, LOW, -1e4)),
)
def test_tiles_cover_exactly_what_is_visible(term, seed, layout, hidden):
    data = leaves(seed)
    term = Apply(aten.to.dtype, (term, torch.bool))
    everywhere = torch.arange(S)
    if evaluated(term, data, everywhere, everywhere) is None:
        return
    seen = evaluated(term, data, everywhere, everywhere).expand(B, H, S, S)
    if hidden is None:
        mask = PairMask(term)
    else:
        numbers = (Number(0.0, torch.float64), Number(hidden, torch.float64))
        mask = PairMask(Apply(aten.where.self, (term, *numbers)), additive=True, hidden=-1e8)
    tiling = DataTiling(mask, data, SequenceLayout(layout, 2), S, DEVICE)
    whole = _rebuilt(tiling, SequenceLayout(layout, 2), additive=hidden is not None)
    if hidden is None or hidden == -torch.inf:
        assert torch.equal(whole == 0, seen)
        return
    rows = seen.any(-1, keepdim=True)
    if hidden == -1e4:
        assert torch.equal(whole, torch.where(seen, 0.0, hidden).double())
    else:  # a row that a finite number hides is the mean over all keys
        assert torch.equal(whole == 0, torch.where(rows, seen, True))


def _rebuilt(tiling: DataTiling, layout: SequenceLayout, *, additive: bool) -> Tensor:
    """The additive mask [B, H, S, S] that the tiles stand for; -inf where no tile is."""
    whole = torch.full((B, H, S, S), -torch.inf, dtype=torch.float64)
    touched = torch.zeros(S, S, dtype=torch.int64)
    for rank in range(layout.ring):
        for source in range(layout.ring):
            q = positions(layout.ring_ranges(S, rank), DEVICE)
            k = positions(layout.ring_ranges(S, source), DEVICE)
            for task in tiling.tasks(rank, source):
                rows, columns = q[task.q_start : task.q_stop], k[task.k_start : task.k_stop]
                at = (slice(None), slice(None), rows[:, None], columns[None])
                touched[rows[:, None], columns[None]] += 1
                if task.kind is Tile.FULL:
                    whole[at] = 0.0
                    continue
                tile = tiling.mask(task, rank, source, range(H))
                values = tile.mask if isinstance(tile, HiddenRows) else tile
                if not additive:
                    values = torch.where(values, 0.0, -torch.inf).double()
                whole[at] = values.double().expand(B, H, len(rows), len(columns))
    assert int(touched.max()) <= 1, "a pair in two tiles"
    return whole.masked_fill_(whole <= -1e8, -torch.inf)
