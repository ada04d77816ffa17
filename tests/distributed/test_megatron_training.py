"""Megatron-SP in a training loop on real ranks: DTensor parameters, optimizer, clipping, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import seqcomp
from tests.fixtures import plans
from tests.fixtures.compare import whole
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.parity import data_slice, slice_batch
from tests.fixtures.pool import Pools

TIED = Spec(vocab=96, tied=True, bias=True, qk_norm=True)
ODD_TIED = Spec(vocab=97, tied=True, bias=True, qk_norm=True)
UNTIED = Spec(vocab=97, bias=True, head_bias=True)
LOW = {"rtol": 1e-9, "atol": 1e-11}
PLANS = [
    plans.megatron(2),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
    plans.with_data(plans.megatron(2), 2),
]


def compiled(spec: Spec, plan: plans.Plan, *, frozen: tuple[str, ...] = ()) -> nn.Module:
    model = build(spec)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    return seqcomp.parallelize(model, plan=plan, example_inputs=inputs(spec))


def ranks_of(plan: plans.Plan) -> int:
    world = 1
    for size in plan["mesh"].values():
        world *= size
    return world


def local_batch(spec: Spec, plan: plans.Plan, rank: int, seed: int) -> dict[str, Any]:
    part, parts = data_slice(plan, rank)
    batch = inputs(spec, seed=seed)
    return {name: slice_batch(value, part, parts) for name, value in batch.items()}


def looks(rank: int, world: int, plan: plans.Plan, spec: Spec) -> None:
    original = build(spec)
    original.norm.weight.requires_grad_(False)
    model = build(spec)
    model.norm.weight.requires_grad_(False)
    seqcomp.parallelize(model, plan=plan, example_inputs=inputs(spec))
    before = dict(original.named_parameters(remove_duplicate=False))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(before) == list(after)
    for name, parameter in after.items():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor), name
        assert parameter.shape == before[name].shape, name
        assert parameter.dtype == before[name].dtype
        assert parameter.requires_grad == before[name].requires_grad, name
    assert model.head.weight is model.emb.weight
    assert after["layers.0.attn.q.weight"].placements == (Shard(0),)
    assert after["layers.0.attn.o.weight"].placements == (Shard(1),)
    assert after["layers.0.attn.q.weight"].to_local().shape == (16, 32)
    assert after["emb.weight"].placements == (Shard(0),)
    words = spec.vocab // 2 + (spec.vocab % 2 if rank == 0 else 0)
    assert after["emb.weight"].to_local().shape == (words, 32)
    assert after["emb.weight"].stride() == before["emb.weight"].stride()
    assert after["layers.0.n1.weight"].placements == (Replicate(),)
    assert after["layers.0.attn.o.bias"].placements == (Replicate(),)
    state = model.state_dict()
    assert list(state) == list(original.state_dict())
    for name, value in original.state_dict().items():
        assert torch.equal(whole(state[name]), value), name
    # A state dict of whole tensors made into DTensors loads back; the module stays compiled.
    doubled = {
        name: value * 2 if value.is_floating_point() else value for name, value in state.items()
    }
    model.load_state_dict(doubled)
    for name, value in original.state_dict().items():
        assert torch.equal(whole(model.state_dict()[name]), value * 2), name
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
    loss = model(**inputs(spec))["loss"]
    torch.testing.assert_close(loss, original(**inputs(spec))["loss"], **LOW)
    seqcomp.of(model).close()
    closed = dict(model.named_parameters(remove_duplicate=False))
    assert model.head.weight is model.emb.weight
    for name, parameter in closed.items():
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad == before[name].requires_grad
        assert torch.equal(parameter, before[name]), name
    # The closed module is the original again.
    model(**inputs(spec))["loss"].backward()


@pytest.mark.distributed
@pytest.mark.parametrize("spec", [TIED, ODD_TIED], ids=["even", "odd"])
def test_parameters_are_dtensors_with_the_original_names_and_shapes(
    pools: Pools, spec: Spec
) -> None:
    pools.run(2, looks, plans.megatron(2), spec)


def train(
    model: nn.Module, batches: list[dict[str, Any]], kind: str, max_norm: float
) -> list[float]:
    """Norms of the gradients before clipping, and the losses, step by step."""
    if kind == "adamw":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        seen += [float(whole(norm)), float(loss.detach())]
    return seen


def steps(rank: int, world: int, plan: plans.Plan, kind: str) -> dict[str, bytes]:
    """Trains next to one process; returns the local bytes of what tensor ranks replicate."""
    spec = TIED if kind == "adamw" else UNTIED
    alone = build(spec)
    want = train(alone, [inputs(spec, seed=s) for s in (1, 2, 3)], kind, 0.5)
    model = compiled(spec, plan)
    got = train(model, [local_batch(spec, plan, rank, s) for s in (1, 2, 3)], kind, 0.5)
    assert got == pytest.approx(want, rel=1e-8)
    assert want[0] > 0.5, "nothing is clipped"
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-7, atol=1e-9, msg=name)
    replicas = {
        name: p.to_local().detach().numpy().tobytes()
        for name, p in model.named_parameters()
        if isinstance(p, DTensor) and p.placements == (Replicate(),)
    }
    cut = {
        name: p.to_local().detach().numpy().tobytes()
        for name, p in model.named_parameters()
        if isinstance(p, DTensor) and p.placements != (Replicate(),)
    }
    coordinate = seqcomp.of(model).context.coords["tensor"]
    seqcomp.of(model).close()
    return replicas | {f"{name} of {coordinate}": value for name, value in cut.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_case_15_three_clipped_steps(pools: Pools, plan: plans.Plan, kind: str) -> None:
    """Norms, losses and weights equal one process, and replicas stay equal bit by bit."""
    seen: dict[str, bytes] = {}
    for rank in pools.run(ranks_of(plan), steps, plan, kind):
        assert rank
        for name, value in rank.items():
            assert seen.setdefault(name, value) == value, name
    assert any(name.endswith("of 1") for name in seen)
    assert "layers.0.n1.weight" in seen


def frozen_run(rank: int, world: int) -> None:
    """Only the last MLP learns, as with adapters."""
    frozen = ("emb", "layers.0", "layers.1.attn", "layers.1.n1", "norm", "head")
    model = compiled(UNTIED, plans.megatron(2), frozen=frozen)
    reference = build(UNTIED)
    reference(**inputs(UNTIED))["loss"].backward()
    context = seqcomp.of(model).context
    context.traffic.reset()
    model(**inputs(UNTIED))["loss"].backward()
    labels = {row.label for row in context.traffic.rows() if row.phase == "backward"}
    assert not any(label.startswith(frozen[:3]) for label in labels), labels
    assert any(label.startswith("layers.1.mlp") for label in labels), labels
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name.startswith(frozen):
            assert p.grad is None, name
        else:
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(whole(p.grad), q.grad, **LOW)
    seqcomp.of(model).close()


@pytest.mark.distributed
def test_frozen_parameters_cost_nothing(pools: Pools) -> None:
    pools.run(2, frozen_run)


def accumulate(rank: int, world: int) -> None:
    """Two backwards add up, with the cut weights' gathers asked for twice."""
    alone, model = build(UNTIED), compiled(UNTIED, plans.megatron(2))
    for seed in (1, 2):
        alone(**inputs(UNTIED, seed=seed))["loss"].backward()
        model(**inputs(UNTIED, seed=seed))["loss"].backward()
    # Both forwards before both backwards, too.
    pair: list[list[Tensor]] = [
        [m(**inputs(UNTIED, seed=s))["loss"] for s in (3, 4)] for m in (alone, model)
    ]
    for losses in pair:
        sum(losses).backward()  # type: ignore[union-attr]
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(whole(p.grad), q.grad, **LOW)
    seqcomp.of(model).close()


@pytest.mark.distributed
def test_gradients_accumulate(pools: Pools) -> None:
    pools.run(2, accumulate)
