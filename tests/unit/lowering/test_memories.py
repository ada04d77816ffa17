"""Attention over a memory of another length, with masks of all kinds: each rank has its queries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import FP64, compare_grads, reference, value_distance
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.models import default_dtype, initialise

VOCAB, HIDDEN, HEADS, S, KEYS = 31, 16, 4, 16, 10

MaskFn = Callable[["Cross", Tensor], Tensor]
"""(branch, keep [B, keys]) -> mask."""


def places() -> tuple[Tensor, Tensor]:
    return torch.arange(S)[:, None], torch.arange(KEYS)


MASKS: dict[str, MaskFn] = {
    "padding": lambda m, keep: keep[:, None, None] == 1,
    "added": lambda m, keep: (1.0 - keep[:, None, None].double()) * -1e4,
    "rule": lambda m, keep: (places()[0] >= 2 * places()[1]) | (places()[1] == 0),
    "rows": lambda m, keep: ((places()[0] + places()[1]) % 3 > 0) & (keep[:, None, None] == 1),
    "heads": lambda m, keep: m.bias,
    "heads_and_padding": lambda m, keep: m.bias[None].masked_fill(
        keep[:, None, None] == 0, -torch.inf),
}  # fmt: skip


class Cross(nn.Module):
    def __init__(self, mask: MaskFn | None) -> None:
        super().__init__()
        self.mask = mask
        self.q, self.kv = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.bias = nn.Parameter(torch.zeros(HEADS, S, KEYS))

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in (self.q(x), *self.kv(memory).chunk(2, -1))
        )
        mask = None if self.mask is None else self.mask(self, keep)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return y.transpose(1, 2).flatten(2)


class Reader(nn.Module):
    def __init__(self, *masks: MaskFn | None) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.cross = nn.ModuleList(Cross(mask) for mask in masks)
        # Named sizes that are equal are still different dims: HIDDEN features, S tokens.
        assert HIDDEN == S
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True, add_bias_kv=True)

    def forward(self, ids: Tensor, memory: Tensor, keep: Tensor) -> dict[str, Tensor]:
        x = self.emb(ids)
        y = x + sum(cross(x, memory, keep) for cross in self.cross)
        y = y + self.attention(x, memory, memory, key_padding_mask=keep == 0)[0]
        logits = self.head(y)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


def make(*masks: MaskFn | None) -> Reader:
    with default_dtype(torch.float64):
        model = Reader(*masks)
    initialise(model, 0)
    return model


def inputs() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1)
    keep = torch.ones(2, KEYS, dtype=torch.long)
    keep[0, 6:] = 0
    return {
        "ids": torch.randint(VOCAB, (2, S), generator=made),
        "memory": torch.randn(2, KEYS, HIDDEN, generator=made, dtype=torch.float64),
        "keep": keep,
    }


GIVEN = {"inputs": {"memory": {"batch": 0}, "keep": {"batch": 0}}}


@pytest.mark.parametrize(
    "plan",
    [plans.usp(2, 2, "zigzag"), plans.with_tensor(plans.ring(2, "striped"), 2)],
    ids=plans.name,
)
def test_masks_between_lengths(plan: plans.Plan) -> None:
    def model() -> Reader:
        return make(*MASKS.values())

    want = reference(model, inputs())

    def step(model: nn.Module, context, local):
        out = model(**local)
        out["loss"].backward()
        worst = compare_grads(want.gradients, whole_gradients(model, context), FP64)
        return value_distance(want.logits, out["logits"]), worst

    for logits, (gradient, worst) in lockstep(
        model, {**plan, **GIVEN}, step, inputs=inputs(), timeout=300, prepare=True
    ):
        assert logits <= 1
        assert gradient <= 1, worst


def test_causal_between_lengths_is_refused_with_what_to_paste() -> None:
    plan = {**plans.ring(2), **GIVEN}

    def call(model: nn.Module, context, local) -> list[str]:
        try:
            model(**local)
        except PlanError as error:
            return [d.help for d in error.diagnostics if d.code == "SC303"]
        return []

    for found in lockstep(lambda: make(None), plan, call, inputs=inputs()):
        assert found == [
            'run it on the whole sequence: overrides: [{match: "cross.0", gather: true}]'
        ]
    report = seqcomp.verify(
        lambda: make(None),
        {**plan, "overrides": [{"match": "cross.0", "gather": True}]},
        inputs_fn=inputs,
    )
    assert report.ok, str(report)
