"""A prefill of a million tokens, and attention on GPUs that only PCIe joins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from seqcomp.cost.alone import attention_timeline, block_timelines
from seqcomp.cost.estimate import Estimate, estimate
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.frozenmap import FrozenMap

from .rows import LLAMA_8B, Row, attention_seconds, plan_of

MILLION = 1_000_000
PREFILL = {1: (180.0, 16.38), 4: (48.0, 4.10), 8: (26.0, 2.05)}
"""Seconds, and GB of keys and values a GPU, of Llama 3 8B over 8-way tensor parallelism, by the
degree of the ring. The GPU is not stated; the work implies 170 to 190 TFLOP/s of each."""

PREFILL_SPEED = 0.9
"""The one free constant: kernels of that GPU against those of A100, whose constants are known."""

SMALL = ModelShape.decoder(
    layers=1, hidden=512, heads=8, head_dim=64, vocab=512, mlp_width=2048, gated=False, mask="full",
    name="one layer of 512",
)  # fmt: skip
"""8 heads of 64 at 8192 tokens, not causal, in fp32: 1.37e11 FLOP of attention."""


def prefill(cluster: Cluster, ring: int, speed: float = PREFILL_SPEED) -> Estimate:
    """A million tokens over 8-way Megatron-SP in each of ``ring`` nodes of A100."""
    cluster = slower(cluster, speed)
    mesh = {"ring": ring, "tensor": 8} if ring > 1 else {"tensor": 8}
    length = MILLION if ring == 1 else MILLION // (16 * ring) * 16 * ring
    return estimate(plan_of(mesh), LLAMA_8B, cluster, Run(length, mode="prefill"), advise=False)


def slower(cluster: Cluster, factor: float) -> Cluster:
    """With ``factor`` times the FLOP/s."""
    device = cluster.device
    peak = FrozenMap({name: flops * factor for name, flops in device.peak.items()})
    return replace(cluster, device=replace(device, peak=peak))


def cache_gb(found: Estimate) -> float:
    """Keys and values that one GPU holds."""
    return next(row.bytes for row in found.memory if row.what == "keys and values") / 1e9


def prefill_rows() -> Iterator[Row]:
    for ring, (seconds, _) in PREFILL.items():
        name = f"1M tokens, 8B, tensor 8 x ring {ring}"
        yield Row("long prefill", name, seconds, "s", lambda c, r=ring: prefill(c, r).step_seconds)


def serial_ring(cluster: Cluster, degree: int) -> float:
    """Seconds of attention where nothing travels while a tile is computed."""
    plan = plan_of({"ring": degree}, ring={"layout": "contiguous"})
    run = Run(8192, dtype="fp32", mode="prefill")
    events = attention_timeline(plan, SMALL, cluster, run).events
    return sum(event.end - event.start for event in events)


def tensor_parallel(cluster: Cluster, degree: int) -> tuple[float, float]:
    """Seconds of the forward of one layer, and the share that waits for communication."""
    run = Run(8192, dtype="fp32", mode="prefill")
    forward, _ = block_timelines(plan_of({"tensor": degree}), SMALL, cluster, run)
    return forward.now, sum(forward.exposed.values()) / forward.now


def pcie_rows() -> Iterator[Row]:
    yield Row(
        "attention over PCIe",
        "ring 1, 8K tokens",
        8.3,
        "ms",
        lambda c: 1e3 * attention_seconds(c, SMALL, 8192, "prefill", dtype="fp32"),
    )
    yield Row(
        "attention over PCIe",
        "serial ring 8 against ring 1",
        2.4,
        "x",
        lambda c: serial_ring(c, 1) / serial_ring(c, 8),
    )
    yield Row(
        "attention over PCIe",
        "tensor 8, share of communication",
        86.0,
        "%",
        lambda c: 100 * tensor_parallel(c, 8)[1],
    )
    yield Row(
        "attention over PCIe",
        "tensor 8 against tensor 1",
        1.0,
        "x",
        lambda c: tensor_parallel(c, 1)[0] / tensor_parallel(c, 8)[0],
    )
