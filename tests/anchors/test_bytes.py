"""Bytes sent per GPU and layer: published formulas, figures and crossovers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from seqcomp.cost.run import Run
from seqcomp.cost.workload import workload_of
from seqcomp.hardware.load import load_cluster
from seqcomp.layout.masks import Causal
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.layout.travel import keys_seen
from seqcomp.strategies.base import AttentionShape, attention_flops, total_bytes
from seqcomp.strategies.data import Data, Fsdp
from seqcomp.strategies.megatron_sp import MegatronSp
from seqcomp.strategies.ring import Ring
from seqcomp.strategies.ulysses import Ulysses
from seqcomp.strategies.usp import Usp
from tests.fixtures.pricing import SMALL, planned

S = 128 * 1024
LLAMA = {
    "8B": AttentionShape(1, S, 32, 8, 128),
    "70B": AttentionShape(1, S, 64, 8, 128),
    "405B": AttentionShape(1, S, 128, 8, 128),
}
MHA = AttentionShape(1, S, 32, 32, 128)


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [("8B", (3.76, 0.294, 0.470)), ("70B", (7.52, 0.528, 0.470)), ("405B", (15.0, 0.998, 0.470))],
)
def test_gigabytes_of_a_forward(model: str, gigabytes: tuple[float, ...]) -> None:
    """128K tokens, P = 8, bf16: Megatron-SP, Ulysses, ring."""
    for strategy, expected in zip((MegatronSp(8), Ulysses(8), Ring(8)), gigabytes, strict=True):
        sent = total_bytes(strategy.comm_steps(LLAMA[model]), "forward") / 1e9
        assert sent == pytest.approx(expected, rel=0.004)


def test_multiples_of_forward_and_backward() -> None:
    """Megatron-SP 10 and 4 of O(T h) (USP, table 2), Ulysses 8 and 4 all-to-alls of tensors."""
    for strategy, factor in ((MegatronSp(8), Fraction(5, 2)), (Ulysses(8), Fraction(2))):
        steps = strategy.comm_steps(MHA)
        assert total_bytes(steps) == factor * total_bytes(steps, "forward")
    t, h, e = MHA.tokens, MHA.hidden, MHA.element_bytes
    assert total_bytes(Ulysses(8).comm_steps(MHA), "forward") == 4 * 7 * t * h * e // 64
    # Ring: keys and values twice, and their gradients in fp32: 2 + 2 + 4 units of T h in bf16.
    steps = Ring(8).comm_steps(MHA)
    assert total_bytes(steps) == 4 * total_bytes(steps, "forward")


def test_units_of_a_ring() -> None:
    """Of T h elements with gradients as wide as they are: 6, or 4 as USP counts, which lets keys
    and values travel once. Gathered keys are the same bytes in other collectives."""
    shape = AttentionShape(1, S, 32, 32, 128, element_bytes=4)
    unit = Fraction(7, 8) * shape.tokens * shape.hidden * 4
    steps = Ring(8).comm_steps(shape)
    assert total_bytes(steps) == 6 * unit
    keys, gradients = (s for s in steps if s.phase == "backward")
    assert total_bytes(steps) - keys.bytes_sent == 4 * unit
    assert gradients.bytes_sent == 2 * unit
    gathered = Ring(8, transport="allgather").comm_steps(shape)
    assert total_bytes(gathered, "backward") == total_bytes(steps, "backward")
    kinds = [(s.kind, s.phase) for s in gathered]
    assert kinds == [
        ("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"),
    ]  # fmt: skip
    assert not any(s.overlappable for s in gathered if s.phase == "forward")


def test_ulysses_stays_constant_when_ranks_and_tokens_grow_together() -> None:
    sent = []
    for p in (2, 4, 8, 16):
        shape = AttentionShape(1, 4096 * p, 32, 32, 128)
        sent.append(Fraction(total_bytes(Ulysses(p).comm_steps(shape), "forward") * p, p - 1))
    assert len(set(sent)) == 1


@pytest.mark.parametrize(("heads", "kv", "limit"), [(32, 32, 2), (32, 8, 5), (40, 8, 6)])
def test_ulysses_sends_less_than_ring_beyond_one_plus_group(
    heads: int, kv: int, limit: int
) -> None:
    """P > 1 + G, while P does not exceed the KV heads."""
    shape = AttentionShape(1, 840 * 64, heads, kv, 128)
    for p in (d for d in range(2, kv + 1) if heads % d == 0 and kv % d == 0):
        ulysses, ring = (total_bytes(x(p).comm_steps(shape), "forward") for x in (Ulysses, Ring))
        assert (ulysses < ring) == (p > limit)


@pytest.mark.parametrize(("model", "limit"), [("70B", 9.1), ("405B", 18.3)])
def test_crossover_with_copies_of_kv_heads(model: str, limit: float) -> None:
    shape = LLAMA[model]
    for p in (8, 16, 32, 64):
        ulysses, ring = (total_bytes(x(p).comm_steps(shape), "forward") for x in (Ulysses, Ring))
        if p > shape.kv_heads:
            assert (ulysses < ring) == (p > limit)


def test_usp_is_both_pure_cases() -> None:
    for shape in LLAMA.values():
        assert Usp(Ring(1), Ulysses(8)).comm_steps(shape) == Ulysses(8).comm_steps(shape)
        assert Usp(Ring(8), Ulysses(1)).comm_steps(shape) == Ring(8).comm_steps(shape)


def test_ulysses_goes_beyond_the_kv_heads() -> None:
    """ALST runs 32 query and 8 KV heads on 32 ranks."""
    assert 32 in Ulysses(32).legal_degrees(LLAMA["8B"])
    assert 64 not in Ulysses(64).legal_degrees(LLAMA["8B"])


def test_ring_hops() -> None:
    """2 (s/P) h_kv elements a hop; 8 ranks, H 8, d 64, s 8192, fp32: 7 hops of 4.19 MB."""
    shape = AttentionShape(1, 8192, 8, 8, 64, element_bytes=4)
    (step, *_) = Ring(8).comm_steps(shape)
    assert step.count == 7
    assert step.bytes_sent == 7 * 2 * (8192 // 8) * 512 * 4 == 7 * 4_194_304
    assert attention_flops(shape, causal=False, phase="forward") == pytest.approx(1.37e11, rel=5e-3)
    assert Ring(8192).comm_steps(shape)[0].count == 8191


def test_ring_bytes_do_not_depend_on_the_number_of_ranks() -> None:
    """S n_kv d 2 bytes, times (N - 1)/N."""
    shape = LLAMA["8B"]
    for n in (2, 8, 64):
        sent = total_bytes(Ring(n).comm_steps(shape), "forward")
        assert sent == Fraction(n - 1, n) * S * 8 * 128 * 2 * 2
        gathered = total_bytes(Ring(n, transport="allgather").comm_steps(shape), "forward")
        assert gathered == sent


def test_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    """2 (N-1)/N S against (N-1)/N S each, so that Megatron-SP sends what tensor parallelism did."""
    size = 8 * 10**6
    assert total_bytes(Data(8).gradient_steps(size)) == 2 * 7 * size // 8
    gather, scatter = Fsdp(8, reshard=False).gradient_steps(size)
    assert gather.bytes_sent == scatter.bytes_sent == 7 * size // 8
    shape = LLAMA["8B"]
    plain = 2 * Fraction(2 * 7, 8) * shape.tokens * shape.hidden * 2  # 2 all-reduces a layer
    assert total_bytes(MegatronSp(8).comm_steps(shape), "forward") == plain


def test_norms_cost_one_more_sum_under_megatron_sp() -> None:
    """Gradients of gamma: [h] for each norm, and nothing else is summed over the tensor axis."""
    plan = planned("megatron_sp_4")
    work = workload_of(plan, SMALL, Run(4096))
    own = [s for s in work.blocks[0].parameters if s.kind == "all_reduce"]
    assert sum(s.bytes_sent for s in own) == 2 * 3 * (2 * SMALL.hidden) * 4 // 4


@pytest.mark.parametrize(("kind", "part"), [("contiguous", 0.5), ("zigzag", 0.75)])
def test_what_a_causal_mask_needs_of_what_a_ring_sends(kind: str, part: float) -> None:
    """Keys that queries of other ranks see, over the 2 (P-1)/P T h_kv that a ring always pays."""
    n, s = 16, 16 * 64
    layout = SequenceLayout(kind, n)  # type: ignore[arg-type]
    ranges = [layout.ring_ranges(s, rank) for rank in range(n)]
    needed = sum(
        len(run)
        for rank, q in enumerate(ranges)
        for source, k in enumerate(ranges)
        if rank != source
        for run in keys_seen(Causal(), q, k)
    )
    assert needed / (s * (n - 1)) == pytest.approx(part, abs=0.03)


def test_usp_4x8_keeps_ulysses_inside_nodes() -> None:
    """32 GPUs in 4 nodes: Ulysses over NVLink, the ring over InfiniBand."""
    cluster, axes = load_cluster("h100"), {"ring": 4, "ulysses": 8}
    ulysses, ring = (cluster.span(axes, [axis]) for axis in ("ulysses", "ring"))
    assert cluster.link_for(ulysses) == cluster.intra
    assert cluster.link_for(ring) == cluster.inter
    assert (ulysses.inside, ring.inside) == (8, 1)
    turned = cluster.span({"ulysses": 8, "ring": 4}, ["ulysses"])
    assert (turned.inside, turned.nodes) == (2, 4)
