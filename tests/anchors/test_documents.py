"""Packed documents: the varlen rows of ring-flash-attention, of which no constant is fitted.

They are predicted with what the batch rows of the same machines were fitted to (the cluster files:
a round of a ring and, on H800, attention's share of peak). Nothing of theirs is left out: the rows
of that README which are no measure of a ring (heads of 32, the plain packing of q, k and v, both
limited by the kernel) are in other tables of it.
"""

from __future__ import annotations

import pytest

from benchmarks.published.documents import (
    PACKED,
    RING,
    VARLEN,
    WAYS,
    each_cut,
    rate,
    varlen_rows,
    whole,
)
from benchmarks.published.rows import typical
from seqcomp.hardware.load import load_cluster
from seqcomp.layout.documents import Documents
from seqcomp.layout.intervals import balance_of, whole_area, work
from seqcomp.layout.sequence import SequenceLayout

TYPICAL, WORST = 0.15, 0.30


@pytest.mark.parametrize("machine", VARLEN)
def test_packed_rows_are_met(machine: str) -> None:
    cluster = load_cluster(machine)
    errors = {row.name: row.error(cluster) for row in varlen_rows(machine)}
    assert len(errors) == 2 * len(WAYS)
    assert typical(errors.values()) <= TYPICAL / 2
    assert max(map(abs, errors.values())) <= WORST / 2, errors
    for mode in ("prefill", "train"):
        published = dict(zip(WAYS, VARLEN[machine][mode], strict=True))
        rates = {way: rate(cluster, mode, way) for way in WAYS}  # type: ignore[arg-type]
        assert sorted(rates, key=rates.__getitem__) == sorted(published, key=published.__getitem__)


def test_cut_by_itself_a_document_is_balanced_and_whole_it_is_not() -> None:
    """Pairs by hand: zigzag of each document gives every rank the same, an eighth."""
    layout = SequenceLayout("contiguous", RING)
    worst = []
    for lengths in PACKED:
        mask = Documents(whole(lengths))
        total = whole_area(mask, mask.length)
        assert total == sum(n * (n + 1) // 2 for n in whole(lengths))
        zigzag = sum(p * count for p, count in each_cut(lengths, "zigzag").whole)
        assert zigzag == pytest.approx(total / RING, rel=1e-3)
        last = sum(p * count for p, count in each_cut(lengths, "contiguous").whole)
        assert last / (total / RING) == pytest.approx(15 / 8, rel=1e-3)
        worst.append(balance_of(work(mask, layout, mask.length)))
    assert worst == pytest.approx([15 / 8, 1.875, 1.75, 1.875], abs=0.2)
