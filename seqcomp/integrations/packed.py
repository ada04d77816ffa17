"""A lowered model as it runs on sequences that pack documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Node

from seqcomp.cost.balance import BY_CAUSAL_MASKS
from seqcomp.layout.documents import Documents
from seqcomp.lowering import ops
from seqcomp.lowering.program import Program
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.report.build import Report


def pack(
    program: Program, values: Mapping[Node, Any], resolved: ResolvedPlan, documents: Documents
) -> None:
    """Attention of a sequence to itself stays within each of the documents, under its own rule.

    Masks that depend on data stay what they are. values: as from `local_values`.
    """
    for node in program.flat.nodes:
        info = node.meta.get("attention")
        if info is None or info.mask is None:
            continue
        q, k = [values[x] for x in node.args if isinstance(x, Node)][:2]
        if q.shape[2] != k.shape[2]:
            continue
        divided = isinstance(node.target, ops.Attention) and not node.target.whole
        parts = resolved.ring_size * resolved.ulysses_size if divided else 1
        mask = documents.of_length(q.shape[2] * parts).under(info.mask)
        node.meta["attention"] = replace(info, mask=mask)
        if isinstance(node.target, ops.Attention) and node.target.mask is not None:
            node.target = replace(node.target, mask=mask)


def of_documents(report: Report, documents: Documents) -> Report:
    """The report says so, and nothing about masks over the whole sequence."""
    kept = tuple(f for f in report.findings if f.code not in BY_CAUSAL_MASKS)
    return replace(report, documents=str(documents), findings=kept)
