"""Wall-clock seconds of an operation that all ranks run at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from seqcomp.profiling.sizes import Sizes
from seqcomp.runtime.comm import RankContext

_MOST_IN_A_ROW = 200


def seconds_of(context: RankContext, operation: Callable[[], object], sizes: Sizes) -> float:
    """Median of repeats of the slowest rank; all ranks begin together.

    Short operations are run several times in a row, as often on every rank. Collective.
    """
    _one(context, operation, 1)
    first = context.host.all_max([_one(context, operation, 1)])[0]
    row = max(1, min(_MOST_IN_A_ROW, int(sizes.window * 1e9) // max(first, 1)))
    own = []
    for _ in range(sizes.repeats):
        context.host.all_max([0])
        own.append(_one(context, operation, row))
    return statistics.median(context.host.all_max(own)) / row / 1e9


def _one(context: RankContext, operation: Callable[[], object], times: int) -> int:
    start = time.perf_counter_ns()
    for _ in range(times):
        operation()
    if context.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter_ns() - start
