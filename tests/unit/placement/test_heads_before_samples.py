"""Attention whose heads stand before the samples, under an axis that cuts heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from tests.fixtures import plans

HEADS, WIDTH, D, S, B = 4, 3, 12, 8, 2


def flat(*qkv: Tensor) -> Tensor:
    """[heads * B, S, d]: the axis cuts the outer factor, which is read as samples."""
    q, k, v = (x.permute(2, 0, 1, 3).flatten(0, 1) for x in qkv)
    out = torch.bmm((torch.bmm(q, k.mT) / WIDTH).softmax(-1), v)
    return out.unflatten(0, (HEADS, -1)).permute(1, 2, 0, 3).flatten(2)


def apart(*qkv: Tensor) -> Tensor:
    """[heads, B, S, d]: samples, of any number, stand where heads do."""
    q, k, v = (x.permute(2, 0, 1, 3) for x in qkv)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(1, 2, 0, 3).flatten(2)


class Model(nn.Module):
    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, D), nn.Linear(D, D)
        self.qkv = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.form = form

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.out(self.form(*(p(x).unflatten(-1, (HEADS, WIDTH)) for p in self.qkv)))


@pytest.mark.parametrize("form", [flat, apart])
def test_is_exact(form: Callable[..., Tensor]) -> None:
    given = {"ids": torch.arange(B * S).view(B, S) % 11}
    plan = plans.megatron(2)
    report = seqcomp.verify(lambda: Model(form).double(), plan, inputs_fn=lambda: given)
    assert report.ok, str(report)
