"""Shapes of modules for the cost model."""

from __future__ import annotations

import pytest
from torch import nn

from seqcomp.cost.shape import ModelShape
from seqcomp.diagnostics import PlanError
from seqcomp.integrations.shapes import model_shape, read_shape
from tests.fixtures.models import Spec, build
from tests.unit.cost.test_workload import LAYERS, LLAMA, SHAPE


def test_a_module_has_the_shape_of_its_widths() -> None:
    """Llama of transformers; what autograd keeps of it within 3 % of the formula."""
    found = model_shape(LLAMA)
    (block,), (formula,) = found.blocks, SHAPE.blocks
    for name in ("count", "heads", "kv_heads", "head_dim", "mlp_width", "parameters", "mask"):
        assert getattr(block, name) == getattr(formula, name)
    for name in ("hidden", "vocab", "embedding", "head", "other", "layers", "parameters"):
        assert getattr(found, name) == getattr(SHAPE, name)
    assert block.count == LAYERS
    for element in (2, 4):
        for checkpoint, slack in (("none", 0.03), ("selective", 0.3), ("block", 0.0)):
            # Tables of positions, which all layers share, count with a block here.
            kept, expected = (b.saved.of(checkpoint, element) for b in (block, formula))
            assert kept == pytest.approx(expected, rel=slack)


def test_blocks_of_different_masks_are_different() -> None:
    module = build(Spec(layers=3, causal=(True, False, True), tied=True))
    layers = list(module.layers)
    found = model_shape(module)
    assert [(b.count, b.mask) for b in found.blocks] == [(2, "causal"), (1, "full")]
    assert found.tied
    assert found.parameters == sum(p.numel() for p in module.parameters())
    assert found.active_parameters == pytest.approx(found.parameters, rel=0.01)
    assert list(module.layers) == layers
    assert [a.causal for a in found.facts.attentions] == [True, False]
    assert found.blocks[0].gated


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = build(Spec(layers=1)), build(Spec(layers=1))

    def forward(self, ids: object) -> object:
        return self.first(ids)["logits"] + self.second(ids)["logits"]


def test_refusals() -> None:
    for model, code in (("llama3-8c", "SC020"), ("hf:Nothing", "SC020"), (Two(), "SC022")):
        with pytest.raises(PlanError) as caught:
            read_shape(model) if isinstance(model, str) else model_shape(model)
        assert caught.value.diagnostics[0].code == code
    with pytest.raises(PlanError, match="did you mean llama3-8b"):
        read_shape("llama3-8c")


def test_names_need_no_module() -> None:
    assert isinstance(read_shape("gpt-175b"), ModelShape)
