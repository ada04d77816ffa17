"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fixtures.pool import Pools, decoders_once

# Workers, their ranks and their examples share the cores; read where torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Gloo ranks, shared by the session: `pools.run(world, fn, *args)`."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="module", autouse=True)
def exports() -> Iterator[None]:
    """Small decoders are exported once a process: see `tests.fixtures.exports`."""
    with decoders_once():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))
