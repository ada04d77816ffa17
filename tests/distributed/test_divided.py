"""The work is really divided: each of P ranks computes and keeps 1/P of what one process does.

What every rank has whole, and why that is little:
* token ids, labels and their shift: integers, 1/hidden of an activation;
* rotary angles before cos and sin: S x d once for the model;
* the loss, a scalar;
* with Ulysses, the output of attention is kept twice: as heads, for the backward of attention,
  and as tokens, for the projection after it;
* with more Ulysses ranks than KV heads, K and V of one head on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.capture.edit import op_name
from seqcomp.layout.intervals import work as causal_work
from seqcomp.layout.masks import Causal
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.report.local import local_values
from seqcomp.strategies.base import AttentionShape, attention_flops
from seqcomp.strategies.ring import causal_imbalance
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import field_of
from tests.fixtures.lockstep import counted, reported
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.pool import Pools
from tests.fixtures.work import Work, work_of

LENGTH = 512
SPEC = Spec(heads=8, kv_heads=4, head_dim=8, hidden=64, mlp=128)
FEW_KV_HEADS = Spec(heads=8, kv_heads=2, head_dim=8, hidden=64, mlp=128)
ALONE: plans.Plan = {"mesh": {"ring": 1}, "strategies": {"ring": {}}}
MATMULS = ("linear", "head", "loss", "pointwise")
ATTENTION = ("attention", "attention backward")
ELEMENT = 4  # bytes of fp32
SCALARS = 64  # bytes: the loss, the number of labels


def make(spec: Spec = SPEC) -> nn.Module:
    return build(spec, dtype=torch.float32)


def batch_of(spec: Spec = SPEC) -> dict[str, Tensor]:
    return inputs(spec, batch=1, seq=LENGTH)


def measured(model: nn.Module, context: Any, local: dict[str, Any]) -> Work:
    def step() -> Tensor:
        loss = field_of(model(**local), "loss")
        assert loss is not None
        return loss

    step()
    return work_of(model, SPEC.vocab, step)


def on_ranks(plan: plans.Plan, spec: Spec = SPEC) -> list[Work]:
    return lockstep(lambda: make(spec), plan, measured, inputs=batch_of(spec))


OnRanks = Callable[[plans.Plan], list[Work]]


@pytest.fixture(scope="module")
def ranks_of() -> OnRanks:
    """`on_ranks`, each plan once."""
    known: dict[str, list[Work]] = {}

    def once(plan: plans.Plan) -> list[Work]:
        name = plans.name(plan)
        if name not in known:
            known[name] = on_ranks(plan)
        return known[name]

    return once


@pytest.fixture(scope="module")
def alone(ranks_of: OnRanks) -> Work:
    """The single process, compiled for a mesh of one."""
    return ranks_of(ALONE)[0]


@dataclass(frozen=True)
class Share:
    """What one of `ranks` ranks may have beyond 1/ranks of the saved bytes."""

    ranks: int
    extra_bytes: float = 0.0


def check_divided(single: Work, ranks: Sequence[Work], share: Share) -> None:
    for rank, work in enumerate(ranks):
        for kind in MATMULS:
            assert work.flops[kind] * share.ranks == single.flops[kind], (rank, kind)
        allowed = single.saved_bytes / share.ranks + share.extra_bytes + SCALARS
        assert work.saved_bytes <= allowed, rank
    for kind in ATTENTION:
        assert sum(work.flops[kind] for work in ranks) == single.flops[kind], kind


def ulysses_copies(spec: Spec, plan: plans.Plan) -> float:
    """Bytes: the output once more, and K/V heads that more than one rank holds."""
    ranks = plan["mesh"].get("ring", 1) * plan["mesh"].get("ulysses", 1)
    degree = plan["mesh"].get("ulysses", 1)
    if degree == 1:
        return 0.0
    output = spec.heads * spec.head_dim
    copies = 2 * (max(spec.kv_heads, degree) - spec.kv_heads) * spec.head_dim
    return spec.layers * LENGTH * (output + copies) * ELEMENT / ranks


PLANS = [
    plans.ring(4, "zigzag"),
    plans.ring(4, "zigzag", "allgather"),
    plans.ring(4, "contiguous"),
    plans.ring(4, "striped"),
    plans.ulysses(4),
    plans.usp(2, 2, "zigzag"),
]


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_flops_and_saved_activations(alone: Work, ranks_of: OnRanks, plan: plans.Plan) -> None:
    extra = ulysses_copies(SPEC, plan)
    assert extra <= 0.06 * alone.saved_bytes / 4, "the named remainder is small"
    check_divided(alone, ranks_of(plan), Share(4, extra))


def test_beyond_the_kv_heads() -> None:
    plan = plans.ulysses(4)
    single, ranks = on_ranks(ALONE, FEW_KV_HEADS)[0], on_ranks(plan, FEW_KV_HEADS)
    check_divided(single, ranks, Share(4, ulysses_copies(FEW_KV_HEADS, plan)))


def test_the_single_process_is_the_original(alone: Work) -> None:
    """Compiled for one rank it computes and keeps what the module of the user does."""
    model = make()
    eager = measured(model, None, batch_of())
    for kind in ("linear", "head", "pointwise", *ATTENTION):
        assert alone.flops[kind] == eager.flops[kind], kind
    assert alone.saved_bytes == pytest.approx(eager.saved_bytes, rel=1e-3)
    shape = AttentionShape(1, LENGTH, SPEC.heads, SPEC.kv_heads, SPEC.head_dim)
    for kind, phase in zip(ATTENTION, ("forward", "backward"), strict=True):
        expected = SPEC.layers * attention_flops(shape, causal=True, phase=phase)
        assert alone.flops[kind] == expected


def test_every_rank_computing_everything_is_noticed(alone: Work, ranks_of: OnRanks) -> None:
    """Positive control: right values, no division of work."""
    with pytest.raises(AssertionError, match="linear"):
        check_divided(alone, [alone] * 4, Share(4))
    flops_only = [Work(ranks_of(plans.ring(4, "zigzag"))[0].flops, alone.saved)] * 4
    with pytest.raises(AssertionError):
        check_divided(alone, flops_only, Share(4, 0.06 * alone.saved_bytes / 4))


@pytest.mark.parametrize("layout", plans.LAYOUTS)
@pytest.mark.parametrize("ulysses", [1, 2])
def test_causal_balance(ranks_of: OnRanks, layout: str, ulysses: int) -> None:
    """Busiest rank over the mean: zigzag exactly 1, the others by their formula."""
    ring = 4 // ulysses
    plan = plans.usp(ring, ulysses, layout) if ulysses > 1 else plans.ring(ring, layout)
    ranks = ranks_of(plan)
    areas = causal_work(Causal(), SequenceLayout(layout, ring), LENGTH)
    for kind in ATTENTION:
        done = [work.flops[kind] for work in ranks]
        assert Fraction(max(done) * len(done), sum(done)) == causal_imbalance(layout, LENGTH, ring)
        assert [Fraction(n, sum(done)) for n in done] == [
            Fraction(area, sum(areas) * ulysses) for area in areas for _ in range(ulysses)
        ]


def test_what_is_replicated_has_a_name() -> None:
    """Of all values of the local graph, those that every rank computes whole."""

    def whole(model: nn.Module, context: Any, local: dict[str, Any]) -> list[tuple[str, int, int]]:
        model(**local)
        (program,) = seqcomp.of(model).programs
        ranks = {"ring": 2, "ulysses": 2}
        local_ones = local_values(program, 1, LENGTH, ranks)
        return [
            (
                op_name(node),
                local_ones[node].numel() * node.meta["val"].dtype.is_floating_point,
                local_ones[node].numel() * local_ones[node].element_size(),
            )
            for node in program.flat.nodes
            if node.op == "call_function"
            and isinstance(node.meta.get("val"), Tensor)
            and LENGTH in local_ones[node].shape
        ]

    found = lockstep(make, plans.usp(2, 2, "zigzag"), whole, inputs=batch_of())[0]
    floats = {name for name, numbers, _ in found if numbers}
    assert floats <= {"aten.to", "aten.mul", "aten.unsqueeze", "aten.cat"}
    # Rotary angles: a handful of [S, d] against 40 activations of [S, 64].
    assert sum(numbers for _, numbers, _ in found) <= 5 * LENGTH * SPEC.head_dim
    integers = {name for name, numbers, _ in found if not numbers}
    assert not integers & {"aten.embedding", "aten.cross_entropy_loss"}


def real_rank(rank: int, world: int, plan: plans.Plan) -> tuple[Work, bool]:
    model = seqcomp.parallelize(make(), plan=plan)
    local = batch_of()
    model(**local)
    context = seqcomp.of(model).context
    context.traffic.reset()

    def step() -> Tensor:
        loss = field_of(model(**local), "loss")
        assert loss is not None
        return loss

    work = work_of(model, SPEC.vocab, step)
    same = reported(seqcomp.of(model).report()) == counted(context)
    seqcomp.of(model).close()
    return work, same and bool(counted(context))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "plan",
    [plans.usp(2, 2, "zigzag"), plans.ring(4, "striped", "allgather"), plans.ulysses(4)],
    ids=plans.name,
)
def test_on_real_ranks(pools: Pools, alone: Work, plan: plans.Plan) -> None:
    """The same on gloo ranks; and the report's bytes are those that left them."""
    ranks = pools.run(4, real_rank, plan)
    check_divided(alone, [work for work, _ in ranks], Share(4, ulysses_copies(SPEC, plan)))
    assert all(same for _, same in ranks)


def bytes_of_rank(rank: int, world: int, cases: list[tuple[plans.Plan, Spec, torch.dtype]]) -> Any:
    found = []
    for plan, spec, dtype in cases:
        model = seqcomp.parallelize(build(spec, dtype=dtype), plan=plan)
        ids = inputs(spec)
        field_of(model(**ids), "loss").backward()  # type: ignore[union-attr]
        compiled = seqcomp.of(model)
        found.append((reported(compiled.report()), counted(compiled.context)))
        compiled.close()
    return found


REAL_BYTES = [
    (plans.ring(2, "zigzag"), Spec(), torch.float32),
    (plans.ring(2, "contiguous", "allgather"), Spec(kv_heads=4), torch.bfloat16),
    (plans.ulysses(2), Spec(), torch.bfloat16),
    (plans.ulysses(2), Spec(kv_heads=4), torch.float32),
]


@pytest.mark.distributed
def test_bytes_on_two_real_ranks(pools: Pools) -> None:
    for rank in pools.run(2, bytes_of_rank, REAL_BYTES):
        for case, (said, sent) in zip(REAL_BYTES, rank, strict=True):
            assert sent, case
            assert said == sent, case
