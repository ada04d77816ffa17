"""The inputs of blocks leave the device between forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from seqcomp.runtime.recompute import Checkpoint, Recompute
from seqcomp.runtime.traffic import Traffic

pytestmark = pytest.mark.gpu


def step(*, offload: bool):
    torch.manual_seed(0)
    blocks = [nn.Linear(512, 512, device="cuda", dtype=torch.float64) for _ in range(6)]
    run = Recompute(Traffic()).checkpointed(
        lambda block, x: block(x).tanh(), Checkpoint(offload=offload), 0
    )
    x = torch.randn(4096, 512, device="cuda", dtype=torch.float64)
    before = torch.cuda.memory_allocated()
    for block in blocks:
        x = run(block, x)
    loss = x.sum()
    del x
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held, [p.grad for block in blocks for p in block.parameters()]


def test_same_gradients_and_less_memory():
    (held, grads), (held_off, grads_off) = step(offload=False), step(offload=True)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_off, strict=True))
    # The input of the first block does not learn and stays; those of the five after it are gone.
    assert held - held_off >= 4 * 4096 * 512 * 8
