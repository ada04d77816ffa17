"""Masks of bands: strips show exactly what the rule shows, and hardly more is computed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqcomp.layout.masks import Band, Causal
from seqcomp.runtime.attention.band_mask import BandMask, bias_of
from seqcomp.runtime.attention.cpu_matmul import STRIP
from seqcomp.runtime.attention.rule_mask import RuleMask

CPU = torch.device("cpu")


def shown(mask: BandMask, rows: int, *, corners: bool) -> torch.Tensor:
    """[rows, columns]: how often a pair is computed and seen."""
    count = torch.zeros(mask.rows, mask.columns, dtype=torch.int64)
    for own, keys, strip in mask.strips(rows):
        bias = torch.zeros(strip.rows, strip.columns)
        if corners:
            for columns, part in strip.corners():
                bias[:, columns] += part
        elif (whole := strip.whole()) is not None:
            bias = whole
        assert set(bias.unique().tolist()) <= {0.0, -torch.inf}
        count[own, keys] += bias == 0
    return count


@given(
    st.integers(-30, 30), st.integers(0, 45), st.integers(1, 40), st.integers(1, 40),
    st.integers(0, 9), st.booleans(),
)  # fmt: skip
def test_strips_show_each_visible_pair_once(
    down: int, width: int, rows: int, columns: int, step: int, corners: bool
) -> None:
    mask = BandMask(down, down + width, rows, columns, partial(bias_of, CPU))
    gap = torch.arange(columns) - torch.arange(rows)[:, None]
    seen = (gap >= down) & (gap <= down + width)
    assert torch.equal(shown(mask, step, corners=corners), seen.long())


@given(
    st.sampled_from([Causal(), Causal(3), Band(0, 5), Band(-4, 2), Band(None, 3)]),
    st.integers(0, 20), st.integers(0, 20), st.integers(1, 3), st.integers(1, 12),
    st.integers(1, 12),
)  # fmt: skip
def test_a_rule_on_ranges_is_the_band_of_their_tile(
    rule: Band | Causal, q: int, k: int, step: int, rows: int, columns: int
) -> None:
    q_range, k_range = range(q, q + rows * step, step), range(k, k + columns * step, step)
    mask = RuleMask(rule, CPU).of([q_range], [k_range])
    assert isinstance(mask, BandMask)
    at = [torch.tensor(list(x)) for x in (q_range, k_range)]
    seen = rule.visible(at[0][:, None], at[1][None])
    assert torch.equal(shown(mask, 4, corners=True), seen.long())


def test_other_ranges_have_a_boolean_mask() -> None:
    mask = RuleMask(Band(0, 5), CPU).of([range(0, 8, 2)], [range(8)])
    assert isinstance(mask, torch.Tensor)
    gap = torch.arange(0, 8, 2)[:, None] - torch.arange(8)
    assert torch.equal(mask, (gap >= 0) & (gap <= 5))


@pytest.mark.parametrize("width", [128, 512, 1024])
def test_strips_waste_little(width: int) -> None:
    """Half a strip on either side, and what makes the keys a multiple of 16."""
    rows = 1024
    mask = BandMask(1 - width, 0, rows, rows, partial(bias_of, CPU))
    computed = sum(strip.rows * strip.columns for _, _, strip in mask.strips(STRIP))
    visible = int((bias_of(CPU, 1 - width, 0, rows, rows) == 0).sum())
    assert visible < computed <= visible * (1 + (STRIP + 16) / width)
