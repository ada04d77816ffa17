"""Whole steps: tables 4 and 5 of Korthikanti et al. (2022), and torchtitan's Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Iterator

from seqcomp.cost.alone import block_timelines
from seqcomp.cost.estimate import estimate
from seqcomp.cost.named import load_shape
from seqcomp.cost.run import Run
from seqcomp.hardware.cluster import Cluster

from .rows import LLAMA_8B, Row, plan_of

LENGTH, TENSOR = 2048, 8
STAGES = {
    # sequences of a pass, bubble of the pipeline over its work
    "22B": (4, 0.0),
    "175B": (1, 7 / (64 * 3)),
    "530B": (1, 34 / (280 * 3)),
    "1T": (1, 63 / 512),
}
"""Table 3 of the paper: pipelines of 1, 8, 35 and 64 stages, the middle two interleaved by 3. Plans
have no pipeline; its bubble, (stages - 1) / (passes x interleaving), is taken as known."""

GPT = {name: load_shape(f"gpt-{name.lower()}") for name in STAGES}

MFU = {"22B": 41.5, "175B": 51.4, "530B": 56.0, "1T": 56.3}
"""Table 5, per cent, with sequence parallelism and selective recomputation on A100 80 GB."""

LAYER_MS = {
    "baseline (tensor parallel)": (7.7, 11.9, "all-reduces without sequence parallelism: no plan"),
    "sequence parallel": (7.2, 11.8, "keeps scores: attention here is fused and does not"),
    "full recomputation": (7.7, 19.5, "all-reduces without sequence parallelism: no plan"),
    "selective": (7.7, 13.2, "all-reduces without sequence parallelism: no plan"),
    "sequence parallel + selective": (7.2, 13.1, ""),
}
"""Table 4: one layer of 22B, forward and backward in ms; selective recomputes scores, as fused
attention does."""


def layer_ms(cluster: Cluster, name: str) -> tuple[float, float]:
    """Forward and backward of one layer over 8 GPUs."""
    run = Run(LENGTH, batch=STAGES[name][0])
    passes = block_timelines(plan_of({"tensor": TENSOR}), GPT[name], cluster, run)
    forward, backward = (one.now * 1e3 for one in passes)
    return forward, backward


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
    for name, (forward, backward, why) in LAYER_MS.items():
        for index, (what, ms) in enumerate((("forward", forward), ("backward", backward))):
            yield Row(
                "Korthikanti table 4",
                f"{name}, {what}",
                ms,
                "ms",
                lambda c, i=index: layer_ms(c, "22B")[i],
                why,
            )
    found = "22B", MFU["22B"], whole_mfu
    yield Row("Korthikanti table 5", found[0], found[1], "% MFU", found[2])
    for name, share in list(MFU.items())[1:]:
        yield Row("Korthikanti table 5", name, share, "% MFU", lambda c, n=name: mfu(c, n))


def titan_rate(cluster: Cluster) -> float:
    """Tokens a second and GPU of 8B at 32K on 8 GPUs with FSDP, everything recomputed."""
    plan = plan_of(
        {"data": 8},
        fsdp={"axes": ["data"], "mixed_precision": "bf16"},
        memory={"checkpoint": "block"},
        outputs={"logits": "drop"},
    )
    found = estimate(plan, LLAMA_8B, cluster, Run(32768, dtype="fp32"), advise=False)
    return found.tokens_per_second / plan.world_size


def titan_rows() -> Iterator[Row]:
    """Uncalibrated: nothing was fitted to it."""
    yield Row("torchtitan 2024-12", "8B, 32K, FSDP 8", 3890, "tokens/s/GPU", titan_rate)
