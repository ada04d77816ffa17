"""Models whose attention runs over several sequences, or over parts of a sample (windows)."""

from __future__ import annotations

from seqcomp.capture.edit import module_path, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.sizes import Size, divide
from seqcomp.diagnostics import PlanError, diagnostic


def no_one_sequence(capture: Capture) -> PlanError | None:
    """SC316 with the lengths of all attentions and who has them; None where there is none."""
    found: dict[tuple[Size, Size], str] = {}
    for node in capture.graph.nodes:
        if op_name(node) == "attention":
            samples, _, rows, _ = capture.shape(node.args[0])
            found.setdefault((samples, rows), module_path(node) or "<root>")
    if not found:
        return None
    texts = [
        f"over {rows} tokens{_parts(samples, capture.batch)} in {where}"
        for (samples, rows), where in found.items()
    ]
    return PlanError(
        [
            diagnostic(
                "SC316",
                where=next(iter(found.values())),
                found=f"attention {'; '.join(texts)}",
                legal="self-attention of whole samples over one sequence in the whole model, "
                "or an input with a sequence dim",
                help="divide the batch instead: mesh: {data: N}, strategies: {data: {}}",
            )
        ]
    )


def _parts(samples: Size, batch: Size | None) -> str:
    """' in 16 windows of a sample', where there are."""
    windows = divide(samples, batch) if batch is not None else None
    return "" if windows in (None, 1) else f" in each of {windows} windows of a sample"
