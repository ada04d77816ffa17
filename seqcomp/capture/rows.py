"""x[arange(B), index], one token of each row, gets a form that holds for a part of the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from seqcomp.capture.edit import argument, is_tensor, op_name
from seqcomp.capture.export import Capture


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, ...], index [B] -> [B, ...]: one token of each row."""
    return x[torch.arange(x.shape[0], device=x.device), index]


def recognise_rows(capture: Capture) -> None:
    """x[arange(B), index] takes one token of each row, also of a part of the rows."""
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or op_name(node) != "aten.index":
            continue
        source, indices = node.args[0], list(node.args[1])
        if len(indices) != 2 or not all(is_tensor(i) for i in indices):
            continue
        rows, index = indices
        start = argument(rows, 0, "start", 0)
        if (
            op_name(rows) != "aten.arange"
            or (start != 0 or argument(rows, 2, "step", 1) != 1)
            or capture.shape(rows) != capture.shape(source)[:1]
            or capture.shape(index) != capture.shape(rows)
            or index.meta["val"].dtype == torch.bool
        ):
            continue
        with capture.graph.inserting_before(node):
            new = capture.graph.call_function(rows_at, (source, index), name=node.name)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        capture.graph.erase_node(node)
    capture.graph.eliminate_dead_code()
