"""Module path patterns: ``*`` is one path component, ``**`` any number of them (also none).

A ``*`` within a component stands for any part of it. Matching takes time proportional to
pattern times path, whatever the pattern: plans come from anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence


def matches(pattern: str, path: str) -> bool:
    """Whether the whole path matches.

    >>> matches("model.layers.*.self_attn", "model.layers.7.self_attn")
    True
    >>> matches("**.experts", "experts")
    True
    """
    components = path.split(".") if path else []
    return len(components) in _matched_prefixes(pattern, components)


def covers(pattern: str, path: str) -> bool:
    """Whether the pattern names the module at ``path`` or one that contains it."""
    return bool(_matched_prefixes(pattern, path.split(".") if path else []))


def _matched_prefixes(pattern: str, path: Sequence[str]) -> set[int]:
    """All n for which the pattern matches the first n components."""
    ends = {0}
    for component in pattern.split("."):
        if not ends:
            break
        if component == "**":
            ends = set(range(min(ends), len(path) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(path) and _like(component, path[end])}
    return ends


def _like(pattern: str, text: str) -> bool:
    """Whether a component matches, ``*`` standing for any text; leftmost parts first."""
    first, *rest = pattern.split("*")
    if not rest:
        return text == first
    if not text.startswith(first):
        return False
    at = len(first)
    for middle in rest[:-1]:
        found = text.find(middle, at)
        if found < 0:
            return False
        at = found + len(middle)
    return text.endswith(rest[-1]) and len(text) - len(rest[-1]) >= at
