"""Under a window the ranks along a ring send different keys: explain and estimate show the same
one, the busiest, and say which."""

from __future__ import annotations

from typing import Any

import pytest

from seqcomp.cost.estimate import estimate
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.cost.workload import workload_of
from seqcomp.hardware.load import load_cluster
from seqcomp.integrations.explain import explain
from seqcomp.report.estimate import estimate_text
from tests.fixtures.pricing import planned

S, WINDOW, KEY = 256, 20, 2 * 2 * 8  # numbers of one token's keys and values
MISTRAL = (
    "hf:MistralForCausalLM?num_hidden_layers=1&hidden_size=32&intermediate_size=48&vocab_size=64&"
    f"num_attention_heads=4&num_key_value_heads=2&head_dim=8&sliding_window={WINDOW}"
)
SHAPE = ModelShape.decoder(
    layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=64, mlp_width=48,
    mask="window", window=WINDOW,
)  # fmt: skip


USP = {
    "mesh": {"ring": 3, "ulysses": 2},
    "strategies": {"ring": {"layout": "contiguous"}, "ulysses": {}},
}


@pytest.mark.parametrize("name", ["ring_4_contiguous", USP], ids=str)
def test_both_show_the_busiest(name: Any) -> None:
    """By hand: a rank sends the last keys of its block to the next, and gets gradients back; in the
    middle of the sequence it does both."""
    length = S if name != USP else 252
    report = explain(MISTRAL, name, seq_len=length, dtype="bf16")
    plan, run = planned(name, SHAPE, length), Run(length)
    (own,) = workload_of(plan, SHAPE, run).blocks
    found = estimate(plan, SHAPE, load_cluster("h100"), run, advise=False)
    rows = [r for r in report.comm if r.axis == "ring" and r.module.endswith("self_attn")]
    steps = [s for s in own.attention if s.axis == "ring"]
    heads = plan.ulysses_size
    for phase, each in (("forward", 2), ("backward", 2 + 4)):
        keys = (WINDOW - 1) * KEY // heads
        assert sum(r.bytes_sent for r in rows if r.phase == phase) == keys * each
        assert sum(s.bytes_sent for s in steps if s.phase == phase) == keys * each
    assert report.ring_rank == report.busiest == found.busiest.sends == 1
    assert "rank 1 along the ring (which sends most)" in str(report)
    assert "rank 1 sends most" in estimate_text(found)
    assert report.to_json()["ring_rank"] == report.ring_rank


def test_where_all_send_the_same_nobody_is_named() -> None:
    report = explain(MISTRAL.partition("&sliding")[0] + "&sliding_window=null", "ring_4",
                     seq_len=S, dtype="bf16")  # fmt: skip
    assert (report.ring_rank, report.busiest) == (None, None)
    assert "each rank sends" in str(report)
