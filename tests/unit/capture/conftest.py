"""Captures are what is tested here: each is made anew."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def exports() -> None:
    """In place of the one that shares them."""
