"""`padding: pad` where one input is used whole and in pieces, and where nothing can be padded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.models import default_dtype, initialise

VOCAB, HIDDEN, S = 31, 16, 23
PLAN = {**plans.ring(3), "padding": "pad"}


class Model(nn.Module):
    """Positions counted over what is no padding, and a loss weighted by it; `fixed` adds a ramp."""

    def __init__(self, *, fixed: bool = False) -> None:
        super().__init__()
        self.emb, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(S, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.fixed = fixed

    def forward(self, ids: Tensor, keep: Tensor) -> dict[str, Tensor]:
        at = (keep.cumsum(1) - 1).masked_fill(keep == 0, 1)
        x = self.emb(ids) + self.places(at)
        if self.fixed:
            x = x + torch.linspace(0, 1, ids.shape[1])[:, None]
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=keep[:, None, None].bool())
        logits = self.head(x + y.transpose(1, 2).flatten(2))
        loss = (logits.logsumexp(-1) ** 2 * keep).sum() / keep.sum()
        return {"loss": loss, "logits": logits}


def make(*, fixed: bool = False) -> Model:
    with default_dtype(torch.float64):
        model = Model(fixed=fixed)
    initialise(model, 0)
    return model


def inputs() -> dict[str, Tensor]:
    keep = torch.ones(2, S, dtype=torch.long)
    keep[0, :3] = keep[1, -4:] = 0
    return {"ids": torch.arange(2 * S).view(2, S) % VOCAB, "keep": keep}


def test_an_input_that_is_cut_once_for_all_its_uses() -> None:
    report = seqcomp.verify(make, PLAN, inputs_fn=inputs)
    assert report.ok, str(report)


def test_what_fixes_the_length_is_refused() -> None:
    def call(model: nn.Module, context, local) -> list[tuple[str, str]]:
        try:
            model(**local)
        except PlanError as error:
            return [(d.code, d.found) for d in error.diagnostics]
        return []

    found = lockstep(lambda: make(fixed=True), PLAN, call, inputs=inputs())
    assert found == [[("SC212", f"an operation fixes the length {S}")]] * 3
