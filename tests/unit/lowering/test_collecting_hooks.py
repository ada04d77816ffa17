"""transformers collects outputs by hooks that it leaves on the modules: no reason to refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.families import build_family, family_inputs


def collected(model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    return [x.detach() for x in model(**given, output_hidden_states=True).hidden_states]


def test_calls_that_collect_outputs_are_compiled_again_and_after_eager_ones() -> None:
    given = family_inputs()
    alone = build_family("llama")
    want = collected(alone, given)

    def make() -> nn.Module:
        model = build_family("llama")
        collected(model, given)  # eager
        return model

    def on_rank(model: nn.Module, context: Any, local: dict[str, Any]) -> list[Any]:
        found = [collected(mode(), local) for mode in (model.train, model.eval)]
        with torch.no_grad():
            return [*found, collected(model, local)]

    for rank in lockstep(make, plans.ring(2), on_rank, inputs=given):
        for found in rank:
            assert len(found) == len(want) == 3
            for x, y in zip(found, want, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
