"""The errors of a search that finds nothing: what is missing, and what would do."""

from __future__ import annotations

from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.hardware.cluster import Cluster
from seqcomp.search.feasible import Change, Held, changes, least_memory
from seqcomp.search.pricing import Pricer
from seqcomp.search.space import Space


def too_few_gpus(cluster: Cluster, gpus: int) -> PlanError:
    """SC120: the cluster has fewer."""
    return PlanError(
        diagnostic(
            "SC120",
            where="gpus",
            message=f"{cluster.name} has {cluster.gpus} GPUs",
            found=gpus,
            legal=f"1 to {cluster.gpus}",
        )
    )


def nothing_fits(pricer: Pricer, space: Space, gpus: int) -> PlanError:
    """SC122: by how much, and after which changes something does."""
    run, least = pricer.run, least_memory(pricer, space, gpus)
    device = pricer.cluster.device
    row = max(pricer.price(least.composition).memory, key=lambda row: row.bytes)
    ways = [_way(change, pricer) for change in changes(pricer, space, gpus)]
    return PlanError(
        diagnostic(
            "SC122",
            where=f"{gpus} x {device.name}",
            message=f"one step of {pricer.model.name} at {run.seq_len} tokens and batch "
            f"{run.batch} does not fit: the composition that holds least, "
            f"{_described(least)}, is {_gib(least.bytes - device.memory)} too large for a GPU "
            f"(most of it: {row.what}, {_gib(row.bytes)})",
            found=_gib(least.bytes),
            legal=f"at most {_gib(device.memory)}",
            help="; or ".join(ways) or "no number of GPUs, length or batch that was tried fits",
        )
    )


def _way(change: Change, pricer: Pricer) -> str:
    value, have = change.value, pricer.cluster.gpus
    match change.what:
        case "gpus":
            way = f"use {value} GPUs" + (f", of which there are {have}" if value > have else "")
        case "seq_len":
            way = f"use a length of {value}"
        case "batch":
            steps = pricer.run.batch // value
            way = f"use a batch of {value} and accumulate the gradients of {steps}"
    return f"{way} ({_described(change.least)}: {_gib(change.least.bytes)})"


def _described(held: Held) -> str:
    chosen = held.composition
    parts = [str(chosen.degrees)]
    if chosen.fsdp:
        parts.append("fsdp")
    if chosen.checkpoint != "none":
        parts.append(f"checkpoint {chosen.checkpoint}")
    if chosen.loss_chunks > 1:
        parts.append(f"{chosen.loss_chunks} loss chunks")
    return ", ".join(parts)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
