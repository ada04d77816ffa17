"""`seqcomp.explain` of models that take other things than token ids."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.integrations.sample import SampleInputs
from seqcomp.report.build import Report
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.zoo.entry import BATCH, SMALL, built, hf
from tests.zoo.others import BY_HAND, PORTRAIT, VISION_SPEECH

ZOO = {entry.name: entry for entry in (*VISION_SPEECH, *BY_HAND)}
VIT = "hf:ViTModel?" + "&".join(
    f"{name}={value}"
    for name, value in {**PORTRAIT, "image_size": "[40,24]", "num_hidden_layers": 1}.items()
)
BERT = hf("BertModel", **{**SMALL, "num_hidden_layers": 1})


def said(model: nn.Module, context: Any, local: Mapping[str, Any]) -> Report:
    """Of a compiled module after a call."""
    model(**local)
    return seqcomp.of(model).report()


@pytest.mark.parametrize(
    ("name", "plan", "length"),
    [
        ("ViT, from images", plans.megatron(2), 16),
        ("DiT, adaLN, cross attention", plans.ulysses(2), 32),
    ],
)
def test_it_says_what_the_compiled_module_does(name: str, plan: plans.Plan, length: int) -> None:
    """A call is made up, or sizes are taken from the one that is given."""
    model, call = built(ZOO[name]), ZOO[name].call()
    (report, *_) = lockstep(lambda: copy.deepcopy(model), plan, said, inputs=call)
    made_up = name.startswith("ViT")
    given = None if made_up else {n: x.to(torch.float32) for n, x in call.items()}
    found = seqcomp.explain(
        model, plan, seq_len=length, batch=BATCH, dtype="fp64", example_inputs=given
    )
    assert found.comm
    assert found.comm == report.comm
    assert found.work == report.work
    assert found.footprint == report.footprint
    assert (found.batch, found.length) == (BATCH, length)


def test_models_on_meta_pick_single_tokens() -> None:
    """A sentence encoder's pooler reads one, at a position that is a constant on the host."""
    with torch.device("meta"):
        model = BERT()
    found = seqcomp.explain(model, "ring_2", seq_len=32)
    (row, *_) = [r for r in found.comm if r.module == "pooler.dense" and r.phase == "forward"]
    assert row.bytes_sent == 64 * 4  # one token, summed over two ranks


def test_another_length_than_that_of_the_images() -> None:
    with pytest.raises(PlanError) as caught:
        seqcomp.explain(VIT, "ring_2", seq_len=32)
    (item,) = caught.value.diagnostics
    assert (item.code, item.found, item.legal) == ("SC503", 32, 16)
    odd = VIT.replace("[40,24]", "[40,16]")  # 10 patches and a class token
    assert "SC206" in [d.code for d in seqcomp.validate("ring_2", odd)]


def test_images_are_drawn_for_verification() -> None:
    (images,) = SampleInputs(VIT, 2, 16)().values()
    assert (images.shape, images.dtype) == ((2, 3, 40, 24), torch.float64)
    assert images.std() > 0.5
    with pytest.raises(PlanError, match="SC503"):
        SampleInputs(VIT, 2, 32)()


class Nothing(nn.Module):
    """A forward whose arguments say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, anything: torch.Tensor) -> torch.Tensor:
        return self.linear(anything)


@pytest.mark.parametrize("call", [seqcomp.explain, seqcomp.validate])
def test_other_models_need_a_call(call: Callable[..., Any]) -> None:
    if call is seqcomp.validate:
        codes = [d.code for d in seqcomp.validate("ring_2", Nothing())]
    else:
        with pytest.raises(PlanError, match="example_inputs=") as caught:
            seqcomp.explain(Nothing(), "ring_2", seq_len=8)
        codes = [d.code for d in caught.value.diagnostics]
    assert codes == ["SC309"]
