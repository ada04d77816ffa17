"""Module path patterns: ``*`` is one path component, ``**`` any number of them (also none)."""

from __future__ import annotations

import re


def matches(pattern: str, path: str) -> bool:
    """Whether the whole path matches.

    >>> matches("model.layers.*.self_attn", "model.layers.7.self_attn")
    True
    >>> matches("**.experts", "experts")
    True
    """
    return _regex(pattern).fullmatch(_dotted(path)) is not None


def covers(pattern: str, path: str) -> bool:
    """Whether the pattern names the module at ``path`` or one that contains it."""
    parts = path.split(".")
    regex = _regex(pattern)
    ancestors = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
    return any(regex.fullmatch(_dotted(item)) for item in ancestors)


def _dotted(path: str) -> str:
    return f".{path}" if path else ""


def _regex(pattern: str) -> re.Pattern[str]:
    parts: list[str] = []
    for component in pattern.split("."):
        if component == "**":
            if not parts or parts[-1] != r"(?:\.[^.]+)*":  # two in a row are one: no backtracking
                parts.append(r"(?:\.[^.]+)*")
        else:
            inner = re.sub(r"\*+", "*", component)
            parts.append(r"\." + "[^.]*".join(re.escape(text) for text in inner.split("*")))
    return re.compile("".join(parts))
