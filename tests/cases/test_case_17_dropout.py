"""Case 17: one mask for the whole, however it is cut, in recomputation, and on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import CLEARLY_WRONG, compare_grads, value_distance
from tests.fixtures.dropping import SEED, batch, build, one_device, recompute
from tests.fixtures.lockstep import whole_gradients

PLANS = [
    plans.ring(1),
    plans.ring(2, "contiguous"),
    plans.ring(4, "zigzag"),
    plans.ring(2, "striped"),
    plans.ulysses(2),
    plans.usp(2, 2, "zigzag"),
    plans.megatron(2),
    plans.with_data(plans.ring(2, "zigzag"), 2),
    plans.with_data(plans.with_tensor(plans.usp(2, 1, "striped"), 2), 2),
]
BATCHES = [batch(i) for i in range(3)]


class Raw(nn.Module):
    """A function of an input [B, S, D], after a weight that shares out its tokens."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(x * self.scale)


@cache
def expected(count: int) -> Any:
    return one_device(BATCHES[:count])


def share(batches: list[dict[str, Tensor]], context: RankContext) -> list[dict[str, Tensor]]:
    part, parts = context.coords.get("data", 0), context.sizes.get("data", 1)
    return [{n: x.chunk(parts)[part] for n, x in given.items()} for given in batches]


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_training_is_that_of_one_device(plan: plans.Plan) -> None:
    """Residual, embedding and attention dropout (fused and written out): three micro-batches with
    three masks, then the first again with its layers recomputed in backward."""

    def on_rank(model: nn.Module, context: RankContext, _: Any) -> Any:
        own = share(BATCHES, context)
        torch.manual_seed(SEED)
        losses = []
        for given in own:
            loss = model(**given)["loss"]
            loss.backward()
            losses.append(loss.detach())
        found = [(losses, whole_gradients(model, context))]
        recompute(model, reentrant=context.world_size % 4 == 0)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(SEED)
            loss = model(**own[0])["loss"]
            loss.backward()
            found.append(([loss.detach()], whole_gradients(model, context)))
        return found

    wanted = [expected(3), expected(1), expected(1)]
    for rank in lockstep(build, plan, on_rank):
        for (losses, gradients), (want_losses, want) in zip(rank, wanted, strict=True):
            for loss, want_loss in zip(losses, want_losses, strict=True):
                assert value_distance(want_loss, loss) <= 1
            distance, worst = compare_grads(want, gradients)
            assert distance <= 1, worst
        assert rank[0][0][0] == rank[1][0][0] == rank[2][0][0], "the same seed, another loss"
        assert len({float(loss) for loss in rank[0][0]}) == 3
        first, again = rank[1][1], rank[2][1]
        assert all(torch.equal(first[n], again[n]) for n in first)


def test_other_masks_would_show() -> None:
    losses, gradients = one_device(BATCHES[:1], SEED + 1)
    assert value_distance(expected(1)[0][0], losses[0]) > CLEARLY_WRONG
    assert compare_grads(expected(1)[1], gradients)[0] > CLEARLY_WRONG


def test_the_same_batch_again_has_another_mask_and_the_state_brings_it_back() -> None:
    def on_rank(model: nn.Module, context: RankContext, local: dict[str, Tensor]) -> Any:
        def loss() -> float:
            return float(model(**local)["loss"].detach())

        torch.manual_seed(SEED)
        found = [loss(), loss()]
        context.host.all_max([0])
        state = torch.get_rng_state()
        found.append(loss())
        context.host.all_max([0])
        torch.set_rng_state(state)
        found += [loss(), loss()]
        model.eval()
        context.host.all_max([0])
        before = torch.get_rng_state()
        found += [loss(), loss()]
        return found, bool(torch.equal(before, torch.get_rng_state()))

    ranks = lockstep(build, plans.ring(2, "zigzag"), on_rank, inputs=batch())
    for (first, second, third, again, other, calm, calm_too), untouched in ranks:
        assert len({first, second, third, other, calm}) == 5
        assert again == third
        assert calm == calm_too
        assert untouched, "without dropout nothing is drawn"
    assert ranks[0][0] == ranks[1][0]


ONES = {"x": torch.ones(1, 16, 4)}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_shards_of_ones(layout: str) -> None:
    def body(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    def on_rank(model: nn.Module, context: RankContext, local: dict[str, Tensor]) -> Any:
        torch.manual_seed(SEED)
        return model(**local), seqcomp.of(model).token_index()

    plan = {**plans.ring(4, layout), "outputs": {"output": "sharded"}}
    ranks = lockstep(lambda: Raw(body), plan, on_rank, inputs=ONES)
    (want, _), *_ = lockstep(lambda: Raw(body), plans.ring(1), on_rank, inputs=ONES)
    assert set(want.unique().tolist()) == {0.0, 2.0}
    for shard, index in ranks:
        assert torch.equal(shard, want[:, index])
    shards = [shard for shard, _ in ranks]
    assert all(not torch.equal(a, b) for i, a in enumerate(shards) for b in shards[:i]), (
        "two shards have one mask"
    )


FORMS: dict[str, Any] = {
    "flat tokens": lambda x: F.dropout(x.view(-1, 4), 0.5).view(x.shape),
    "heads": lambda x: F.dropout(x.unflatten(2, (2, 2)).transpose(1, 2), 0.5)
    .transpose(1, 2).flatten(2),
    "in place": lambda x: (x * 2 + F.dropout(x + 0, 0.5, inplace=True)),
    "everything": lambda x: 2 * x + F.dropout(x, 1.0),
    "tokens as channels": lambda x: F.dropout1d(x, 0.5),
    "features as channels": lambda x: F.dropout1d(x.transpose(1, 2), 0.5).transpose(1, 2),
    "images": lambda x: F.dropout2d(x.unflatten(2, (2, 2)), 0.5).flatten(2),
    "of the whole": lambda x: x + F.dropout(torch.ones(16, 4), 0.5),
    "of routers": lambda x: x * F.dropout(x.softmax(-1), 0.5),
    "of a sum": lambda x: x * F.dropout(x.sum((0, 1)), 0.5),
    "twice": lambda x: F.dropout(F.dropout(x, 0.5), 0.5),
}  # fmt: skip


def test_forms() -> None:
    """With several axes at once; replicated values have the same bits everywhere."""
    plan = plans.with_data(plans.usp(2, 2, "zigzag"), 2)
    x = torch.randn(4, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def on_rank(model: nn.Module, context: RankContext, local: dict[str, Tensor]) -> Any:
        torch.manual_seed(SEED)
        return model(**local)

    def make() -> nn.Module:
        return Raw(lambda x: {name: form(x) for name, form in FORMS.items()}).double()

    ranks, again = (lockstep(make, plan, on_rank, inputs={"x": x}) for _ in range(2))
    (want,) = lockstep(make, plans.ring(1), on_rank, inputs={"x": x})
    for name in FORMS:
        assert not torch.equal(want[name], x), name
        for rank, got in enumerate(ranks):
            assert torch.allclose(got[name], want[name].chunk(2)[rank // 4], rtol=1e-12), name
            assert torch.equal(got[name], ranks[rank // 4 * 4][name]), name
            assert torch.equal(got[name], again[rank][name]), name


def test_a_padded_sequence() -> None:
    given = batch(5, length=13)
    losses, want = one_device([given])
    plan = plans.padded(plans.usp(2, 2, "zigzag"))

    def on_rank(model: nn.Module, context: RankContext, local: dict[str, Tensor]) -> Any:
        torch.manual_seed(SEED)
        loss = model(**local)["loss"]
        loss.backward()
        return loss.detach(), whole_gradients(model, context)

    for loss, gradients in lockstep(build, plan, on_rank, inputs=given):
        assert value_distance(losses[0], loss) <= 1
        assert compare_grads(want, gradients)[0] <= 1


class TorchLayers(nn.Module):
    """torch's own decoder layer: attention as a module, with and without weights, and cross
    attention to a memory that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(48, 16)
        self.layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        self.attn = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True)
        self.memory = nn.Parameter(torch.randn(6, 16))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.emb(input_ids)
        x = self.layer(x, self.memory.expand(len(x), -1, -1))
        return x + self.attn(x, x, x, need_weights=True)[0]


@pytest.mark.parametrize(
    "plan",
    [plans.ring(2, "striped"), plans.with_tensor(plans.ring(2, "zigzag"), 2)],
    ids=plans.name,
)
def test_modules_of_torch(plan: plans.Plan) -> None:
    report = seqcomp.verify(lambda: TorchLayers().double(), plan, inputs_fn=batch)
    assert report.ok, str(report)
    assert any("SC413" in finding for finding in report.findings)


class DroppedBias(nn.Module):
    """A bias of attention, of all heads, that is dropped itself."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(48, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.emb(input_ids).unflatten(2, (2, 8)).transpose(1, 2)
        far = torch.arange(x.shape[2], dtype=x.dtype)
        bias = F.dropout(-(far[:, None] - far).abs(), 0.5)
        return F.scaled_dot_product_attention(x, x, x, bias, dropout_p=0.2)


def test_a_bias_that_is_dropped() -> None:
    plan = plans.ring(2, "zigzag")
    report = seqcomp.verify(lambda: DroppedBias().double(), plan, inputs_fn=batch)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["GPT2", "Bert"])
def test_models_of_transformers(name: str) -> None:
    """With the dropout that their configurations have by default."""
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 16}
    head = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM"}[name]
    more = {"GPT2": {"n_positions": 32}, "Bert": {"intermediate_size": 32}}[name]

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**common, **more)
        return getattr(transformers, f"{name}{head}")(config).double().train()

    def inputs() -> dict[str, Tensor]:
        ids = batch()["input_ids"]
        return {"input_ids": ids, "labels": ids}

    report = seqcomp.verify(make, plans.usp(2, 2), inputs_fn=inputs)
    assert report.ok, str(report)
    assert any("SC413" in finding for finding in report.findings)


def test_a_changed_rate_is_noticed() -> None:
    def on_rank(model: nn.Module, context: RankContext, local: dict[str, Tensor]) -> list[Tensor]:
        found = []
        for p in (0.5, 1.0):
            model.body.p = p
            found.append(model(**local))
        return found

    for some, none in lockstep(lambda: Raw(nn.Dropout(0.5)), plans.ring(2), on_rank, inputs=ONES):
        assert some.any()
        assert not none.any()


REFUSED: dict[str, tuple[Any, str]] = {
    "alpha": (lambda x: F.alpha_dropout(x, 0.5, training=True), "SC308"),
    "alpha by channel": (lambda x: F.feature_alpha_dropout(x, 0.5, training=True), "SC308"),
    "noise": (lambda x: x + torch.rand_like(x), "SC308"),
    "three dims": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "SC304"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_random_numbers_are_refused(name: str) -> None:
    body, code = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        lockstep(lambda: Raw(body), plans.ring(2), lambda m, c, x: m(**x), inputs=ONES)
    assert {d.code for d in caught.value.diagnostics} == {code}


def test_dropout_of_another_kind_may_be_off() -> None:
    body = lambda x: F.alpha_dropout(x, 0.5, training=False)  # noqa: E731
    for out in lockstep(lambda: Raw(body), plans.ring(2), lambda m, c, x: m(**x), inputs=ONES):
        assert torch.equal(out, ONES["x"])
