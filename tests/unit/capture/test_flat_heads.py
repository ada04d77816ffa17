"""Products over batch * heads (BLOOM's) are read as attention over [batch, heads]."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.recognise import recognise_attention
from tests.unit.capture.captured import capture_of, ops_of, run

HEADS, WIDTH = 4, 32


class Flat(nn.Module):
    """BLOOM's attention; `mixed` adds up heads before they are taken apart."""

    def __init__(self, alpha: float, beta: float, *, mixed: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.alpha, self.beta, self.mixed = alpha, beta, mixed

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, 32] -> [B, S, 32]."""
        b, s, _ = x.shape
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2).reshape(b * HEADS, s, -1)
            for y in self.qkv(x).chunk(3, -1)
        )
        slopes = 0.5 ** torch.arange(1, HEADS + 1, dtype=x.dtype)
        bias = (slopes[:, None, None] * torch.arange(s, dtype=x.dtype)).repeat(b, 1, 1)
        scores = bias.baddbmm(q, k.transpose(-1, -2), beta=self.beta, alpha=self.alpha)
        if self.mixed:
            scores = scores + scores.flip(0)
        at = torch.arange(s)
        weights = scores.view(b, HEADS, s, s).masked_fill(at > at[:, None], -torch.inf).softmax(-1)
        out = torch.bmm(weights.view(b * HEADS, s, s), v)
        return out.view(b, HEADS, s, -1).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("alpha", "beta"), [(0.25, 1.0), (1.0, 0.5)])
def test_is_one_attention_of_the_same_value(alpha: float, beta: float) -> None:
    module = Flat(alpha, beta).double()
    capture = canonicalise(capture_of(module, torch.randn(2, 16, WIDTH, dtype=torch.float64)))
    x = torch.randn(3, 12, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(run(capture, module, x), module(x))
    (found,) = recognise_attention(capture, module)
    assert (found.heads, found.scale) == (HEADS, alpha)
    assert not {"aten.bmm", "aten.baddbmm", "aten.softmax"} & set(ops_of(capture))


def test_heads_that_meet_stay_as_they_are() -> None:
    module = Flat(0.25, 1.0, mixed=True).double()
    capture = canonicalise(capture_of(module, torch.randn(2, 16, WIDTH, dtype=torch.float64)))
    x = torch.randn(3, 12, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(run(capture, module, x), module(x))
    assert "aten.baddbmm" in ops_of(capture)
    assert recognise_attention(capture, module) == ()
