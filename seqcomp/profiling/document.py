"""Measurements -> a document of the cluster file's format; imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from seqcomp.hardware.schema import ClusterFile
from seqcomp.profiling.measured import MeasuredKernels, MeasuredRate, Rates

SOURCE = "seqcomp bench"
_IDLE_GB_S = 1.0


def cluster_document(
    kernels: MeasuredKernels,
    inside: Sequence[MeasuredRate],
    across: Sequence[MeasuredRate],
    *,
    name: str,
    device: str,
    transport: str,
    ranks_per_node: int,
    nodes: int,
) -> dict[str, Any]:
    """Plain data of a `ClusterFile`, checked.

    Peaks are the fastest that was measured, so that shares of them are at most 1: the first dtype
    of ``kernels.dense`` in any kernel, others as far as products go.
    """
    main, *others = kernels.dense
    dense = kernels.dense[main]
    every = (*dense, *kernels.attention_forward, *kernels.attention_backward)
    peak = max(rate for _, rate in every)
    widest = dense[-1][1] / peak
    peaks = {main: peak, **{name: kernels.dense[name][-1][1] / widest for name in others}}

    def share(rates: Rates) -> dict[str, Any]:
        return {"points": [[x, _round(y / peak)] for x, y in rates], "source": SOURCE}

    document = {
        "name": name,
        "device": {
            "name": device,
            "memory_gib": _number(kernels.memory / 2**30),
            "memory_gb_s": _number(kernels.copy / 1e9),
            "peak_tflops": {
                key: {"value": _round(value / 1e12), "source": f"{SOURCE}: the fastest kernel"}
                for key, value in peaks.items()
            },
            "kernels": {
                "dense": share(dense),
                "attention_forward": share(kernels.attention_forward),
                "attention_backward": share(kernels.attention_backward),
                "streaming": _number(kernels.stream / kernels.copy),
                "launch_us": _number(kernels.launch * 1e6),
                "contention": _number(kernels.contention),
            },
        },
        "gpus_per_node": ranks_per_node,
        "max_nodes": nodes,
        "intra": _link(transport, inside),
        "inter": _link(f"{transport} between nodes", across)
        if across
        else _link(transport, inside),
        "notes": [f"Measured by {SOURCE}, all ranks at once."],
    }
    ClusterFile.model_validate(document)
    return document


def _link(name: str, rates: Sequence[MeasuredRate]) -> dict[str, Any]:
    by_kind: dict[str, list[MeasuredRate]] = defaultdict(list)
    for rate in rates:
        by_kind[rate.kind].append(rate)
    messages = by_kind.get("p2p", [])
    if not messages:
        unknown = {"value": _IDLE_GB_S, "source": "one rank: not measured"}
        return {"name": name, "latency_us": {**unknown, "value": 0}, "gb_s": unknown}
    return {
        "name": name,
        "latency_us": _number(messages[0].latency * 1e6),
        "gb_s": _number(messages[0].bandwidth / 1e9),
        "rates": {
            kind: {
                "points": [
                    {
                        "ranks": rate.ranks,
                        "latency_us": _round(rate.latency * 1e6),
                        "gb_s": _round(rate.bandwidth / 1e9),
                    }
                    for rate in own
                ],
                "source": SOURCE,
            }
            for kind, own in by_kind.items()
        },
    }


def _number(value: float) -> dict[str, Any]:
    return {"value": _round(value), "source": SOURCE}


def _round(value: float) -> float:
    """Four digits: more would be noise."""
    return float(f"{value:.4g}")
