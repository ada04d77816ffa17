"""Whole steps: tables 4 and 5 of Korthikanti et al. (2022), and torchtitan's Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from seqcomp.cost.alone import block_timelines
from seqcomp.cost.collectives import collective_seconds
from seqcomp.cost.estimate import Estimate, estimate
from seqcomp.cost.named import load_shape
from seqcomp.cost.run import Run
from seqcomp.cost.timeline import Timeline
from seqcomp.hardware.cluster import Cluster
from seqcomp.strategies.base import total_bytes
from seqcomp.strategies.data import Data

from .rows import LLAMA_8B, Row, plan_of

LENGTH, TENSOR = 2048, 8
STAGES = {
    # sequences of a pass, bubble of the pipeline over its work
    "22B": (4, 0.0),
    "175B": (1, 7 / (64 * 3)),
    "530B": (1, 34 / (280 * 3)),
    "1T": (1, 63 / 512),
}
"""Table 3 and section 6 of the paper: pipelines of 1, 8, 35 and 64 stages over which 4 sequences at
once, 64, 280 and 512 one by one pass; the schedules of the middle two interleave 3 parts a stage.
Plans have no pipeline: its bubble, (stages - 1) / (passes x interleaving), follows from these."""

GPT = {name: load_shape(f"gpt-{name.lower()}") for name in STAGES}

MFU = {"22B": 41.5, "175B": 51.4, "530B": 56.0, "1T": 56.3}
"""Table 5, per cent, with sequence parallelism and selective recomputation on A100 80 GB."""

HFU = {"22B": 43.7, "175B": 52.8, "530B": 57.0, "1T": 57.0}
"""Table 5, per cent: the same iterations with recomputation counted."""


@dataclass(frozen=True)
class Way:
    """One of the paper's ways to run a layer over tensor ranks.

    sequence: norms and dropout on an eighth of the tokens, and gathers and scatters for all-reduces
    (which is what plans have). again: what backward runs a second time.
    """

    sequence: bool
    again: Literal["nothing", "scores", "everything"]


LAYER_MS = {
    "baseline (tensor parallel)": (Way(False, "nothing"), 7.7, 11.9),
    "sequence parallel": (Way(True, "nothing"), 7.2, 11.8),
    "full recomputation": (Way(False, "everything"), 7.7, 19.5),
    "selective": (Way(False, "scores"), 7.7, 13.2),
    "sequence parallel + selective": (Way(True, "scores"), 7.2, 13.1),
}
"""Table 4: one layer of 22B, forward and backward in ms."""


def layer_ms(cluster: Cluster, name: str, way: Way = Way(True, "scores")) -> tuple[float, float]:
    """Forward and backward of one layer over 8 GPUs.

    Fused attention recomputes its scores, a fifth of its backward. Ways that no plan has are those
    of a plan with other pieces; without sequence parallelism, backward's all-reduces run beside the
    gradients of weights (section 6.2).
    """
    run = Run(LENGTH, batch=STAGES[name][0])
    passes = block_timelines(plan_of({"tensor": TENSOR}), GPT[name], cluster, run)
    forward, backward = (one.now for one in passes)
    if way.again != "scores":
        backward -= _spent(passes[1], "attention backward") / 5
    if not way.sequence:
        whole = [(TENSOR - 1) * _spent(one, "norm") - sum(one.exposed.values()) for one in passes]
        forward += whole[0] + 2 * _all_reduce(cluster, name)
        backward += whole[1]
    if way.again == "everything":
        backward += forward
    return forward * 1e3, backward * 1e3


def _spent(timeline: Timeline, what: str) -> float:
    """Seconds of the pieces whose name starts so."""
    return sum(e.end - e.start for e in timeline.events if e.what.startswith(what))


def _all_reduce(cluster: Cluster, name: str) -> float:
    """Seconds of one, of a layer's whole output in bf16."""
    size = STAGES[name][0] * LENGTH * GPT[name].hidden * 2
    sent = total_bytes(Data(TENSOR).gradient_steps(size))
    span = cluster.span({"tensor": TENSOR}, ["tensor"])
    return collective_seconds(cluster, span, "all_reduce", sent)


def mfu(cluster: Cluster, name: str) -> float:
    """Per cent of peak, FLOPs of the model without recomputation and with all pairs."""
    (batch, bubble), hidden = STAGES[name], GPT[name].hidden
    flops = 72 * batch * LENGTH * hidden**2 * (1 + LENGTH / (6 * hidden))
    seconds = sum(layer_ms(cluster, name)) * 1e-3 * (1 + bubble)
    return 100 * flops / (seconds * TENSOR * cluster.device.peak["bf16"])


def whole_mfu(cluster: Cluster) -> float:
    """Per cent of 22B, which has no pipeline: head, loss and optimizer included."""
    run = Run(LENGTH, batch=STAGES["22B"][0])
    plan = plan_of({"tensor": TENSOR}, outputs={"logits": "drop"})
    return 100 * estimate(plan, GPT["22B"], cluster, run, advise=False).mfu["full"]


def megatron_rows() -> Iterator[Row]:
    """What constants are fitted to: the ways that plans have."""
    yield from _layer_rows("sequence parallel + selective")
    found = "22B", MFU["22B"], whole_mfu
    yield Row("Korthikanti table 5", found[0], found[1], "% MFU", found[2])
    for name, share in list(MFU.items())[1:]:
        yield Row("Korthikanti table 5", name, share, "% MFU", lambda c, n=name: mfu(c, n))


def other_ways() -> Iterator[Row]:
    """The rest of table 4, to which nothing is fitted."""
    for name in list(LAYER_MS)[:-1]:
        yield from _layer_rows(name)


def _layer_rows(name: str) -> Iterator[Row]:
    way, *both = LAYER_MS[name]
    for index, (what, ms) in enumerate(zip(("forward", "backward"), both, strict=True)):
        yield Row(
            "Korthikanti table 4",
            f"{name}, {what}",
            ms,
            "ms",
            lambda c, i=index: layer_ms(c, "22B", way)[i],
        )


def titan(cluster: Cluster) -> Estimate:
    """8B at 32K on 8 GPUs with FSDP, everything recomputed."""
    plan = plan_of(
        {"data": 8},
        fsdp={"axes": ["data"], "mixed_precision": "bf16"},
        memory={"checkpoint": "block"},
        outputs={"logits": "drop"},
    )
    return estimate(plan, LLAMA_8B, cluster, Run(32768, dtype="fp32"), advise=False)


def titan_rows() -> Iterator[Row]:
    """Nothing is fitted to them. Published with linears in fp8, predicted in bf16; the allocator's
    reserve is in the published memory."""
    source, name = "torchtitan 2024-12", "8B, 32K, FSDP 8"
    rate = lambda c: titan(c).tokens_per_second / 8  # noqa: E731
    yield Row(source, name, 3890, "tokens/s/GPU", rate)
    yield Row(source, f"{name}, memory", 83.9, "GiB", lambda c: titan(c).peak_bytes / 2**30)
