"""How attention's work is shared out: FLOPs of every rank along the ring, and their balance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.fx import Node

from seqcomp.capture.facts import mask_name
from seqcomp.layout.heads import head_map
from seqcomp.layout.intervals import visible_area
from seqcomp.layout.masks import Full
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.lowering import ops
from seqcomp.lowering.program import Program
from seqcomp.plan.resolve import ResolvedPlan

CONVENTION = (
    "FLOPs of visible pairs only (of causal attention the lower triangle, s (s + 1) / 2): "
    "2 (d_qk + d_v) for each pair and head forward; backward 2.5 x, the scores computed again"
)


@dataclass(frozen=True)
class WorkRow:
    """One attention's forward FLOPs, by `CONVENTION`, on each place along the ring.

    Ranks of the same place (ulysses, tensor, data) do the same. `at_most`: the mask depends on
    data, and every pair is counted; there is no balance then.
    """

    module: str
    mask: str
    flops: tuple[int, ...]
    at_most: bool = False

    @property
    def mean(self) -> float:
        return sum(self.flops) / len(self.flops)

    @property
    def balance(self) -> float | None:
        """Busiest rank over the mean, at least 1."""
        if self.at_most or not sum(self.flops):
            return None
        return float(Fraction(max(self.flops) * len(self.flops), sum(self.flops)))

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "mask": self.mask,
            "flops": list(self.flops),
            "max_over_mean": self.balance,
            "at_most": self.at_most,
        }


def work_rows(
    program: Program, values: Mapping[Node, Any], resolved: ResolvedPlan
) -> tuple[WorkRow, ...]:
    """One row for each attention, in the order of the forward; padded tokens are counted."""
    rows: list[WorkRow] = []
    areas: dict[Any, tuple[int, ...]] = {}
    for node in program.flat.nodes:
        info = node.meta.get("attention")
        if info is None:
            continue
        q, k = [values[x] for x in node.args if isinstance(x, Node)][:2]
        divided = isinstance(node.target, ops.Attention) and not node.target.whole
        layout = program.layout if divided else SequenceLayout("contiguous")
        ulysses = resolved.ulysses_size if divided else 1
        parts = layout.ring * ulysses
        at_most = info.mask is None
        key = (info.mask or Full(), layout, q.shape[2] * parts, k.shape[2] * parts)
        if key not in areas:
            areas[key] = _areas(*key)
        each = 2 * q.shape[0] * _heads(q, k, ulysses) * (info.head_dim + info.value_dim)
        flops = tuple(each * area for area in areas[key])
        rows.append(WorkRow(info.where, mask_name(info), flops, at_most))
    return tuple(rows)


def _areas(mask: Any, layout: SequenceLayout, queries: int, keys: int) -> tuple[int, ...]:
    whole = (range(keys),)
    owned = (layout.ring_ranges(queries, rank) for rank in range(layout.ring))
    return tuple(visible_area(mask, ranges, whole) for ranges in owned)


def _heads(q: Tensor, k: Tensor, ulysses: int) -> int:
    if ulysses == 1:
        return q.shape[1]
    return head_map(q.shape[1], k.shape[1], ulysses).rank_queries
