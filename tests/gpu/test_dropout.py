"""Masks of dropout are the same bits on a CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch

from seqcomp.runtime import random
from seqcomp.runtime.random import keep_mask, keys_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("chunk", [2**22, 1000])
def test_one_mask(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_CHUNK", chunk)
    sizes = (3, 40, 2**33)
    masks = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        index = [torch.arange(n, device=device) for n in (3, 40, 1000)]
        index[2] += 2**32
        masks.append(keep_mask(keys_of(5, 2, device)[1], index, sizes, 0.3).cpu())
    assert torch.equal(*masks)
