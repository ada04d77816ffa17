"""Rows that numbers hide whole, in every way that users write them: the value and the derivative.

Each form is a branch of one model; row 0 is padded on the left, row 1 is padding alone, and all
labels count, so that what is hidden has gradients too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import FP64, compare_grads, reference, value_distance
from tests.fixtures.lockstep import whole_gradients
from tests.fixtures.models import default_dtype, initialise

VOCAB, HIDDEN, HEADS, S = 31, 16, 4, 24
LOW = torch.finfo(torch.float64).min

Form = Callable[["Branch", Tensor, Tensor, Tensor], Tensor]
"""(branch, scores [B, H, S, S], later [S, S], padding [B, 1, 1, S]) -> what softmax is given."""


def added(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, LOW)


def with_sinks(branch: Branch, scores: Tensor) -> Tensor:
    column = branch.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1)


def threshold(branch: Branch, scores: Tensor, later: Tensor, padding: Tensor) -> Tensor:
    least = scores.topk(3, -1).values[..., -1:]
    return scores.masked_fill((scores < least) | later | padding, LOW)


FORMS: dict[str, Form] = {
    "filled": lambda m, s, later, pad: s.masked_fill(later | pad, LOW),
    "filled_1e9": lambda m, s, later, pad: s.masked_fill((later | pad) == 1, -1e9),
    "filled_twice": lambda m, s, later, pad: s.masked_fill(later, -1e9).masked_fill(pad, -1e10),
    "filled_then_added": lambda m, s, later, pad: torch.where(later, LOW, s) + added(pad),
    "capped": lambda m, s, later, pad: (s / 2).tanh() * 2 + added(later | pad),
    "capped_and_filled": lambda m, s, later, pad: torch.where(
        ~later, (s / 2).tanh() * 2, LOW) + added(pad),
    "biased_and_filled": lambda m, s, later, pad: (
        s + m.slopes.view(-1, 1, 1) * torch.arange(S)).masked_fill(later | pad, LOW),
    "sinks": lambda m, s, later, pad: with_sinks(m, s + added(later | pad)),
    "sinks_and_filled": lambda m, s, later, pad: with_sinks(m, s.masked_fill(later | pad, LOW)),
    "threshold": threshold,
}  # fmt: skip


class Branch(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.sinks, self.slopes = (nn.Parameter(torch.zeros(HEADS)) for _ in range(2))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1])
        scores = self.form(self, q @ k.mT / 2, at > at[:, None], keep[:, None, None] == 0)
        weights = scores.softmax(-1)
        weights = weights[..., :-1] if weights.shape[-1] > k.shape[2] else weights
        return (weights @ v).transpose(1, 2).flatten(2)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.branches = nn.ModuleDict({name: Branch(form) for name, form in FORMS.items()})

    def forward(self, ids: Tensor, keep: Tensor) -> dict[str, Tensor]:
        x = self.emb(ids)
        logits = self.head(x + sum(branch(x, keep) for branch in self.branches.values()))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


def make() -> Hidden:
    with default_dtype(torch.float64):
        model = Hidden()
    initialise(model, 0)
    return model


@pytest.mark.parametrize(
    "plan",
    [plans.usp(2, 2, "striped"), plans.with_tensor(plans.ring(2, "zigzag"), 2)],
    ids=plans.name,
)
def test_what_is_hidden_has_the_derivative_of_one_device(plan: plans.Plan) -> None:
    keep = torch.ones(2, S, dtype=torch.long)
    keep[0, :7] = keep[1] = 0
    batch = {"ids": torch.randint(VOCAB, (2, S), generator=torch.Generator().manual_seed(1))}
    batch["keep"] = keep
    want = reference(make, batch)
    assert want.loss is not None

    def step(model: nn.Module, context, local):
        out = model(**local)
        out["loss"].backward()
        worst = compare_grads(want.gradients, whole_gradients(model, context), FP64)
        codes = {d.code for d in seqcomp.of(model).report().findings}
        return value_distance(want.logits, out["logits"]), worst, codes

    for logits, (gradient, worst), codes in lockstep(
        make, plan, step, inputs=batch, timeout=300, prepare=True
    ):
        assert logits <= 1
        assert gradient <= 1, worst
        assert "SC209" not in codes
