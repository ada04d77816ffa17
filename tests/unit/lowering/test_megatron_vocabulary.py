"""Vocabularies that the tensor axis does not divide: parts of 25, 25, 25 and 22 of 97 words.

Embedding, head and loss work on parts of unequal size; what needs all words gets them padded on
the way and bare at the end. Nothing of the padding is seen in a value, a gradient or a shape.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.layout.parts import part, part_size
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import (
    CLEARLY_WRONG,
    FP64,
    compare_grads,
    field_of,
    reference,
    value_distance,
)
from tests.fixtures.lockstep import train_once, whole_gradients
from tests.fixtures.models import Spec, build, initialise, inputs

ODD = Spec(head_bias=True, kv_heads=4)
TIED = Spec(tied=True)
WORDS = ("emb.weight", "head.weight", "head.bias")


def check(plan: plans.Plan, spec: Spec, **input_args: Any) -> None:
    for rank, outcome in enumerate(train_once(plan, spec, **input_args)):
        assert outcome.loss <= 1, rank
        assert outcome.logits <= 1, rank
        assert outcome.gradient <= 1, (rank, outcome.worst)


@pytest.mark.parametrize(
    ("plan", "spec"),
    plans.in_turn(
        [
            plans.megatron(2),
            plans.megatron(4),
            plans.with_tensor(plans.ring(2, "zigzag"), 2),
            plans.with_tensor(plans.ulysses(2), 2),
            plans.with_data(plans.megatron(2), 2),
            plans.with_tensor(plans.ring(2, "striped"), 2),
        ],
        (ODD, TIED),
    ),
    ids=lambda x: plans.name(x) if isinstance(x, dict) else "tied" if x.tied else "biased",
)
def test_parity(plan: plans.Plan, spec: Spec) -> None:
    """Logits in full, loss in the model, every gradient."""
    check(plan, spec, batch=4, ignore_rows=(1,))


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(Spec(softcap=3.0, head_bias=True), id="softcap"),
        pytest.param(Spec(transposed=True), id="classes-in-the-middle"),
        pytest.param(Spec(loss="sum", labels="padded"), id="sum"),
        pytest.param(Spec(vocab=5, tied=True, kv_heads=4), id="an-empty-part"),
        pytest.param(Spec(vocab=6, head_bias=True), id="even-but-for-the-last"),
    ],
)
def test_variants(spec: Spec) -> None:
    check(plans.megatron(4), spec)


def test_parts() -> None:
    """The convention of torch.chunk and DTensor, empty parts included."""
    for size, parts in ((97, 4), (97, 2), (5, 4), (96, 4), (7, 8)):
        chunks = torch.arange(size).chunk(parts)
        for index in range(parts):
            want = chunks[index].tolist() if index < len(chunks) else []
            assert list(part(size, parts, index)) == want
        assert part_size(size, parts) == len(chunks[0])


@pytest.mark.parametrize(("spec", "degree"), [(ODD, 2), (ODD, 4), (TIED, 4), (Spec(vocab=5), 4)])
def test_each_rank_holds_its_part(spec: Spec, degree: int) -> None:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        model(**local)["loss"].backward()
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
        return shapes, seqcomp.of(model).report().findings

    whole = {n: tuple(p.shape) for n, p in build(spec).named_parameters()}
    for rank, (shapes, findings) in enumerate(
        lockstep(lambda: build(spec), plans.megatron(degree), step, inputs=inputs(spec))
    ):
        own = len(part(spec.vocab, degree, rank))
        for name in set(WORDS) & set(whole):
            assert shapes[name] == (own, *whole[name][1:]), (rank, name)
        assert not [f for f in findings if f.code in ("SC401", "SC405")]


def test_fewer_words_than_ranks() -> None:
    """The embedding stays whole, which is exact and said."""
    spec = Spec(vocab=3)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        model(**local)
        found = [f for f in seqcomp.of(model).report().findings if f.code == "SC405"]
        return dict(model.named_parameters())["emb.weight"].shape, [str(f) for f in found]

    check(plans.megatron(4), spec)
    for shape, found in lockstep(lambda: build(spec), plans.megatron(4), step, inputs=inputs(spec)):
        assert shape == (3, 32)
        assert any("emb" in text for text in found), found
        assert any("head" in text for text in found), found


class Guesses(nn.Module):
    """Uses the logits in ways that need every word."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.lm = build(spec)
        self.back = nn.Linear(spec.vocab - 1, 8, dtype=torch.float64)
        initialise(self.back, 1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.lm(input_ids)["logits"]
        spread = logits.softmax(-1).pow(2).sum() + logits.logsumexp(-1).mean()
        out = {"loss": spread + self.back(logits[..., 1:]).tanh().mean()}
        if labels is not None:
            out["loss"] = out["loss"] + nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1
            )
        return out | {"logits": logits, "best": logits.argmax(-1)}


@pytest.mark.parametrize(
    ("plan", "vocab"),
    [(plans.megatron(4), 97), (plans.with_tensor(plans.ring(2, "zigzag"), 2), 96)],
    ids=lambda x: plans.name(x) if isinstance(x, dict) else str(x),
)
def test_what_needs_every_word_gathers_them(plan: plans.Plan, vocab: int) -> None:
    spec = Spec(vocab=vocab, head_bias=True)
    batch = {k: v.clamp(min=0) for k, v in inputs(spec).items()}
    want = reference(lambda: Guesses(spec), batch)
    best = Guesses(spec)(**batch)["best"]

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        out = model(**local)
        out["loss"].backward()
        codes = {f.code for f in seqcomp.of(model).report().findings}
        return (
            value_distance(want.loss, out["loss"]),
            value_distance(want.logits, out["logits"]),
            compare_grads(want.gradients, whole_gradients(model, context), FP64),
            torch.equal(out["best"], best),
            codes,
        )

    for loss, logits, (gradient, worst), same, codes in lockstep(
        lambda: Guesses(spec), plan, step, inputs=batch
    ):
        assert loss <= 1
        assert logits <= 1
        assert gradient <= 1, worst
        assert same
        assert "SC401" in codes


@pytest.mark.parametrize("plan", [plans.megatron(4), plans.with_tensor(plans.ring(2), 2)])
def test_logits_by_tokens_or_not_at_all(plan: plans.Plan) -> None:
    want = build(ODD)(**inputs(ODD))

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        with torch.no_grad():
            out = model(**local)
        if out["logits"] is None:
            return out["loss"], None
        assert out["logits"].shape == (2, 4, 97)
        return out["loss"], seqcomp.of(model).gather(out["logits"])

    for mode in ("sharded", "drop"):
        outputs = {"outputs": {"logits": mode}}
        for loss, logits in lockstep(lambda: build(ODD), {**plan, **outputs}, step,
                                     inputs=inputs(ODD)):  # fmt: skip
            assert value_distance(want["loss"], loss) <= 1
            if mode == "sharded":
                assert value_distance(want["logits"], logits) <= 1


def test_a_loss_of_the_caller() -> None:
    """Logits in full: their cotangent comes from outside, whole on every rank."""
    batch = inputs(ODD, with_labels=False)
    weights = torch.randn(2, 16, 97, generator=torch.Generator().manual_seed(5)).double()

    def objective(out: Any) -> Tensor:
        logits = field_of(out, "logits")
        assert logits is not None
        return (logits.tanh() * weights).sum()

    want = reference(lambda: build(ODD), batch, objective=objective)

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Any:
        objective(model(**local)).backward()
        return compare_grads(want.gradients, whole_gradients(model, context))

    for gradient, worst in lockstep(lambda: build(ODD), plans.megatron(4), step, inputs=batch):
        assert gradient <= 1, worst


def test_close_and_state_dict() -> None:
    models = []

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> None:
        model(**local)
        models.append(model)

    spec = Spec(vocab=5, tied=True)
    lockstep(lambda: build(spec), plans.megatron(4), step, inputs=inputs(spec))
    original = build(spec).state_dict()
    for model in models:
        assert model.emb.weight is model.head.weight
        assert all(torch.equal(v, original[k]) for k, v in model.state_dict().items())


def test_a_padded_softmax_is_noticed() -> None:
    """Positive control: three words of logit zero more in the sum of exponentials."""
    want = reference(lambda: build(ODD), inputs(ODD))
    assert want.logits is not None
    logits, labels = want.logits[:, :-1].flatten(0, 1), inputs(ODD)["labels"][:, 1:].flatten()
    padded = nn.functional.cross_entropy(nn.functional.pad(logits, (0, 3)), labels)
    assert value_distance(want.loss, padded) > CLEARLY_WRONG


class Typed(nn.Module):
    """Tables of words, of token types and of positions; the model makes what is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(30, 16), nn.Embedding(2, 16)
        self.places, self.head = nn.Embedding(64, 16), nn.Linear(16, 30)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """ids [B, S] -> logits [B, S, V]."""
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.words(input_ids) + self.types(token_type_ids) + self.places(position_ids)
        return self.head(x)


def test_calls_with_and_without_optional_indices_cut_the_same_weights() -> None:
    ids = torch.arange(16).reshape(2, 8)
    optional = {"token_type_ids": ids % 2, "position_ids": ids % 8}
    want = typed()

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> set[str]:
        for given in ({}, optional, {"token_type_ids": ids % 2}):
            torch.testing.assert_close(model(ids, **given), want(ids, **given))
        return set(seqcomp.of(model).programs[-1].cuts)

    for cuts in lockstep(typed, plans.megatron(2), step, inputs={"input_ids": ids}):
        assert cuts == {"words.weight", "head.weight", "head.bias"}


def typed() -> Typed:
    torch.manual_seed(0)
    return Typed()
