"""Who holds which tokens: the mesh, its ranks, and the global positions of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from seqcomp.layout.sequence import SequenceLayout
from seqcomp.plan.resolve import ResolvedPlan


@dataclass(frozen=True)
class Place:
    """Ranks of the mesh that hold the tokens at the positions `ranges`.

    `coords`: where they are along the axes that split the sequence. Several ranks share a place
    where other axes have them hold other sequences, or the same.
    """

    coords: Mapping[str, int]
    ranks: tuple[int, ...]
    ranges: tuple[range, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "coords": dict(self.coords),
            "ranks": list(self.ranks),
            "ranges": [[r.start, r.stop, r.step] for r in self.ranges],
        }


@dataclass(frozen=True)
class Tokens:
    """The mesh and its places, in the nesting order ring, ulysses, tensor.

    `roles`: what each mesh axis does, outermost first. `padded`: the length with what padding adds
    at its end; None where the model has no sequence, and then one place holds all of it.
    """

    roles: Mapping[str, str]
    layout: str
    ring: int
    inner: int
    padded: int | None
    places: tuple[Place, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "roles": dict(self.roles),
            "layout": self.layout,
            "ring": self.ring,
            "inner": self.inner,
            "padded": self.padded,
            "places": [place.to_json() for place in self.places],
        }


def tokens_of(layout: SequenceLayout, length: int | None, resolved: ResolvedPlan) -> Tokens:
    """Under `layout`, the one that the program runs with, for a full `length` in tokens."""
    padded = None if length is None else layout.padded(length)
    return Tokens(
        roles=_roles(resolved),
        layout=layout.kind,
        ring=layout.ring,
        inner=layout.inner,
        padded=padded,
        places=tuple(_places(layout, padded, resolved)),
    )


def _places(layout: SequenceLayout, padded: int | None, resolved: ResolvedPlan) -> Iterator[Place]:
    axes = resolved.sequence_axes
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(itertools.product(*(range(n) for n in resolved.axes.values()))):
        coords = dict(zip(resolved.axes, at, strict=True))
        ranks.setdefault(tuple(coords[a] for a in axes), []).append(rank)
    for index, at in enumerate(sorted(ranks)):
        own = () if padded is None else layout.ranges(padded, index)
        yield Place(dict(zip(axes, at, strict=True)), tuple(ranks[at]), own)


def _roles(resolved: ResolvedPlan) -> dict[str, str]:
    names = {
        resolved.data_axis: "data parallel: other sequences",
        resolved.ring_axis: "ring attention: parts of the sequence",
        resolved.ulysses_axis: "Ulysses: parts of the sequence, heads in attention",
        resolved.tensor_axis: "Megatron-SP: parts of the sequence, and of the weights",
    }
    found = {}
    for axis in resolved.axes:
        role = names.get(axis, "")
        sharded = "parameters sharded (FSDP2)" if axis in resolved.fsdp_axes else ""
        if axis in resolved.batch_axes and not role:
            role = "other sequences"
        found[axis] = "; ".join(filter(None, (role, sharded))) or "unused"
    return found
