"""The demo's model on one GPU: four ranks in lockstep against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from seqcomp.verify.lockstep import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).cuda()


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    with torch.autograd.set_multithreading_enabled(False):
        loss = model(**inputs).loss
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize("plan", ["ring_4", "ulysses_4", "usp_2x2"])
def test_every_gradient(plan: str) -> None:
    ids = torch.randint(0, 256, (1, 1024), device="cuda")
    inputs = {"input_ids": ids, "labels": ids}
    loss, gradients = step(build(), inputs)

    def run(model: nn.Module, context: Any, local: Any) -> tuple[float, dict[str, torch.Tensor]]:
        return step(model, local)

    ranks = lockstep(build, plan, run, inputs=inputs, device=torch.device("cuda"))
    for got_loss, got in ranks:
        assert got_loss == pytest.approx(loss, rel=1e-5)
        for name, want in gradients.items():
            worst = (got[name] - want).abs().max() / want.abs().max()
            assert worst < 1e-4, name
