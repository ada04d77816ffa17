"""Megatron-SP divides the work: parameters, FLOPs, saved activations and norms by the degree.

What every rank of a tensor group has whole, besides norms and biases of row-parallel linears:
* rotary tables: attention runs on its heads over all tokens of the group, S x d for the model;
* token ids, labels and what is made of them;
* K/V projections beyond the KV heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.runtime import tensor_parallel
from seqcomp.runtime.comm import RankContext
from seqcomp.strategies.base import AttentionShape
from seqcomp.strategies.megatron_sp import MegatronSp
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.lockstep import counted, reported
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.work import Work, work_of

LENGTH = 256
SPEC = Spec(vocab=96, bias=True, hidden=64, heads=8, kv_heads=4, mlp=160, table=LENGTH)
FEW_KV_HEADS = Spec(vocab=96, bias=True, hidden=64, heads=8, kv_heads=2, mlp=160, table=LENGTH)
ALONE: plans.Plan = {"mesh": {"ring": 1}, "strategies": {"ring": {}}}
ELEMENT = 4  # bytes of fp32
WHOLE = {"n1.weight", "n2.weight", "attn.o.bias", "mlp.down.bias"}


@dataclass(frozen=True)
class Seen:
    """What one rank did in one training step."""

    work: Work
    sizes: dict[str, int]  # elements of each parameter on this rank
    traffic: dict[Any, tuple[int, int]]
    reported: dict[Any, tuple[int, int]]


def make(spec: Spec = SPEC) -> nn.Module:
    return build(spec, dtype=torch.float32)


def batch_of(spec: Spec = SPEC) -> dict[str, Tensor]:
    return inputs(spec, batch=1, seq=LENGTH)


def observe(model: nn.Module, context: RankContext, local: dict[str, Any]) -> Seen:
    def step() -> Tensor:
        loss: Tensor = model(**local)["loss"]
        return loss

    step()
    context.traffic.reset()
    work = work_of(model, SPEC.vocab, step)
    return Seen(
        work,
        {name: p.numel() for name, p in model.named_parameters()},
        counted(context),
        reported(seqcomp.of(model).report()),
    )


def on_ranks(plan: plans.Plan, spec: Spec = SPEC) -> list[Seen]:
    return lockstep(lambda: make(spec), plan, observe, inputs=batch_of(spec))


@pytest.fixture(scope="module")
def alone() -> Work:
    return on_ranks(ALONE)[0].work


@pytest.fixture(scope="module", params=[2, 4])
def group(request: pytest.FixtureRequest) -> list[Seen]:
    """Each rank of Megatron-SP alone."""
    return on_ranks(plans.megatron(request.param))


def products(work: Work) -> int:
    """Matrix products of linears and head: a head cut by vocabulary looks like any linear."""
    return work.flops["linear"] + work.flops["head"]


def check_flops(single: Work, ranks: Sequence[Work], *, tables: int) -> None:
    """Linears, head and norms by the number of ranks. tables: elements of cos and sin."""
    count = len(ranks)
    for rank, work in enumerate(ranks):
        assert products(work) * count == products(single), rank
        own = work.flops["pointwise"] - tables
        assert own * count == single.flops["pointwise"] - 2 * LENGTH * SPEC.head_dim, rank
    for kind in ("attention", "attention backward"):
        assert sum(work.flops[kind] for work in ranks) == single.flops[kind], kind
        assert len({work.flops[kind] for work in ranks}) == 1, kind


def check_saved(single: Work, ranks: Sequence[Work], extra: int) -> None:
    for rank, work in enumerate(ranks):
        assert work.saved_bytes <= single.saved_bytes / len(ranks) + extra, rank


def named_extra(degree: int) -> int:
    """Bytes beyond 1/degree: tables of cos and sin, and ids and labels, whole on every rank."""
    tables = 2 * LENGTH * SPEC.head_dim * ELEMENT
    integers = 8 * LENGTH * 8
    return (tables + integers) * (degree - 1) // degree + 1024


def test_flops(alone: Work, group: list[Seen]) -> None:
    """Also the norms': every rank normalises its tokens alone."""
    check_flops(alone, [seen.work for seen in group], tables=2 * LENGTH * SPEC.head_dim)


def test_saved_activations(alone: Work, group: list[Seen]) -> None:
    degree = len(group)
    extra = named_extra(degree)
    assert extra <= 0.1 * alone.saved_bytes / degree, "the named remainder is small"
    check_saved(alone, [seen.work for seen in group], extra)
    residual = (1, LENGTH, SPEC.hidden)
    for seen in group:
        assert residual not in {shape for _, _, shape in seen.work.saved}


def test_saving_the_gathered_inputs_is_noticed(
    alone: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control: what an ordinary linear keeps is far over the bound."""

    def ordinary(x: Tensor, shard: Tensor, weight: Tensor, bias: Any, again: Any) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(tensor_parallel, "column_linear", ordinary)
    ranks = [seen.work for seen in on_ranks(plans.megatron(2))]
    with pytest.raises(AssertionError):
        check_saved(alone, ranks, named_extra(2))
    gathered = 2 * SPEC.layers * LENGTH * SPEC.hidden * ELEMENT
    assert ranks[0].saved_bytes > alone.saved_bytes / 2 + gathered / 2


def test_parameters(group: list[Seen]) -> None:
    degree = len(group)
    full = {name: p.numel() for name, p in make().named_parameters()}
    whole = {f"layers.{i}.{name}" for i in range(SPEC.layers) for name in WHOLE} | {"norm.weight"}
    for seen in group:
        for name, size in seen.sizes.items():
            assert size == (full[name] if name in whole else full[name] // degree), name


def test_parameters_beyond_the_kv_heads() -> None:
    """K and V projections are whole on every rank as well; their work is not divided."""
    full = {name: p.numel() for name, p in make(FEW_KV_HEADS).named_parameters()}
    for seen in on_ranks(plans.megatron(4), FEW_KV_HEADS):
        kept = {name for name, size in seen.sizes.items() if size == full[name]}
        assert {n.split(".", 2)[2] for n in kept if n.startswith("layers")} == WHOLE | {
            "attn.k.weight", "attn.k.bias", "attn.v.weight", "attn.v.bias",
        }  # fmt: skip
        assert seen.reported == seen.traffic


COMPOSED = [
    plans.megatron(2),
    plans.megatron(4),
    plans.with_tensor(plans.ring(2, "zigzag"), 2),
    plans.with_tensor(plans.ulysses(2), 4),
    plans.with_tensor(plans.usp(2, 2, "striped"), 2),
    plans.with_data(plans.with_tensor(plans.ring(2, "contiguous"), 2), 1),
]


@pytest.mark.parametrize("plan", COMPOSED, ids=plans.name)
def test_bytes(plan: plans.Plan) -> None:
    """4(P-1)/P * T*h*e forward and 1.5 x backward for each layer, and the report says the same."""
    mesh = plan["mesh"]
    degree = mesh["tensor"]
    tokens = LENGTH // (mesh.get("ring", 1) * mesh.get("ulysses", 1))
    shape = AttentionShape(
        1, tokens, SPEC.heads, SPEC.kv_heads, SPEC.head_dim, ELEMENT, hidden=SPEC.hidden
    )
    shape_bytes = (degree - 1) * tokens * SPEC.hidden * ELEMENT
    for seen in on_ranks(plan):
        assert seen.reported == seen.traffic
        sent: Counter[tuple[str, str]] = Counter()
        calls: Counter[tuple[str, str]] = Counter()
        for (label, kind, axis, phase), (count, size) in seen.traffic.items():
            if axis == "tensor" and label.startswith("layers.1") and not _is_parameter(label):
                sent[kind, phase] += size
                calls[kind, phase] += count
        forward = sum(size for (_, phase), size in sent.items() if phase == "forward")
        backward = sum(size for (_, phase), size in sent.items() if phase == "backward")
        assert forward == Fraction(4 * shape_bytes, degree)
        assert backward == Fraction(6 * shape_bytes, degree)
        steps = MegatronSp(degree).comm_steps(shape)
        assert dict(sent) == {(s.kind, s.phase): s.bytes_sent for s in steps}
        assert dict(calls) == {(s.kind, s.phase): s.count for s in steps}


def _is_parameter(label: str) -> bool:
    return label.endswith(("weight", "bias"))


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_flops_composed(alone: Work, layout: str) -> None:
    """ring 2 x tensor 2: everything that either divides, by 4."""
    plan = plans.with_tensor(plans.ring(2, layout), 2)
    ranks = [seen.work for seen in on_ranks(plan)]
    for work in ranks:
        assert products(work) * 4 == products(alone)
        assert work.saved_bytes <= alone.saved_bytes / 4 + named_extra(4)
    for kind in ("attention", "attention backward"):
        assert sum(work.flops[kind] for work in ranks) == alone.flops[kind], kind
