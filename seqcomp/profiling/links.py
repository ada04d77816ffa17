"""Collectives of every kind between the ranks of this job, as the runtime makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import torch

from seqcomp.profiling.line import latency_and_bandwidth
from seqcomp.profiling.measured import MeasuredRate
from seqcomp.profiling.sizes import Sizes
from seqcomp.profiling.timing import seconds_of
from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.dist import process_context
from seqcomp.strategies.base import Kind

KINDS: tuple[Kind, ...] = get_args(Kind)


def group_sizes(most: int) -> list[int]:
    """Divisors of ``most`` above 1 that double, and ``most`` itself: 8 -> 2, 4, 8."""
    sizes = [size for size in (2**n for n in range(1, most.bit_length())) if most % size == 0]
    return sizes if most in sizes or most == 1 else [*sizes, most]


def measure_groups(
    mesh: dict[str, int], sizes: Sizes, tell: Callable[[str], None]
) -> Iterator[MeasuredRate]:
    """Along the axis "measured" of a mesh of all ranks; every group of it works at once."""
    context = process_context(mesh)
    try:
        comm = context.comm(("measured",))
        for kind in KINDS:
            tell(f"{kind} of {comm.size}")
            points = []
            for size in sizes.messages:
                operation, sent = _operation(comm, kind, size, context.device)
                points.append((sent, seconds_of(context, operation, sizes)))
            latency, bandwidth = latency_and_bandwidth(points)
            yield MeasuredRate(kind, comm.size, latency, bandwidth, tuple(points))
    finally:
        context.close()


def _operation(
    comm: Communicator, kind: Kind, size: int, device: torch.device
) -> tuple[Callable[[], object], int]:
    """A collective in which this rank sends about ``size`` bytes, and how many it sends."""
    n = comm.size

    def floats(count: int) -> torch.Tensor:
        return torch.ones(max(count // 4, 1), device=device)

    match kind:
        case "all_gather":
            part = floats(size // (n - 1))
            return lambda: comm.all_gather(part), (n - 1) * part.numel() * 4
        case "reduce_scatter" | "all_to_all":
            rows = floats(size // (n - 1)).repeat(n, 1)
            run = comm.reduce_scatter if kind == "reduce_scatter" else comm.all_to_all
            return lambda: run(rows), (n - 1) * rows[0].numel() * 4
        case "all_reduce":
            whole = floats(size * n // (2 * (n - 1)))
            return lambda: comm.all_reduce(whole), 2 * (n - 1) * whole.numel() * 4 // n
        case "p2p":
            block = floats(size)
            to, source = (comm.rank + 1) % n, (comm.rank - 1) % n
            return (
                lambda: comm.start_exchange([block], to=to, source=source).wait(),
                block.numel() * 4,
            )
