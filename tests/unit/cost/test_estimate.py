"""Time, memory and findings of plans on ideal clusters, by hand."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from seqcomp.cost.collectives import collective_seconds
from seqcomp.cost.estimate import estimate
from seqcomp.cost.named import known_models, load_shape
from seqcomp.cost.run import Run
from seqcomp.cost.timeline import Timeline
from seqcomp.diagnostics import PlanError
from seqcomp.hardware.cluster import Curve, Rate, Span
from seqcomp.hardware.load import load_cluster
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import resolve
from seqcomp.report.estimate import estimate_text
from tests.fixtures.pricing import SMALL, held, ideal, masked, planned, priced

NO_OUTPUT = {"outputs": {"logits": "drop"}}


def changed(plan: str, **keys: object) -> dict[str, object]:
    return {**load_plan(plan).to_dict(), **keys}


# --- collectives -----------------------------------------------------------------------------


def test_inside_a_node() -> None:
    """Latency of each message, and bytes over the bandwidth of one GPU."""
    cluster, span = ideal(bandwidth=1e9, latency=1e-3), Span(8, 8)
    expected = {"p2p": 1, "all_to_all": 1, "all_gather": 7, "reduce_scatter": 7, "all_reduce": 6}
    for kind, messages in expected.items():
        found = collective_seconds(cluster, span, kind, 0)  # type: ignore[arg-type]
        assert found == pytest.approx(messages * 1e-3)
    assert collective_seconds(cluster, span, "p2p", 7e9, 7) == pytest.approx(7 + 7e-3)
    # Long messages: a ring moves fewer bytes than a tree.
    assert collective_seconds(cluster, span, "all_reduce", 7e12) == pytest.approx(7e3, rel=1e-3)
    assert collective_seconds(cluster, Span(1, 1), "all_reduce", 5) == 0


def test_between_nodes() -> None:
    """Each GPU has a port of its own; a gather of k in each node crosses with k ports at once."""
    cluster = ideal(bandwidth=1e15, inter=1e9)
    assert collective_seconds(cluster, Span(16, 8), "p2p", 1e9) == pytest.approx(1)
    assert collective_seconds(cluster, Span(16, 8), "all_to_all", 15e9) == pytest.approx(8)
    assert collective_seconds(cluster, Span(16, 8), "all_gather", 15e9) == pytest.approx(1)
    assert collective_seconds(cluster, Span(16, 1), "all_gather", 15e9) == pytest.approx(15)
    slow = ideal(bandwidth=1e9, inter=1e15)
    assert collective_seconds(slow, Span(16, 8), "all_gather", 15e9) == pytest.approx(15)


def test_measured_rates_go_first() -> None:
    cluster = ideal(latency=1.0)
    rates = FrozenMap({"all_to_all": (Rate(4, 2.0, 1e9),)})
    cluster = replace(cluster, intra=replace(cluster.intra, rates=rates))
    assert collective_seconds(cluster, Span(4, 4), "all_to_all", 1e9) == pytest.approx(3)


# --- timelines -------------------------------------------------------------------------------


def test_rounds_end_with_the_slower() -> None:
    line = Timeline()
    line.rounds("x", "ring", "net", [3.0, 1.0, 1.0], [1.0, 2.0, 0.0])
    assert (line.now, line.computing, line.exposed) == (6.0, 5.0, {"ring": 1.0})
    long = Timeline()
    long.rounds("x", "ring", "net", [3.0, *[1.0] * 63], [*[2.0] * 63, 0.0])
    assert (long.now, long.exposed) == (3.0 + 62 * 2.0 + 1.0, {"ring": 62.0})
    assert [e.what for e in long.events][2:4] == ["x round 1 to 62", "x hop 1 to 62"]
    line = Timeline(contention=0.5)
    line.rounds("x", "ring", "net", [3.0, 1.0], [1.0, 0.0])
    assert (line.now, line.exposed) == (4.5, {})


def test_background_has_what_the_link_has_left() -> None:
    line = Timeline()
    line.compute("a", 4.0)
    line.exchange("b", "tensor", "net", 1.0)
    line.behind("c", "data", "net", 3.0)
    assert (line.now, line.exposed) == (5.0, {"tensor": 1.0})
    line.behind("d", "data", "net", 3.0)
    assert (line.now, line.exposed) == (7.0, {"tensor": 1.0, "data": 2.0})


def test_time_adds_up() -> None:
    for plan in ("ring_1", "usp_2x4", "ring_2+megatron_sp_4", "data_2+ring_4+fsdp"):
        for mode in ("train", "prefill"):
            found = priced(plan, cluster=load_cluster("h100"), mode=mode)
            total = found.compute_seconds + found.exposed_seconds
            assert total == pytest.approx(found.step_seconds)
            assert sum(found.exposed.values()) == pytest.approx(found.exposed_seconds)
            assert set(found.exposed) <= {"data", "ring", "ulysses", "tensor", "data+ring",
                                          "ring+ulysses", "ring+tensor"}  # fmt: skip
            for event in found.timeline:
                assert 0 <= event.start <= event.end
            assert (found.exposed_seconds > 0) == (plan != "ring_1")
            fields = found.to_json()
            assert json.loads(json.dumps(fields)) == fields
            assert found.model in estimate_text(found)


def test_compute_is_the_flops_at_peak() -> None:
    """Kernels at peak: what a rank computes is its share of the FLOPs, nothing is forgotten."""
    for plan in ("ring_1", "ring_4", "usp_2x2", "megatron_sp_4", "data_4", "usp_2x2+megatron_sp_2"):
        for memory in ({}, {"checkpoint": "block"}, {"checkpoint": "selective"}):
            found = priced(changed(plan, memory=memory, **NO_OUTPUT), cluster=ideal(1e12, 1e30))
            ranks = resolve(load_plan(plan)).world_size
            share = found.flops["hw"] / ranks / 1e12
            assert found.compute_seconds == pytest.approx(share, rel=2e-3)
    found = priced("ring_4", cluster=ideal(1e12, 1e30), mode="prefill")
    assert found.compute_seconds == pytest.approx(found.flops["hw"] / 4e12, rel=2e-3)


def test_work_is_divided_and_waits_are_not_free() -> None:
    fast, slow = ideal(1e13, 1e30), ideal(1e13, 1e8)
    one, four = (priced(plan, cluster=fast) for plan in ("ring_1", "ulysses_4"))
    assert one.step_seconds / four.step_seconds == pytest.approx(4, rel=1e-3)
    waits = priced("ulysses_4", cluster=slow)
    assert waits.compute_seconds == pytest.approx(four.compute_seconds)
    bytes_sent = 2 * 2 * 3 * 4096 * (2 * 512 + 2 * 256) // 16
    assert waits.exposed["ulysses"] >= SMALL.layers * bytes_sent / 2 / 1e8


def test_contiguous_waits_for_the_last_rank() -> None:
    slow, even = (
        priced(f"ring_8_{kind}", cluster=ideal(1e12, 1e30), seq_len=65536, mode="prefill")
        for kind in ("contiguous", "zigzag")
    )
    assert 1.3 < slow.step_seconds / even.step_seconds < 1.875


def test_windows_cost_less_than_causal() -> None:
    window = masked(SMALL, "window", 128)
    short, long = (
        priced("ring_4", model, ideal(1e12, 1e30), seq_len=32768, mode="prefill")
        for model in (window, SMALL)
    )
    assert short.flops["causal"] < long.flops["causal"] / 3
    assert short.step_seconds < long.step_seconds / 2


def test_sharded_parameters_travel_behind_computation() -> None:
    alone, hidden = (
        priced(plan, cluster=ideal(1e12, 1e11), seq_len=16384) for plan in ("data_4", "data_4+fsdp")
    )
    blocks = [e for e in hidden.timeline if e.stream == "background"]
    assert {e.what.split()[0] for e in blocks} == {"all_gather", "reduce_scatter"}
    assert hidden.exposed_seconds < 0.05 * hidden.step_seconds
    starved = priced("data_4+fsdp", cluster=ideal(1e15, 1e6))
    assert starved.exposed_seconds > 0.9 * starved.step_seconds
    assert alone.step_seconds <= hidden.step_seconds


def test_slow_kernels() -> None:
    """Efficiency at the length of a tile; an attention of short tiles is slower."""
    cluster = ideal(1e12, 1e30)
    curve = Curve(((256.0, 0.1), (4096.0, 1.0)))
    kernels = replace(cluster.device.kernels, attention_forward=curve)
    cluster = replace(cluster, device=replace(cluster.device, kernels=kernels))
    times = []
    for plan in ("ring_1", "ring_16"):
        events = priced(plan, cluster=cluster, mode="prefill").timeline
        times.append(sum(e.end - e.start for e in events if e.what.startswith("attention")))
    assert times[1] > 5 * times[0] / 16


# --- memory, findings ------------------------------------------------------------------------


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    """The advice, followed, is a plan that fits."""
    plan, s = changed("ring_4", **NO_OUTPUT), 32768
    need = priced(plan, seq_len=s).peak_bytes
    block = changed("ring_4", memory={"checkpoint": "block"}, **NO_OUTPUT)
    less = priced(block, seq_len=s).peak_bytes
    assert less < need
    cluster = ideal(memory=(less + need) // 2)
    found = priced(plan, cluster=cluster, seq_len=s)
    assert not found.fits
    (item,) = found.findings
    assert (item.code, item.severity) == ("SC121", "error")
    assert "checkpoint" in (item.help or "")
    assert "GiB more than ideal has" in item.message
    small = priced("ring_4", cluster=ideal(memory=less // 2), seq_len=s).findings[0]
    assert "memory: {checkpoint: block, loss_chunks: 8}" in (small.help or ""), "one section once"
    assert priced(block, cluster=cluster, seq_len=s).fits
    assert priced(block, cluster=cluster, seq_len=s).findings == ()
    tiny = ideal(memory=less // 2)
    (item,) = priced(block, cluster=tiny, seq_len=s).findings
    assert item.help
    quiet = estimate(planned(plan, SMALL, s), SMALL, cluster, Run(s), advise=False)
    assert not quiet.fits
    assert quiet.findings == ()


def test_what_is_not_counted_is_said() -> None:
    plan = changed(
        "ring_4",
        memory={"checkpoint": "block", "offload": "cpu"},
        overrides=[{"match": "**", "gather": True}],
    )
    found = [item for item in priced(plan).findings if item.code == "SC417"]
    assert [item.severity for item in found] == ["note", "note"]
    assert not priced("ring_4").findings
    odd = replace(SMALL, by_tokens=("layers.0.k",))
    notes = [len(priced(plan, odd).findings) for plan in ("megatron_sp_4", "ring_4")]
    assert notes == [1, 0]
    chunks = {"memory": {"loss_chunks": 2}}
    assert "SC118" in str(priced(changed("ring_4", **chunks)).findings[0])
    assert not priced(changed("ring_4", **chunks, **NO_OUTPUT)).findings


def test_padded_tokens_are_computed() -> None:
    padded = priced(changed("ring_4", padding="pad"), seq_len=4001)
    whole = priced("ring_4", seq_len=4008)
    assert padded.step_seconds == whole.step_seconds
    ours, theirs = held(padded), held(whole)
    assert ours.pop("output logits") * 4008 == theirs.pop("output logits") * 4001
    assert ours == theirs
    assert padded.tokens_per_second < whole.tokens_per_second


def test_memory_by_hand() -> None:
    found = held(priced(changed("megatron_sp_4", **NO_OUTPUT)))
    (block,) = SMALL.blocks
    p = block.parameters
    own = SMALL.layers * (p.matrices // 4 + p.norms) + 2 * 1024 * 512 // 4 + 512
    assert found["parameters"] == found["gradients"] == 2 * own
    assert found["optimizer state"] == 4 * own
    cache = held(priced("usp_2x2+megatron_sp_2", mode="prefill"))["keys and values"]
    assert cache == SMALL.layers * (4096 // 2) * (4 // 4) * 128 * 2
    mixed = changed("data_4", strategies={"data": {}, "fsdp": {"mixed_precision": "bf16"}})
    for dtype, kept in (("bf16", 2), ("fp32", 4)):
        shards = held(priced(mixed, dtype=dtype))
        assert shards["parameters"] == kept * SMALL.parameters // 4
        assert shards["gathered parameters"] < 2 * SMALL.parameters


def test_more_ranks_than_gpus() -> None:
    with pytest.raises(PlanError, match="the plan has 1024 ranks") as caught:
        priced("ring_1024", cluster=load_cluster("cpu-gloo"))
    assert caught.value.diagnostics[0].code == "SC120"
    with pytest.raises(PlanError) as caught:
        priced("ring_1", cluster=load_cluster("h100"), dtype="fp64")
    assert caught.value.diagnostics[0].code == "SC029"
    with pytest.raises(PlanError) as caught:
        Run(0, 0, "int3", "sleep")  # type: ignore[arg-type]
    assert [d.code for d in caught.value.diagnostics] == ["SC010"] * 4


def test_price() -> None:
    resolved = planned("ring_4")
    found = estimate(resolved, SMALL, ideal(), Run(4096), gpu_hour_price=2.5)
    assert found.gpu_hours == pytest.approx(4 * found.step_seconds / 3600)
    assert found.price == pytest.approx(2.5 * found.gpu_hours)
    assert found.tokens_per_second == pytest.approx(4096 / found.step_seconds)
    assert f"price {found.price:.4g}" in estimate_text(found)
    assert priced("ring_4").price is None


def test_known_models() -> None:
    for name in known_models():
        shape = load_shape(name)
        assert shape.name == name
        digits = name.split("-")[1]
        size = float(digits[:-1]) * (1e12 if digits.endswith("t") else 1e9)
        assert shape.parameters == pytest.approx(size, rel=0.05)


def test_experts() -> None:
    """Experts stay whole under Megatron-SP, and a token visits few of them."""
    shape = type(SMALL).decoder(
        layers=2, hidden=512, heads=8, vocab=64, mlp_width=1024, experts=8, active=2
    )
    (block,) = shape.blocks
    assert block.parameters.experts == 8 * 3 * 512 * 1024
    assert block.active_parameters == block.parameters.matrices + 2 * 3 * 512 * 1024
    whole, cut = (held(priced(p, shape))["parameters"] for p in ("ring_4", "megatron_sp_4"))
    assert whole > cut > 2 * 2 * block.parameters.experts


def test_thousands_of_plans_a_search() -> None:
    """A loose bound, far from a timing: one estimate is a matter of a millisecond."""
    resolved, cluster = (
        planned("usp_4x8+fsdp", load_shape("llama3-8b"), 131072),
        load_cluster("h100"),
    )
    shape, run = load_shape("llama3-8b"), Run(131072)
    start = time.process_time()
    for _ in range(20):
        estimate(resolved, shape, cluster, run, advise=False)
    assert (time.process_time() - start) / 20 < 0.02
