"""The masks of dropout: random enough, and functions of places in the whole alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from seqcomp.runtime import random
from seqcomp.runtime.random import drawn_seed, dropout, keep_mask, keys_of

CPU = torch.device("cpu")
SIGMAS = 4.0


def mask(*sizes: int, p: float = 0.5, seed: int = 3, number: int = 0, parts: Any = None) -> Tensor:
    index = [torch.arange(n) for n in sizes]
    if parts is not None:
        index = [places[own] for places, own in zip(index, parts, strict=True)]
    return keep_mask(keys_of(seed, number + 1, CPU)[number], index, sizes, p)


def correlation(a: Tensor, b: Tensor) -> float:
    """Of fair coins, in standard deviations."""
    product = (a.double() * 2 - 1) * (b.double() * 2 - 1)
    return abs(float(product.mean())) * product.numel() ** 0.5


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1])
def test_as_many_stay_as_should(p: float, seed: int) -> None:
    count = 100 * 200
    kept = float(mask(100, 200, p=p, seed=seed).sum())
    assert abs(kept - count * (1 - p)) < SIGMAS * (count * p * (1 - p)) ** 0.5


def test_neighbours_rows_calls_and_seeds_know_nothing_of_each_other() -> None:
    x = mask(256, 256)
    for lag in (1, 2, 3, 7, 16, 128):
        assert correlation(x[:, lag:], x[:, :-lag]) < SIGMAS, f"columns {lag} apart"
        assert correlation(x[lag:], x[:-lag]) < SIGMAS, f"rows {lag} apart"
    for number in (1, 2, 5):
        other = mask(256, 256, number=number)
        assert correlation(x, other) < SIGMAS, f"dropout {number}"
        # Nor is one a shifted part of the other.
        for lag in (1, 2, 3, 4, 256):
            assert correlation(x.flatten()[lag:], other.flatten()[:-lag]) < SIGMAS
            assert correlation(x.flatten()[:-lag], other.flatten()[lag:]) < SIGMAS
    for seed in (2, 4, 3 + 2**32, 3 + 2**61):
        assert correlation(x, mask(256, 256, seed=seed)) < SIGMAS, f"seed {seed}"
    # Every pair of places in a line of 8, over many lines.
    lines = mask(2**13, 8)
    for i, j in itertools.combinations(range(8), 2):
        assert correlation(lines[:, i], lines[:, j]) < SIGMAS
    patterns = (lines.long() << torch.arange(8)).sum(1).bincount(minlength=256).double()
    chi = float(((patterns - 32) ** 2 / 32).sum())
    assert abs(chi - 255) < SIGMAS * (2 * 255) ** 0.5


def test_far_places_count() -> None:
    """Indices beyond 2^32 are told apart."""
    size = 2**40
    key = keys_of(0, 1, CPU)[0]
    found = [
        keep_mask(key, [torch.arange(4096) + start], [size], 0.5) for start in (0, 2**32, 2**39)
    ]
    for a, b in itertools.combinations(found, 2):
        assert correlation(a, b) < SIGMAS


@pytest.mark.parametrize("chunk", [1, 7, 64, 10**6])
def test_a_part_of_the_mask_is_the_mask_of_the_part(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mask(5, 6, 10)
    monkeypatch.setattr(random, "_CPU_CHUNK", chunk)
    parts = (slice(1, 4), slice(0, 6, 2), torch.tensor([9, 0, 5]))
    assert torch.equal(mask(5, 6, 10, parts=parts), whole[1:4, 0:6:2][..., parts[2]])
    assert torch.equal(mask(300, p=0.3).view(5, 6, 10), mask(5, 6, 10, p=0.3))
    assert mask(3, 0, 4).shape == (3, 0, 4)
    assert mask().shape == ()


class Largest(TorchDispatchMode):
    """Bytes of the largest integer tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.int64:
            self.size = max(self.size, out.untyped_storage().nbytes())
        return out


def test_the_hash_needs_a_chunk_of_memory() -> None:
    index = [torch.arange(n) for n in (8, 64, 2048)]
    key = keys_of(0, 1, CPU)[0]
    with Largest() as seen:
        random.computed_mask(key, index, [8, 64, 2048], 0.1)
    assert seen.size <= 8 * random._CPU_CHUNK < 8 * 8 * 64 * 2048 / 16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values(dtype: torch.dtype) -> None:
    x = torch.randn(6, 50, dtype=dtype)
    index, key = [torch.arange(n) for n in x.shape], keys_of(5, 1, CPU)[0]
    y = dropout(x, key, index, x.shape, 0.25)
    kept = keep_mask(key, index, x.shape, 0.25)
    assert y.dtype == dtype
    assert torch.equal(y, torch.where(kept, x * (1 / 0.75), 0))
    assert 0 < int(kept.sum()) < kept.numel()
    by_row = dropout(x, key, index[:1], x.shape[:1], 0.5)
    alive = by_row.ne(0).any(1)
    assert torch.equal(by_row, torch.where(alive[:, None], x * 2, 0))


def test_nothing_and_everything_is_dropped() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    index, key = [torch.arange(4)] * 2, keys_of(5, 1, CPU)[0]
    assert torch.equal(dropout(x, key, index, x.shape, 0.0), x)
    gone = dropout(x, key, index, x.shape, 1.0)
    gone.sum().backward()
    assert not gone.any()
    assert x.grad is not None
    assert not x.grad.any()


def test_derivatives() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    index, key = [torch.arange(n) for n in x.shape], keys_of(1, 1, CPU)[0]

    def cubed(x: Tensor) -> Tensor:
        return dropout(x, key, index, x.shape, 0.4) ** 3

    assert gradcheck(cubed, (x,))
    assert gradgradcheck(cubed, (x,))


def test_seeds_come_from_torch() -> None:
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first, second = drawn_seed(), drawn_seed()
    torch.set_rng_state(state)
    assert (first, second) == (drawn_seed(), drawn_seed())
    assert first != second
    torch.manual_seed(4)
    assert drawn_seed() == first
    assert drawn_seed(torch.Generator().manual_seed(4)) == first
