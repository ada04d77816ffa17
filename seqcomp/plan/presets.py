"""Preset names: ``usp_4x8``, ``ring_4_allgather``, ``usp_2x2+megatron_sp_2``, ``ring_2+fsdp``.

A preset is one or more terms joined by ``+`` (or ``_``, as in file names), each a strategy
with its degrees. Axes are ordered data, ring, ulysses, tensor, outermost first. Every file
in ``plans/`` is such a name, and says the same as what is composed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.plan.nearest import nearest

MESH_ORDER = ("data", "ring", "ulysses", "tensor")
EXAMPLES = (
    "ring_4",
    "ulysses_8",
    "usp_4x8",
    "megatron_sp_8",
    "data_2",
    "fsdp_8",
    "ring_2+fsdp",
    "data_2+ring_2",
    "usp_2x2+megatron_sp_2",
)

_RING_OPTIONS = r"(?P<options>(?:_(?:auto|contiguous|striped|zigzag|p2p|allgather))*)"
_TERMS = tuple(
    re.compile(pattern)
    for pattern in (
        r"usp_(?P<ring>\d{1,9})x(?P<ulysses>\d{1,9})" + _RING_OPTIONS,
        r"ring_(?P<ring>\d{1,9})" + _RING_OPTIONS,
        r"ulysses_(?P<ulysses>\d{1,9})",
        r"megatron_sp_(?P<megatron_sp>\d{1,9})",
        r"data_(?P<data>\d{1,9})",
        r"fsdp_(?P<fsdp_data>\d{1,9})",
        r"(?P<fsdp>fsdp)",
    )
)


@dataclass
class _Composition:
    degrees: dict[str, int] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)

    def add(self, strategy: str, degree: int | None, options: dict[str, Any]) -> None:
        if strategy in self.options:
            self.twice.append(strategy)
        self.options[strategy] = options
        if degree is not None:
            self.degrees[strategy] = degree


def is_preset(name: str) -> bool:
    """Whether the name has the form of a preset; it may still be refused."""
    return len(name) <= 200 and _terms(name) is not None


def compose(name: str) -> tuple[dict[str, Any] | None, tuple[Diagnostic, ...]]:
    """The plan that a preset name stands for, as a dict of the plan language."""
    terms = _terms(name)
    assert terms is not None, "ask is_preset first"
    parts = _Composition()
    for term in terms:
        _add(parts, term)
    if parts.twice:
        found = diagnostic(
            "SC013",
            where=name,
            message=f"the preset names {' and '.join(sorted(set(parts.twice)))} twice",
            found=name,
            help="name each strategy once; usp is ring and ulysses together",
        )
        return None, (found,)
    if not parts.degrees:
        found = diagnostic(
            "SC011",
            where=name,
            message="fsdp alone does not say over how many ranks",
            found=name,
            legal=("fsdp_8", "ring_4+fsdp", "data_2+ring_2+fsdp"),
            help="write fsdp_<ranks>, or join it with a strategy",
        )
        return None, (found,)
    owners = {"tensor": "megatron_sp"}
    mesh = {
        axis: parts.degrees[owners.get(axis, axis)]
        for axis in MESH_ORDER
        if owners.get(axis, axis) in parts.degrees
    }
    return {"mesh": mesh, "strategies": parts.options}, ()


def nearest_preset(name: str) -> str | None:
    """A preset close to a mistyped one."""
    return nearest(name, EXAMPLES)


def _add(parts: _Composition, term: re.Match[str]) -> None:
    groups = {key: text for key, text in term.groupdict().items() if text is not None}
    for strategy in ("data", "ring", "ulysses", "megatron_sp"):
        if strategy in groups:
            options: dict[str, Any] = {}
            if strategy == "ring":
                options = {"layout": "zigzag"} if "ulysses" in groups else {}
                options |= _ring_options(groups["options"])
            parts.add(strategy, int(groups[strategy]), options)
    if "fsdp_data" in groups:
        parts.add("data", int(groups["fsdp_data"]), {})
    if "fsdp" in groups or "fsdp_data" in groups:
        parts.add("fsdp", None, {})


def _ring_options(text: str) -> dict[str, str]:
    words = [word for word in text.split("_") if word]
    return {"transport" if word in ("p2p", "allgather") else "layout": word for word in words}


def _terms(name: str) -> list[re.Match[str]] | None:
    found: list[re.Match[str]] = []
    at = 0
    while True:
        match = next(filter(None, (term.match(name, at) for term in _TERMS)), None)
        if match is None:
            return None
        found.append(match)
        at = match.end()
        if at == len(name):
            return found
        if name[at] not in "+_":
            return None
        at += 1
