"""A sample of the support table on real ranks, over gloo: one row of each kind of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.fixtures import plans
from tests.fixtures.compare import FP64_WITH_FP32_INSIDE
from tests.fixtures.parity import Call, Case, check_parity
from tests.fixtures.pool import Pools
from tests.zoo.cells import EXACT, PLANS, ZOO
from tests.zoo.entry import built
from tests.zoo.table import load

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

SAMPLE = (
    ("Mistral, window, packed", "USP"),
    ("Llama, padded left", "ring, zigzag"),
    ("Gemma 2, eager, softcap", "ring x Megatron-SP"),
    ("MPT, ALiBi", "Megatron-SP"),
    ("gpt-oss, sinks, window, batched_mm", "USP"),
    ("T5, padded encoder", "ring x Megatron-SP"),
    ("EuroBERT", "Ulysses"),
    ("BART, longer target", "USP"),
    ("wav2vec 2", "Megatron-SP"),
)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)  # of what a model draws itself, the same on every rank
    model = built(ZOO[name])
    if hasattr(model.config, "use_cache"):
        # With a cache transformers does not separate packed documents.
        model.config.use_cache = False
    return model


def make_inputs(name: str) -> dict[str, Any]:
    return ZOO[name].call()


@pytest.mark.parametrize(("name", "plan"), SAMPLE, ids=[" - ".join(row) for row in SAMPLE])
def test_row(pools: Pools, name: str, plan: str) -> None:
    assert load()[name][plan].startswith(EXACT)
    given: plans.Plan = dict(PLANS[plan])
    if ZOO[name].inputs is not None:
        given["inputs"] = ZOO[name].inputs
    case = Case(
        given, name, (Call(mode="eval"),), build, make_inputs, FP64_WITH_FP32_INSIDE,
        example="input_ids" not in make_inputs(name),
    )  # fmt: skip
    check_parity(pools, case, timeout=240)
