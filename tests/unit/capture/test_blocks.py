"""Which modules of a model are its repeated blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from seqcomp.capture.blocks import blocks_of


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def stages() -> nn.Module:
    return nn.ModuleDict({"0": nn.ModuleList([encoder_layer()]), "1": nn.ModuleList([nn.ReLU()])})


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.layers = stages()


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (
            lambda: LlamaForCausalLM(LlamaConfig(num_hidden_layers=2)),
            ("model.layers.0", "model.layers.1"),
        ),
        (
            lambda: T5ForConditionalGeneration(T5Config(num_layers=1)),
            ("encoder.block.0", "decoder.block.0"),
        ),
        (lambda: BertModel(BertConfig(num_hidden_layers=1)), ("encoder.layer.0",)),
        (
            lambda: nn.Sequential(
                nn.Embedding(5, 8), encoder_layer(), encoder_layer(), nn.Linear(8, 5)
            ),
            ("1", "2"),
        ),
        (Stack, ("layers.0",)),
        (lambda: nn.Linear(3, 3), ()),
    ],
    ids=["llama", "encoder-decoder", "embeddings-named", "sequential", "outermost", "none"],
)
def test_blocks(make: object, paths: tuple[str, ...]) -> None:
    with torch.device("meta"):
        module = make()  # type: ignore[operator]
    assert blocks_of(module) == paths
