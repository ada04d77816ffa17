"""Which compositions there are: factors of the GPU count, orders of the mesh, options.

Everything here is exact and cheap integer work; what a composition costs is asked elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from seqcomp.hardware.cluster import Cluster
from seqcomp.plan.legality import divisors, head_degrees, length_factor
from seqcomp.plan.schema import Transport
from seqcomp.search.composition import Checkpoint, Composition, Degrees
from seqcomp.strategies.ring import Layout


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen: each option in the order in which it is preferred at equal cost.

    ``checkpoint`` and ``loss_chunks`` go from the fastest to the one that keeps least.
    """

    layouts: tuple[Layout, ...] = ("zigzag", "striped", "contiguous")
    transports: tuple[Transport, ...] = ("p2p", "allgather")
    fsdp: bool = True
    checkpoint: tuple[Checkpoint, ...] = ("none", "selective", "block")
    loss_chunks: tuple[int, ...] = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the run allow.

    ``heads``: (query, KV) heads of every attention; ``widths``: sizes that the tensor degree
    divides; ``batch``: sequences of all GPUs together, which the data degree divides. ``padding``:
    whether lengths that do not divide may be padded.
    """

    heads: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    batch: int
    length: int
    causal: bool
    padding: bool = False

    def tensor_degrees(self) -> tuple[int, ...]:
        """P divides Hq and every width; P divides Hkv or Hkv divides P."""
        fits = _common(head_degrees(q, kv) for q, kv in self.heads)
        return tuple(p for p in fits if all(width % p == 0 for width in self.widths))

    def ulysses_degrees(self, tensor: int) -> tuple[int, ...]:
        """As ``head_degrees`` on the Hq/t and max(Hkv/t, 1) heads of a tensor rank."""
        return _common(head_degrees(q // tensor, max(kv // tensor, 1)) for q, kv in self.heads)


def _common(sets: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """What all have, ascending."""
    return tuple(sorted(set.intersection(*map(set, sets))))


def all_degrees(gpus: int, limits: Limits) -> Iterator[Degrees]:
    """Every legal factorisation of ``gpus`` over data, ring, ulysses and tensor."""
    for tensor in limits.tensor_degrees():
        if gpus % tensor:
            continue
        for ulysses in limits.ulysses_degrees(tensor):
            rest, left = divmod(gpus, tensor * ulysses)
            if left:
                continue
            for data in divisors(math.gcd(rest, limits.batch)):
                found = Degrees(data, rest // data, ulysses, tensor)
                if layouts_of(found, limits):
                    yield found


def layouts_of(degrees: Degrees, limits: Limits) -> tuple[Layout, ...]:
    """The layouts for which the length divides; one ring rank has only the contiguous one.

    Balanced layouts are for causal masks: elsewhere they cost the same and bring nothing.
    """
    wanted: tuple[Layout, ...] = ("contiguous",)
    if degrees.ring > 1 and limits.causal:
        wanted = ("zigzag", "striped", "contiguous")
    return tuple(
        layout
        for layout in wanted
        if limits.padding or limits.length % length_factor(layout, degrees.ring, degrees.inner) == 0
    )


def orders_of(degrees: Degrees, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Orders of the mesh that differ in how axes lie in nodes, the usual one first.

    What carries an axis, or several together, depends on how many of its ranks share a node alone:
    orders in which all axes agree in that cost the same.
    """
    seen = set()
    for order in itertools.permutations(degrees.axes):
        mesh = {axis: degrees.of(axis) for axis in order}
        inside = frozenset((axis, cluster.span(mesh, (axis,)).inside) for axis in order)
        if inside not in seen:
            seen.add(inside)
            yield order


def shardings_of(degrees: Degrees, space: Space) -> Iterator[tuple[tuple[str, ...], bool]]:
    """(axes of fsdp, reshard): none, then every set of axes that may carry it."""
    yield (), True
    if not space.fsdp:
        return
    free = [axis for axis in degrees.axes if axis != "tensor"]
    for count in range(len(free), 0, -1):
        for axes in itertools.combinations(free, count):
            yield axes, True
            yield axes, False


def arrangements_of(
    degrees: Degrees, order: tuple[str, ...], limits: Limits, space: Space
) -> Iterator[Composition]:
    """Every choice of layout and transport; nothing sharded, nothing given up for memory."""
    legal = layouts_of(degrees, limits)
    layouts = [layout for layout in space.layouts if layout in legal] or list(legal)
    transports = space.transports if degrees.ring > 1 else ("p2p",)
    for layout, transport in itertools.product(layouts, transports):
        padded = limits.length % length_factor(layout, degrees.ring, degrees.inner) != 0
        yield Composition(degrees, order, layout, transport, padded=padded)


def thriftiest_of(degrees: Degrees, limits: Limits, space: Space) -> Iterator[Composition]:
    """The compositions that may hold least: all given up for memory, whole or fully sharded.

    Orders and layouts change what is sent and when, not what is held, but for padding. Of long
    sequences either kind of checkpoint may hold least: ``block`` keeps less, but the MLPs of
    ``selective`` run in chunks.
    """
    legal = arrangements_of(degrees, degrees.axes, limits, space)
    first = min(legal, key=lambda composition: composition.factor)
    free = tuple(axis for axis in degrees.axes if axis != "tensor")
    for checkpoint in space.checkpoint[-2:]:
        arranged = replace(first, checkpoint=checkpoint, loss_chunks=space.loss_chunks[-1])
        if free and space.fsdp:
            yield replace(arranged, fsdp=free)
        yield arranged


def size_of(gpus: int, limits: Limits, space: Space, cluster: Cluster) -> int:
    """How many compositions there are."""
    options = len(space.checkpoint) * len(space.loss_chunks)
    return options * sum(
        len(list(shardings_of(degrees, space)))
        * sum(
            len(list(arrangements_of(degrees, order, limits, space)))
            for order in orders_of(degrees, cluster)
        )
        for degrees in all_degrees(gpus, limits)
    )
