"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fixtures.pool import Pools

# Workers, their ranks and their examples share the cores; read where torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Gloo ranks, shared by the session: `pools.run(world, fn, *args)`."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def exported_once() -> Iterator[None]:
    """Models of `tests.fixtures.models` are exported once a process: see `fixtures.exports`."""
    from tests.fixtures.exports import exported_once

    with exported_once():
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
