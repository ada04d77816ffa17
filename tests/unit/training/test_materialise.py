"""A model on meta gets the values of one process, and what nothing sets is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from seqcomp.training.materialise import materialise

CONFIG = LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
)  # fmt: skip


class Scaled(nn.Module):
    """Holds a buffer that only its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0), persistent=False)


def on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(CONFIG)


def test_buffers_are_those_of_the_constructor() -> None:
    model, want = on_meta(), LlamaForCausalLM(CONFIG)
    materialise(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for (name, got), value in zip(model.named_buffers(), want.buffers(), strict=True):
        assert torch.equal(got, value), name
    for name, got in model.named_parameters():
        assert got.isfinite().all(), name
    assert torch.equal(model.model.norm.weight, torch.ones(16))
    assert 0.01 < float(model.model.layers[0].mlp.up_proj.weight.std()) < 0.03


def test_the_seed_decides_and_the_random_state_stays() -> None:
    models = [on_meta() for _ in range(3)]
    before = torch.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        materialise(model, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    first, same, other = (m.model.layers[0].mlp.up_proj.weight for m in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_what_nothing_sets_is_named() -> None:
    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(RuntimeError, match="nothing sets scale:"):
        materialise(model)

    def init(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            module.scale.copy_(torch.arange(4.0))
        elif isinstance(module, nn.Linear):
            module.reset_parameters()

    materialise(model, init=init)
    assert model.scale.tolist() == [0, 1, 2, 3]
