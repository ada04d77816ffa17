"""The closest legal spelling of a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The most similar choice, or None where nothing is similar.

    >>> nearest("rign", ("ring", "ulysses"))
    'ring'
    """
    close = difflib.get_close_matches(name[:200], list(choices), n=1, cutoff=0.5)
    return close[0] if close else None
