"""Causal balance and the condition under which a ring hides its hops."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from seqcomp.cost.rounds import keeps_back, round_pairs
from seqcomp.cost.shape import ModelShape
from seqcomp.layout.intervals import causal_balance, visible_area, work
from seqcomp.layout.masks import Causal
from seqcomp.layout.sequence import Layout, SequenceLayout
from seqcomp.strategies.base import AttentionShape, attention_flops, total_bytes
from seqcomp.strategies.ring import Ring, causal_imbalance
from tests.fixtures.pricing import SMALL, ideal, masked, priced

S = 240
MHA = ModelShape.decoder(layers=1, hidden=4096, heads=32, vocab=1000, mlp_width=4096)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_contiguous(n: int) -> None:
    """max/mean (2N-1)/N, the last rank 2N-1 times the first, both but for the diagonal."""
    s = S * 1000
    layout = SequenceLayout("contiguous", n)
    areas = work(Causal(), layout, s)
    assert areas[-1] / areas[0] == pytest.approx(2 * n - 1, rel=1e-3)
    assert causal_balance(layout, s) == pytest.approx((2 * n - 1) / n, rel=1e-3)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["contiguous", "striped", "zigzag"])
def test_idle_rounds(kind: Layout, n: int) -> None:
    """Of P^2 rounds of P ranks a contiguous causal ring leaves (P^2 - P)/2 without work
    (DistFlashAttention, unbalanced); the others none."""
    layout = SequenceLayout(kind, n)
    owned = [layout.ring_ranges(S, rank) for rank in range(n)]
    idle = sum(visible_area(Causal(), q, k) == 0 for q in owned for k in owned)
    assert idle == ((n * n - n) // 2 if kind == "contiguous" else 0)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_helpers_fill_the_idle_rounds(n: int) -> None:
    """DistFlashAttention: in round t rank p attends to the keys of p - t, or where there are none
    helps rank P + p - t with its own keys. Of P^2 slots 0 (P odd) or 1/2P of them (P even) stay
    idle; on 8 GPUs 7.2 x instead of 4.5 x, in tiles."""
    layout = SequenceLayout("contiguous", n)
    owned = [layout.ring_ranges(S * n, rank) for rank in range(n)]
    seen = {
        (q, k) for q in range(n) for k in range(n) if visible_area(Causal(), owned[q], owned[k])
    }
    rounds = n // 2 + 1
    last = n // 2 if n % 2 == 0 else n  # of an even ring, in which one half would help the other
    done = [
        (p, p - t) if p >= t else (n + p - t, p)
        for t in range(rounds)
        for p in range(n)
        if p >= t or t < last
    ]
    assert len(done) == len(set(done)) == len(seen)
    assert set(done) == seen
    idle = rounds * n - len(done)
    assert Fraction(idle, n * n) == (Fraction(1, 2 * n) if n % 2 == 0 else 0)
    if n == 8:
        alone = max(sum(q == rank for q, _ in seen) for rank in range(n))
        assert (len(seen) / alone, len(seen) / rounds) == (4.5, 7.2)
    # Zigzag has no such round: its ranks are busy in all of them, and alike.
    zigzag = SequenceLayout("zigzag", n)
    halves = [zigzag.ring_ranges(S * n, rank) for rank in range(n)]
    for t in range(1, n):
        areas = {visible_area(Causal(), halves[r], halves[(r - t) % n]) for r in range(n)}
        assert areas == {S * S // 2}


@pytest.mark.parametrize(("tile", "share"), [((2048, 4096), 1.0), ((64, 64), 0.51)])
def test_stripes_save_nothing_in_large_tiles(tile: tuple[int, int], share: float) -> None:
    """Striped Attention: 4,096 tokens a rank in tiles of 2,048 x 4,096 visit them all."""
    c, n = 4096, 4
    layout = SequenceLayout("striped", n)
    (q,), (k,) = (layout.ring_ranges(c * n, rank) for rank in (0, 1))
    parts = [(i, j) for i in range(0, c, tile[0]) for j in range(0, c, tile[1])]
    visited = sum(
        visible_area(Causal(), (q[i : i + tile[0]],), (k[j : j + tile[1]],)) > 0 for i, j in parts
    )
    assert visited / len(parts) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("kind", ["contiguous", "striped", "zigzag"])
def test_counted_balance(kind: Layout, n: int) -> None:
    layout = SequenceLayout(kind, n)
    exact = {
        "contiguous": (2 * S - Fraction(S, n) + 1) / (S + 1),
        "striped": Fraction(S + n, S + 1),
        "zigzag": Fraction(1),
    }[kind]
    assert causal_imbalance(kind, S, n) == exact
    assert causal_balance(layout, S) == float(exact)


@pytest.mark.parametrize(("n", "percent"), [(2, 66.7), (4, 57.1), (8, 53.3)])
def test_lockstep_efficiency(n: int, percent: float) -> None:
    """Mean work over the sum of each round's busiest rank: N/(2N-1); 1 where balanced."""
    s = 10**6 // 48 * 48
    (block,) = SMALL.blocks
    mean = s * (s + 1) / 2 / n
    found = {
        kind: mean / sum(round_pairs(block, SequenceLayout(kind, n), s))
        for kind in ("contiguous", "striped", "zigzag")
    }
    assert 100 * found["contiguous"] == pytest.approx(percent, abs=0.06)
    assert found["zigzag"] == pytest.approx(1, rel=1e-9)
    assert found["striped"] == pytest.approx((s + 1) / (s + n), rel=1e-4)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("kind", ["contiguous", "striped", "zigzag"])
def test_rounds_are_those_of_the_layout(kind: Layout, n: int) -> None:
    """Brute force: each round's busiest rank, ranks in step."""
    (block,) = SMALL.blocks
    layout = SequenceLayout(kind, n)
    held = [[i for part in layout.ring_ranges(S, r) for i in part] for r in range(n)]

    def pairs(rank: int, source: int) -> int:
        return sum(j <= i for i in held[rank] for j in held[source])

    counted = [max(pairs(r, (r - t) % n) for r in range(n)) for t in range(n)]
    assert list(round_pairs(block, layout, S)) == counted


@pytest.mark.parametrize(("r", "bound"), [(2, 1.5), (4, 1.75), (8, 1.875)])
def test_speedup_of_balancing(r: int, bound: float) -> None:
    """(2r - 1)/r, by the whole model: attention alone, all hops hidden."""
    cluster = ideal(1e12, 1e15)
    alone = replace(MHA, vocab=1)
    times = [
        attention_seconds(priced(f"ring_{r}_{kind}", alone, cluster, seq_len=65536).timeline)
        for kind in ("contiguous", "zigzag")
    ]
    assert times[0] / times[1] == pytest.approx(bound, rel=1e-3)
    assert bound == (2 * r - 1) / r


def test_contiguous_ring_of_eight_is_at_53_percent() -> None:
    """ring-flash-attention measured 51.4 to 53.9 % of an even share."""
    cluster = ideal(1e12, 1e15)
    one = attention_seconds(priced("ring_1", MHA, cluster, seq_len=65536).timeline)
    ring = attention_seconds(priced("ring_8_contiguous", MHA, cluster, seq_len=65536).timeline)
    assert 100 * one / 8 / ring == pytest.approx(53.3, abs=0.1)


def attention_seconds(timeline: tuple) -> float:  # type: ignore[type-arg]
    """From the first round of a forward to the last."""
    own = [e for e in timeline if e.stream == "compute" and e.what.startswith("attention")]
    forward = [e for e in own if "backward" not in e.what]
    return forward[-1].end - forward[0].start


HOSTS = [
    ("A100 NVLink", 312, 300, 1.0, 6.2),
    ("A100 InfiniBand", 312, 12.5, 24.5, 149.5),
    ("TPUv3", 123, 112, 1.1, 6.6),
    ("TPUv4", 275, 268, 1.0, 6.2),
    ("TPUv5e", 196, 186, 1.1, 6.3),
]


@pytest.mark.parametrize(("name", "tera", "giga", "block", "sequence"), HOSTS)
def test_smallest_block_that_hides_a_hop(
    name: str, tera: float, giga: float, block: float, sequence: float
) -> None:
    """Ring Attention, table 2: c >= F/B (bf16, MHA, full mask), 6 c tokens a host."""
    flops, bandwidth = tera * 1e12, giga * 1e9
    least = flops / bandwidth
    assert least / 1000 == pytest.approx(block, rel=0.06)
    assert 6 * least / 1000 == pytest.approx(sequence, rel=0.02)
    cluster = ideal(flops, bandwidth)
    full = masked(MHA, "full")
    for c, hidden in ((int(least * 0.98), False), (int(least * 1.02) + 2, True)):
        assert (waits(full, cluster, 4 * c) < 1e-12) == hidden


@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_general_condition(mask: str, kv_heads: int) -> None:
    """c >= (e/2) (F/B) / G, twice that for balanced causal attention."""
    model = ModelShape.decoder(
        layers=1, hidden=4096, heads=32, kv_heads=kv_heads, vocab=1000, mlp_width=4096
    )
    flops, bandwidth = 2e14, 1e10
    least = flops / bandwidth / (32 / kv_heads) * (2 if mask == "causal" else 1)
    if mask == "full":  # of 4 ranks; Meta's law: T >= N C N_KV e / (2 N_H BW)
        assert 4 * least == pytest.approx(4 * flops * kv_heads * 2 / (2 * 32 * bandwidth))
    for c, hidden in ((int(least * 0.98), False), (int(least * 1.02), True)):
        cluster = ideal(flops, bandwidth)
        assert (waits(masked(model, mask), cluster, 4 * (c // 2 * 2)) < 1e-12) == hidden


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_gradients_hide_behind_half_of_the_own_block(mask: str) -> None:
    """Backward of a ring of two: keys arrive behind half of the own block, and the sums of their
    gradients, twice as long in bf16, go home behind the other half."""
    flops, bandwidth, s = 2e14, 1e10, 4096
    c, model, kind = s // 2, masked(MHA, mask), "zigzag" if mask == "causal" else "contiguous"
    half = 2.5 * 4 * c * c * 4096 / flops / (4 if mask == "causal" else 2)
    hop = 2 * c * 4096 * 4 / bandwidth
    for faster, hidden in ((0.98 * hop / half, False), (1.02 * hop / half, True)):
        cluster = ideal(flops, bandwidth * faster)
        events = priced(f"ring_2_{kind}", model, cluster, seq_len=s).timeline
        rounds = {e.what: e for e in events if e.what.startswith("attention backward")}
        last, gradients = (rounds[f"attention backward {what} 2"] for what in ("round", "hop"))
        assert last.start == gradients.start
        assert (gradients.end <= last.end) == hidden
        assert rounds["attention backward hop 0"].end < rounds["attention backward round 0"].end
        assert "attention backward hop 1" not in rounds


def test_a_block_of_one_small_tile_is_not_cut() -> None:
    (block,) = masked(SMALL, "full").blocks
    for kind, rows, kept in (("contiguous", 256, True), ("contiguous", 254, False)):
        assert keeps_back(block.rule, SequenceLayout(kind, 2), 2 * rows) == kept  # type: ignore[arg-type]
    assert keeps_back(masked(SMALL, "causal").blocks[0].rule, SequenceLayout("zigzag", 2), 8)


@pytest.mark.parametrize(("element", "more"), [(2, 3), (4, 2)])
def test_backward_sends_two_to_three_times_as_much_and_computes_two_and_a_half(
    element: int, more: int
) -> None:
    shape = AttentionShape(1, 8192, 32, 32, 128, element_bytes=element)
    steps = Ring(8).comm_steps(shape)
    assert total_bytes(steps, "backward") == more * total_bytes(steps, "forward")
    forward, backward = (
        attention_flops(shape, causal=True, phase=phase) for phase in ("forward", "backward")
    )
    assert forward == 2 * 8192 * 8193 * 4096
    assert backward == 2.5 * forward


def waits(model: ModelShape, cluster: object, s: int) -> float:
    """Seconds in which a ring of four waits in one prefill."""
    kind = "contiguous" if model.blocks[0].mask == "full" else "zigzag"
    plan = f"ring_4_{kind}"
    return priced(plan, model, cluster, seq_len=s // 8 * 8, mode="prefill").exposed_seconds  # type: ignore[arg-type]


def test_small_blocks_are_a_chain_of_latencies() -> None:
    """Too little work a hop: the ring takes P - 1 latencies, whatever is computed."""
    cluster = ideal(1e18, 1e18, latency=1e-3)
    for n in (2, 8, 64):
        assert priced(f"ring_{n}", cluster=cluster, seq_len=1024, mode="prefill").step_seconds == (
            pytest.approx(SMALL.layers * (n - 1) * 1e-3, rel=0.02)
        )


def test_attention_grows_256_fold() -> None:
    """8K -> 128K."""
    flops = [
        attention_flops(AttentionShape(1, s, 32, 8, 128), causal=False, phase="forward")
        for s in (8192, 131072)
    ]
    assert flops[1] == 256 * flops[0]
