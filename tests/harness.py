"""One-shot gloo ranks for tests that want processes of their own; see `fixtures.pool`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fixtures.pool import Pools


def run_gloo(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120) -> list[Any]:
    """`fn(rank, world, *args)` on fresh gloo ranks; their results in order of rank.

    `fn` must be importable, its arguments and results picklable. On a failure or past the time
    limit every rank is ended, and RankError carries the tracebacks.
    """
    pools = Pools()
    try:
        return pools.run(world, fn, *args, timeout=timeout)
    finally:
        pools.close()
