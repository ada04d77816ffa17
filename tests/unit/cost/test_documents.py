"""What packed documents cost, against pairs counted one by one and bytes that the runtime sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from seqcomp.cost.estimate import Estimate, estimate
from seqcomp.cost.run import Run
from seqcomp.cost.workload import workload_of
from seqcomp.diagnostics import PlanError
from seqcomp.report.estimate import estimate_text
from seqcomp.runtime.attention.tiling import DataTiling
from seqcomp.search.search import search
from tests.fixtures.pricing import SMALL, ideal, masked, planned, priced
from tests.unit.layout.test_documents import pairs

S = 4096
PACKED = (2048, *(256,) * 8)


def attention_pairs(found: Estimate, flops: float = 1e12) -> float:
    """Of a head and layer of `SMALL`, forward, that one rank computes on an ideal cluster."""
    spent = sum(e.end - e.start for e in found.timeline if e.what.startswith("attention"))
    return spent * flops / (2 * 2 * 512)


def owned(ring: int, kind: str) -> Iterator[list[int]]:
    """Positions of each rank, as the layouts are described in words."""
    chunk = S // (2 * ring)
    for rank in range(ring):
        if kind == "striped":
            yield [p for p in range(S) if p % ring == rank]
        elif kind == "zigzag":
            yield [p for p in range(S) if p // chunk in (rank, 2 * ring - 1 - rank)]
        else:
            yield [p for p in range(S) if p * ring // S == rank]


def seen_by_rank(ring: int, kind: str) -> list[int]:
    """Pairs: of each query the tokens of its document up to itself."""
    place = [i + 1 for n in PACKED for i in range(n)]
    return [sum(place[p] for p in own) for own in owned(ring, kind)]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_the_busiest_rank_is_what_is_waited_for(kind: str) -> None:
    """Kernels at peak, links for nothing: its pairs and no others."""
    found = priced(
        f"ring_4_{kind}", SMALL, ideal(1e12, 1e30), seq_len=S, mode="prefill", documents=PACKED
    )
    counts = seen_by_rank(4, kind)
    assert attention_pairs(found) == pytest.approx(max(counts), rel=1e-9)
    assert found.busiest.attends == counts.index(max(counts))
    assert found.flops["causal"] < found.flops["full"]
    uneven = [f for f in found.findings if f.code == "SC418"]
    balance = max(counts) / (sum(counts) / 4)
    assert bool(uneven) == (balance > 1.1)
    if uneven:
        assert f"{balance:.2f}" in str(uneven[0].found)
        best = min(("contiguous", "zigzag", "striped"), key=lambda k: max(seen_by_rank(4, k)))
        assert f"layout: {best}" in str(uneven[0].help)
        assert f"rank {counts.index(max(counts))} " in uneven[0].message
    assert not [f for f in found.findings if f.code in ("SC207", "SC208")]


@pytest.mark.parametrize("name", ["ring_4_contiguous", "ring_4_zigzag", "usp_2x2", "ring_8"])
@pytest.mark.parametrize("packed", [PACKED, (100,) * 40 + (96,), (S,)], ids=str)
def test_bytes_are_those_of_the_runtime(name: str, packed: tuple[int, ...]) -> None:
    """Of the rank that sends most keys and gradients of keys of all."""
    plan, run = planned(name, SMALL, S), Run(S, documents=packed)
    number = torch.tensor([i for i, n in enumerate(packed) for _ in range(n)])
    leaves = number.view(1, 1, -1, 1), number.view(1, 1, 1, -1)
    layout = plan.layout_for(S, all_causal=False)
    tiling: Any = DataTiling(pairs(SMALL.blocks[0].rule), leaves, layout, S, torch.device("cpu"))
    travel, (own,) = tiling.travel(), workload_of(plan, SMALL, run).blocks
    assert travel is not None
    key = 2 * 4 // plan.ulysses_size * 64  # numbers of one token's keys and values
    sent = [sum(travel.sent(rank)) for rank in range(layout.ring)]
    received = [sum(travel.received(rank)) for rank in range(layout.ring)]
    most = max(range(layout.ring), key=lambda rank: sent[rank] + received[rank])
    steps = [s for s in own.attention if s.axis == plan.ring_axis]
    forward = sum(s.bytes_sent for s in steps if s.phase == "forward")
    backward = sum(s.bytes_sent for s in steps if s.phase == "backward")
    assert forward == sent[most] * key * 2
    assert backward == sent[most] * key * 2 + received[most] * key * 4
    assert forward <= (layout.ring - 1) * S // layout.ring * key * 2


def test_documents_of_their_own_ranks_send_nothing() -> None:
    whole, packed = (
        priced("ring_4_contiguous", seq_len=S, documents=d) for d in (None, (1024,) * 4)
    )
    hops = [[e for e in x.timeline if "attention hop" in e.what] for x in (whole, packed)]
    assert hops[0]
    assert not hops[1]
    assert packed.busiest.attends is None


def test_no_axis_of_the_sequence_and_other_masks() -> None:
    """Ulysses and data ranks see whole documents; so do attentions both ways, and windows."""
    cluster = ideal(1e12, 1e30)
    every = sum(n * (n + 1) // 2 for n in PACKED)
    for name, share in (("data_2", 1), ("ulysses_4", 4), ("megatron_sp_2", 2)):
        found = priced(name, SMALL, cluster, seq_len=S, mode="prefill", documents=PACKED)
        assert attention_pairs(found) == pytest.approx(every / share, rel=1e-9)
    full = priced(
        "ulysses_4", masked(SMALL, "full"), cluster, seq_len=S, mode="prefill", documents=PACKED
    )
    assert attention_pairs(full) == pytest.approx(sum(n * n for n in PACKED) / 4, rel=1e-9)
    window = priced(
        "ulysses_4", masked(SMALL, "window", 100), cluster,
        seq_len=S, mode="prefill", documents=PACKED,
    )  # fmt: skip
    near = sum(min(i + 1, 100) for n in PACKED for i in range(n))
    assert attention_pairs(window) == pytest.approx(near / 4, rel=1e-9)


def test_wrong_documents_are_refused_with_what_is_missing() -> None:
    for lengths in ((), (S - 1,), (S, 1), (S, 0), (S + 1, -1)):
        with pytest.raises(PlanError) as caught:
            Run(S, documents=lengths)
        assert [d.where for d in caught.value.diagnostics] == ["documents"]
    with pytest.raises(PlanError, match="1024x3,1024"):
        Run(S, documents=(1024,) * 3)


def test_a_search_knows_what_documents_spare() -> None:
    """Of documents that ranks hold whole a contiguous ring is best."""
    cluster = ideal(1e13, 1e9, gpus_per_node=8)
    run = Run(S, mode="prefill", documents=(512,) * 8)
    found, plain = (search(SMALL, cluster, r, gpus=8) for r in (run, Run(S, mode="prefill")))
    assert found.best.composition.layout == "contiguous"
    assert found.best.composition.degrees.ring == 8
    assert found.best.price.step_seconds < plain.best.price.step_seconds
    assert found.to_json()["documents"] == "512x8"
    priced_again = estimate(planned("ring_8_contiguous"), SMALL, cluster, run)
    assert "documents of 512x8" in estimate_text(priced_again)
    assert priced_again.to_json()["documents"] == "512x8"


@pytest.mark.parametrize(("lengths", "fit"), [((64, 64, 64), "64x2"), ((100,), "100,28")])
def test_documents_that_do_not_add_up_get_those_that_do(lengths: tuple[int, ...], fit: str) -> None:
    with pytest.raises(PlanError) as error:
        Run(128, documents=lengths)
    assert error.value.diagnostics[0].help == fit
