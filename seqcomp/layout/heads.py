"""Which heads each Ulysses rank computes, for any heads and any degree.

Every rank gets n = ceil(Hq/P) query slots, so that no map of equal shares has less work. The
slots come in chunks of c; a chunk holds neighbouring query heads of one KV head, so that a query
head always meets its KV head. A KV head travels once to each rank that has chunks of it, and every
rank receives as many KV heads as the one that needs most, m. Of the chunk sizes that divide n
and whose chunks fit, the one with the smallest m is taken, then the largest: it moves the fewest
bytes, P*n query, output and 2 P*m key and value heads. What is left over in a slot is zeros.

Where P divides Hq, and divides Hkv or is divided by it, these are the plain maps: c = min(n,
Hq/Hkv), m = max(Hkv/P, 1), no zeros. 28 query and 4 KV heads over 7 ranks: n = 4, m = 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ZERO = -1
"""A slot of zeros."""


@dataclass(frozen=True, slots=True)
class HeadMap:
    """The slots of all ranks, one rank after the other; ``ZERO`` where a slot has no head.

    ``queries`` [P*n]: query heads. ``keys`` [P*m]: KV heads. ``uses`` [P*m]: how many of its rank's
    chunks, of ``chunk`` query slots each, use a KV slot; chunks and KV slots are in one order.
    """

    degree: int
    chunk: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    uses: tuple[int, ...]

    @property
    def rank_queries(self) -> int:
        """n: query slots of a rank."""
        return len(self.queries) // self.degree

    @property
    def rank_keys(self) -> int:
        """m: KV slots of a rank."""
        return len(self.keys) // self.degree

    def uses_of(self, rank: int) -> tuple[int, ...] | None:
        """``uses`` of one rank; None where every KV slot of every rank has one chunk."""
        own = slice(rank * self.rank_keys, (rank + 1) * self.rank_keys)
        return None if set(self.uses) == {1} else self.uses[own]

    def heads_of(self, rank: int) -> Sequence[int]:
        """A query head for each slot of one rank; what a slot of zeros is given does not matter.

        A range where the heads are neighbours.
        """
        own = self.queries[rank * self.rank_queries : (rank + 1) * self.rank_queries]
        heads = tuple(max(head, 0) for head in own)
        run = range(heads[0], heads[0] + len(heads))
        return run if heads == tuple(run) else heads


def head_map(heads: int, kv_heads: int, degree: int) -> HeadMap:
    """The map of ``heads`` query heads, a multiple of ``kv_heads``, over ``degree`` ranks."""
    group = heads // kv_heads
    slots = -(-heads // degree)
    fewest = max(-(-kv_heads // degree), 1)
    best: HeadMap | None = None
    for chunk in range(slots, 0, -1):
        pieces = -(-group // chunk)
        if slots % chunk or kv_heads * pieces > degree * (slots // chunk):
            continue
        found = _dealt(kv_heads, group, degree, chunk, slots // chunk)
        if best is None or found.rank_keys < best.rank_keys:
            best = found
        if best.rank_keys == fewest:
            break
    assert best is not None, "chunks of one head always fit"
    return best


def _dealt(kv_heads: int, group: int, degree: int, chunk: int, per_rank: int) -> HeadMap:
    """The chunks of all KV heads in order, ``per_rank`` to each rank."""
    pieces = -(-group // chunk)
    owners = [head for head in range(kv_heads) for _ in range(pieces)]
    owners += [ZERO] * (degree * per_rank - len(owners))
    queries = []
    for index, owner in enumerate(owners):
        first = index % pieces * chunk
        within = range(first, first + chunk)
        queries += [owner * group + i if owner != ZERO and i < group else ZERO for i in within]
    ranks = [owners[i : i + per_rank] for i in range(0, len(owners), per_rank)]
    needed = [list(dict.fromkeys(h for h in own if h != ZERO)) for own in ranks]
    width = max(map(len, needed))
    if width == per_rank:
        uses = (1,) * len(owners)
        return HeadMap(degree, chunk, tuple(queries), tuple(owners), uses)
    keys, counts = [], []
    for rank, own in zip(ranks, needed, strict=True):
        counted = [rank.count(head) for head in own] + [0] * (width - len(own))
        # Chunks of zeros are the last ones: they go with the last KV head.
        counted[max(len(own) - 1, 0)] += rank.count(ZERO)
        keys += [*own, *[ZERO] * (width - len(own))]
        counts += counted
    return HeadMap(degree, chunk, tuple(queries), tuple(keys), tuple(counts))
