"""Parameters are cut before the first call: what that makes up may not be what a model takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans


class Masked(nn.Module):
    """A mask that may be None by its signature, and may not in fact."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None
        return self.embed(input_ids) * mask[..., None]


def test_an_error_of_a_made_up_call_says_how_to_give_one() -> None:
    ids = torch.arange(8)[None]
    given = {"input_ids": ids, "mask": ids > 3}
    with pytest.raises(seqcomp.PlanError) as caught:
        lockstep(Masked, plans.megatron(2), lambda model, *_: model(**given), inputs=given)
    (found,) = caught.value.diagnostics
    assert found.code == "SC301"
    assert "pass example_inputs={...}" in str(found.help)
