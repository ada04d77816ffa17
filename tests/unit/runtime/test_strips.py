"""Tiles of bands in strips, for kernels that take tensors as masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from seqcomp.runtime.attention import cpu_flash, math_kernel, strips
from seqcomp.runtime.attention.band_mask import BandMask, bias_of
from seqcomp.runtime.attention.pair_dropout import PairDropout

ROWS, KEYS, HEADS, DIM = 70, 90, 2, 8
BANDS = {
    "window": (-8, 12),
    "at the end": (60, 75),
    "rows that see nothing": (60, 62),
    "all": (-99, 99),
}


def inputs(seed: int = 1) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, HEADS, n, DIM, generator=rng, dtype=torch.float64)
        for n in (ROWS, KEYS, KEYS, ROWS)
    ]


def dropout() -> Any:
    pairs = PairDropout.whole(torch.tensor([3, 4]), 0.3, (2, HEADS, ROWS, KEYS))
    return pairs.all_keys()


@pytest.mark.parametrize("size", [0, 1, 16, 200])
@pytest.mark.parametrize("drops", [False, True], ids=["flash", "dropout"])
@pytest.mark.parametrize("name", BANDS)
def test_as_the_whole_tile(name: str, drops: bool, size: int) -> None:
    q, k, v, dout = inputs()
    band = BandMask(*BANDS[name], ROWS, KEYS, partial(bias_of, torch.device("cpu")))
    gap = torch.arange(KEYS) - torch.arange(ROWS)[:, None]
    seen = (gap >= band.down) & (gap <= band.up)
    kernel = math_kernel if drops else cpu_flash
    how = {"causal": False, "scale": 0.3, **({"dropout": dropout()} if drops else {})}
    out, lse = math_kernel.forward(q, k, v, mask=seen, **how)
    assert bool(out.isfinite().all())
    found = strips.forward(kernel.forward, size, q, k, v, mask=band, **how)
    torch.testing.assert_close(found, (out, lse))
    tensors = (dout, q, k, v, out, lse)
    into = tuple(torch.ones_like(x) for x in (q, k, v))
    strips.backward(kernel.backward, size, *tensors, mask=band, into=into, **how)
    expected = math_kernel.backward(*tensors, mask=seen, **how)
    torch.testing.assert_close(into, tuple(x + 1 for x in expected))


def test_what_no_row_sees_is_not_computed() -> None:
    """A strip has its own rows and the band's width of keys, or the other way round."""
    q, k, v, dout = inputs()
    band = BandMask(-8, 0, ROWS, KEYS, partial(bias_of, torch.device("cpu")))
    computed: list[int] = []

    def forward(q: Any, k: Any, v: Any, **how: Any) -> Any:
        computed.append(q.shape[2] * k.shape[2])
        return cpu_flash.forward(q, k, v, causal=False, scale=1.0, **how)

    def backward(dout: Any, q: Any, k: Any, *rest: Any, **how: Any) -> Any:
        computed.append(q.shape[2] * k.shape[2])
        return cpu_flash.backward(dout, q, k, *rest, causal=False, scale=1.0, **how)

    out, lse = strips.forward(forward, 8, q, k, v, mask=band)
    assert sum(computed) <= ROWS * 32
    computed.clear()
    into = tuple(torch.zeros_like(x) for x in (q, k, v))
    strips.backward(backward, 8, dout, q, k, v, out, lse, mask=band, into=into)
    assert 0 < sum(computed) <= ROWS * 32
