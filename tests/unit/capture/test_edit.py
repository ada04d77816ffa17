"""What transpositions do to dims is what torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from seqcomp.capture.edit import TRANSPOSITIONS, op_name, transposed_dims

aten = torch.ops.aten

CALLS: list[tuple[Any, int, tuple[Any, ...]]] = [
    (aten.permute.default, 4, ([0, -1, 1, 2],)),
    (aten.transpose.int, 4, (1, -1)),
    (aten.transpose.int, 0, (0, -1)),
    (aten.swapaxes.default, 3, (-3, 1)),
    (aten.swapdims.default, 3, (0, 2)),
    (aten.t.default, 2, ()),
    (aten.t.default, 1, ()),
    (aten.mT.default, 3, ()),
    (aten.adjoint.default, 4, ()),
    (aten.numpy_T.default, 2, ()),
    (aten.movedim.int, 4, (-1, 1)),
    (aten.movedim.intlist, 4, ([3, 0], [0, -2])),
]


@pytest.mark.parametrize(("target", "ndim", "args"), CALLS, ids=str)
def test_dims_are_where_torch_puts_them(target: Any, ndim: int, args: tuple[Any, ...]) -> None:
    x = torch.empty(tuple(range(2, 2 + ndim)))
    node = Graph().call_function(target, (x, *args))
    node.meta["val"] = target(x, *args)
    order = transposed_dims(node)
    assert order is not None
    assert x.permute(order).shape == node.meta["val"].shape


def test_every_transposition_is_tried_and_nothing_else_is_one() -> None:
    graph = Graph()
    tried = {op_name(graph.call_function(target)) for target, _, _ in CALLS}
    assert tried == TRANSPOSITIONS
    assert transposed_dims(graph.call_function(aten.view.default)) is None
