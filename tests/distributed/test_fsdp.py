"""Parameters sharded by FSDP2 under a plan: values, division, training, and the way back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import seqcomp
from seqcomp.training.materialise import materialise
from tests.fixtures import plans
from tests.fixtures.compare import whole
from tests.fixtures.lockstep import counted, reported
from tests.fixtures.models import M0, Decoder, Spec, build, default_dtype, inputs
from tests.fixtures.parity import Call, Case, check_parity, data_slice, slice_batch
from tests.fixtures.pool import Pools

UNEVEN = Spec(vocab=97, bias=True, head_bias=True)
TIED = Spec(vocab=96, tied=True, bias=True, qk_norm=True)
USP = plans.with_fsdp(plans.usp(2, 2, "zigzag"))
HSDP = plans.with_fsdp(plans.with_data(plans.ring(2, "zigzag"), 2), "ring")
HSDP_ACROSS = plans.with_fsdp(plans.with_data(plans.ulysses(2), 2), "data")
BOTH = plans.with_fsdp(plans.with_data(plans.ring(2, "striped"), 2))
MEGATRON = plans.with_fsdp(plans.with_tensor(plans.ring(2, "zigzag"), 2))
SHARDED_DATA = {"mesh": {"data": 2}, "strategies": {"data": {}, "fsdp": {}}}
CALLS = (
    Call({"batch": 4, "seq": 16}),
    Call({"batch": 2, "seq": 8}, mode="eval", objective="logits"),
    Call({"batch": 2, "seq": 16}, mode="no_grad"),
    Call({"batch": 2, "seq": 16}, mode="train"),
)


def ranks_of(plan: plans.Plan) -> int:
    return math.prod(plan["mesh"].values())


def compiled(spec: Spec, plan: plans.Plan, **kinds: Any) -> nn.Module:
    return seqcomp.parallelize(build(spec, **kinds), plan=plan, example_inputs=inputs(spec))


def local_batch(spec: Spec, plan: plans.Plan, rank: int, **given: Any) -> dict[str, Any]:
    part, parts = data_slice(plan, rank)
    return {name: slice_batch(x, part, parts) for name, x in inputs(spec, **given).items()}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "spec"),
    [
        (USP, UNEVEN),
        (HSDP, TIED),
        (HSDP_ACROSS, M0),
        (BOTH, TIED),
        (MEGATRON, UNEVEN),
        (MEGATRON, TIED),
        (SHARDED_DATA, M0),
    ],
    ids=lambda x: plans.name(x) if isinstance(x, dict) else "tied" if x.tied else f"{x.vocab}",
)
def test_parity(pools: Pools, plan: plans.Plan, spec: Spec) -> None:
    check_parity(pools, Case(plan, spec, CALLS, example=True))


# --- training ------------------------------------------------------------------------------


def train(rank: int, world: int, plan: plans.Plan, steps: int, *, sync: bool) -> list[float]:
    """AdamW, clipped, over three micro-batches a step; next to one process."""
    alone, model = build(TIED), compiled(TIED, plan)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, model)]
    norms = []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(3):
            seed, last = 3 * step + micro, micro == 2
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(sync or last)
            model(**local_batch(TIED, plan, rank, batch=2, seq=16, seed=seed))["loss"].backward()
            alone(**inputs(TIED, batch=2, seq=16, seed=seed))["loss"].backward()
        got, want = (
            float(whole(nn.utils.clip_grad_norm_(m.parameters(), 0.5))) for m in (model, alone)
        )
        assert got == pytest.approx(want, rel=1e-9)
        norms.append(want)
        for optimizer in optimizers:
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-8, atol=1e-9, msg=name)
    seqcomp.of(model).close()
    return norms


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "sync"),
    [(USP, True), (HSDP, False), (MEGATRON, True), (MEGATRON, False)],
    ids=lambda x: plans.name(x) if isinstance(x, dict) else "each" if x else "last",
)
def test_twenty_clipped_steps_of_three_micro_batches(
    pools: Pools, plan: plans.Plan, sync: bool
) -> None:
    """Gradients summed after each micro-batch, or once after the last."""
    for norms in pools.run(ranks_of(plan), _train, plan, 20, sync):
        assert max(norms) > 0.5, "nothing is clipped"


def _train(rank: int, world: int, plan: plans.Plan, steps: int, sync: bool) -> list[float]:
    return train(rank, world, plan, steps, sync=sync)


# --- division ------------------------------------------------------------------------------


def divided(rank: int, world: int, plan: plans.Plan, ways: int) -> None:
    spec = TIED if "tensor" not in plan["mesh"] else Spec(vocab=96, bias=True, head_bias=True)
    model = compiled(spec, plan)
    optimizer = torch.optim.AdamW(model.parameters())
    context = seqcomp.of(model).context
    context.traffic.reset()
    loss = model(**local_batch(spec, plan, rank))["loss"]
    held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    loss.backward()
    report = seqcomp.of(model).report()
    sent, said = counted(context), reported(report)
    assert sent == said, set(sent.items()) ^ set(said.items())
    if rank == 0:
        given = local_batch(spec, plan, rank)["input_ids"]
        offline = seqcomp.explain(build(spec), plan, seq_len=given.shape[1], batch=len(given))
        assert offline.comm == report.comm
        assert offline.footprint == report.footprint
    optimizer.step()
    full = sum(p.numel() for p in model.parameters())
    mine = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    padding = sum(max(p.shape[1:].numel(), 1) for p in model.parameters())
    assert full / ways * 0.8 < mine <= full / ways + padding, (full, ways, mine, padding)
    assert held < full, "the units stay whole after forward"
    states = optimizer.state.values()
    moments = sum(x.to_local().numel() for s in states for x in s.values() if x.dim())
    assert moments == 2 * mine
    gradients = sum(p.grad.to_local().numel() for p in model.parameters())
    assert gradients == mine
    rows = {(r.kind, r.phase): r for r in context.traffic.rows() if r.label == "fsdp layers.0"}
    assert (
        rows[("all_gather", "forward")].bytes_sent
        == rows[("reduce_scatter", "backward")].bytes_sent
    )
    assert ("all_gather", "backward") in rows
    seqcomp.of(model).close()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "ways"),
    [(USP, 4), (HSDP, 2), (MEGATRON, 4)],
    ids=lambda x: plans.name(x) if isinstance(x, dict) else str(x),
)
def test_memory_and_bytes_are_divided(pools: Pools, plan: plans.Plan, ways: int) -> None:
    """Parameters, gradients and moments; bytes counted are bytes reported."""
    pools.run(ranks_of(plan), divided, plan, ways)


# --- life of a sharded module ------------------------------------------------------------


def lives(rank: int, world: int) -> None:
    original, model = build(UNEVEN), compiled(UNEVEN, plans.with_fsdp(plans.ring(2)))
    kinds = {name: type(part) for name, part in original.named_modules()}
    own = {name: set(vars(part)) for name, part in original.named_modules()}
    with pytest.raises(seqcomp.PlanError, match="length"):
        model(**inputs(UNEVEN, seq=15))
    # A refused call leaves the module as it was; a new kind of call is compiled when sharded.
    for batch, seq in ((2, 16), (1, 8)):
        given = inputs(UNEVEN, batch=batch, seq=seq)
        loss = model(**given)["loss"]
        torch.testing.assert_close(loss, original(**given)["loss"], rtol=1e-9, atol=0)
    loss.backward()
    state = model.state_dict()
    assert list(state) == list(original.state_dict())
    for name, value in original.state_dict().items():
        assert torch.equal(whole(state[name]), value), name
    assert sum(isinstance(part, FSDPModule) for part in model.modules()) == 3
    seqcomp.of(model).close()
    assert {name: type(part) for name, part in model.named_modules()} == kinds
    assert {name: set(vars(part)) for name, part in model.named_modules()} == own
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    for (name, p), q in zip(model.named_parameters(), original.parameters(), strict=True):
        assert type(p) is nn.Parameter
        assert torch.equal(p, q), name
    # And may be compiled again, under another plan.
    seqcomp.parallelize(
        model, plan=plans.with_fsdp(plans.ulysses(2)), example_inputs=inputs(UNEVEN)
    )
    again = model(**inputs(UNEVEN))["loss"]
    torch.testing.assert_close(again, original(**inputs(UNEVEN))["loss"], rtol=1e-9, atol=0)
    seqcomp.of(model).close()


def between(rank: int, world: int, **options: Any) -> None:
    """Calls without a backward, wherever they come, leave nothing whole and nothing stale."""
    plan = plans.with_fsdp(plans.ring(2), **options)
    both = build(UNEVEN), compiled(UNEVEN, plan)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in both]

    def look() -> None:
        """A call without gradients before each of two backwards, and after both."""
        losses = [part(**inputs(UNEVEN))["loss"] for part in both]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                want, got = (part.eval()(**inputs(UNEVEN, seq=8))["loss"] for part in both)
            torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
            for loss, part in zip(losses, both, strict=True):
                part.train()
                loss.backward(retain_graph=True)
        with torch.no_grad():
            both[1](**inputs(UNEVEN))

    for _ in range(2):
        look()
        want, got = (nn.utils.clip_grad_norm_(part.parameters(), 0.1) for part in both)
        torch.testing.assert_close(whole(got), want, rtol=1e-9, atol=0)
        for (name, p), q in zip(both[1].named_parameters(), both[0].parameters(), strict=True):
            assert isinstance(p, DTensor), name
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-11, msg=name)
        both[1](**inputs(UNEVEN))  # with gradients, which nobody wants
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    want, got = (part(**inputs(UNEVEN))["loss"] for part in both)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
    seqcomp.of(both[1]).close()


def between_unsharded(rank: int, world: int) -> None:
    between(rank, world, reshard=False)


def frozen(rank: int, world: int) -> None:
    model, alone = build(UNEVEN), build(UNEVEN)
    for part in (model, alone):
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name.startswith("layers.1.mlp"))
    seqcomp.parallelize(model, plan=plans.with_fsdp(plans.ring(2)), example_inputs=inputs(UNEVEN))
    context = seqcomp.of(model).context
    context.traffic.reset()
    model(**inputs(UNEVEN))["loss"].backward()
    alone(**inputs(UNEVEN))["loss"].backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad, name
        if q.grad is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-11)
    scattered = {r.label for r in context.traffic.rows() if r.kind == "reduce_scatter"}
    assert scattered == {"fsdp layers.1"}
    seqcomp.of(model).close()


def from_meta(rank: int, world: int) -> None:
    """Built on meta, divided, filled from a state dict of whole tensors."""
    original = build(TIED)
    with torch.device("meta"), default_dtype(torch.float64):
        model = Decoder(TIED)
    plan = plans.with_fsdp(plans.ring(2))
    seqcomp.parallelize(model, plan=plan, example_inputs=inputs(TIED))
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    assert model.head.weight is model.emb.weight
    model.to_empty(device="cpu")
    set_model_state_dict(
        model,
        original.state_dict() if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    for value, want in zip(model.buffers(), original.buffers(), strict=True):
        value.copy_(want)  # buffers outside of the state dict are the model's to fill
    loss = model(**inputs(TIED))["loss"]
    torch.testing.assert_close(loss, original(**inputs(TIED))["loss"], rtol=1e-9, atol=0)
    loss.backward()
    assert model.head.weight is model.emb.weight
    seqcomp.of(model).close()


def narrow(rank: int, world: int) -> None:
    """Mixed precision: as the model in bf16, with weights, sums and moments in fp32."""
    plan = plans.with_fsdp(plans.ring(2), mixed_precision="bf16", offload="cpu")
    model = build(M0, dtype=torch.float32)
    single = build(M0, dtype=torch.float32).bfloat16()
    exact = build(M0, dtype=torch.float64)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    seqcomp.parallelize(model, plan=plan, example_inputs=inputs(M0))
    for part in (model, single, exact):
        part(**inputs(M0))["loss"].backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    largest = max(float(p.grad.abs().max()) for p in exact.parameters())
    errors: list[Tensor] = [
        torch.stack([(whole(p.grad).double() - q.grad).abs().max() for p, q in pairs]).max()
        for pairs in (
            list(zip(part.parameters(), exact.parameters(), strict=True))
            for part in (model, single)
        )
    ]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert 1e-5 * largest < errors[0] <= 1.5 * errors[1]
    before = seqcomp.of(model)
    before.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "what", [lives, between, between_unsharded, frozen, from_meta, narrow], ids=lambda f: f.__name__
)
def test_life(pools: Pools, what: Any) -> None:
    pools.run(2, what)


def several_dtypes(model: nn.Module) -> tuple[str, str]:
    model.layers[1].n1.double()
    return "SC213", "layers.1"


def without_dims(model: nn.Module) -> tuple[str, str]:
    model.layers[1].gain = nn.Parameter(torch.tensor(1.0))
    return "SC214", "layers.1.gain"


def refused(rank: int, world: int, spoil: Callable[[nn.Module], tuple[str, str]]) -> str:
    model = build(M0, dtype=torch.float32)
    want = spoil(model)
    with pytest.raises(seqcomp.PlanError) as caught:
        seqcomp.parallelize(model, plan=plans.with_fsdp(plans.ring(2)), example_inputs=inputs(M0))
    assert not any(isinstance(part, FSDPModule) for part in model.modules())
    assert [(d.code, d.where) for d in caught.value.diagnostics] == [want]
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize("spoil", [several_dtypes, without_dims], ids=lambda f: f.__name__)
def test_what_cannot_be_sharded_is_refused(pools: Pools, spoil: Any) -> None:
    assert len(Counter(pools.run(2, refused, spoil))) == 1


def initialised(rank: int, world: int, plan: plans.Plan) -> None:
    """Built on meta, divided, then initialised: the weights that one process draws."""
    models = []
    for _ in range(2):
        with torch.device("meta"), default_dtype(torch.float64):
            models.append(Decoder(UNEVEN))
    alone, model = models
    seqcomp.parallelize(model, plan=plan, example_inputs=inputs(UNEVEN))
    for part in models:
        materialise(part, seed=3, init=draw)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(whole(p.detach()), q), name
    given = inputs(UNEVEN)
    loss = model(**given)["loss"]
    torch.testing.assert_close(loss, alone(**given)["loss"], rtol=1e-9, atol=0)
    seqcomp.of(model).close()


def draw(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.normal_()
    for name, buffer in module.named_buffers(recurse=False):
        assert name == "inv_freq"
        buffer.copy_(torch.arange(1.0, len(buffer) + 1))


@pytest.mark.distributed
@pytest.mark.parametrize("plan", [MEGATRON, HSDP], ids=plans.name)
def test_initialised_on_meta(pools: Pools, plan: plans.Plan) -> None:
    pools.run(ranks_of(plan), initialised, plan)
