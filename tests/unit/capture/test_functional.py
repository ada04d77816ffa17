"""In-place operations become plain ones of the same value, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqcomp.diagnostics import PlanError
from tests.unit.capture.canonical import B, Body, D, S, canonical, check
from tests.unit.capture.captured import Calls, run


def assigned(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h[:, 0] = 1.0
    return h


def chained(m: Any, x: Tensor) -> Tensor:
    h = x.sin()
    h += 1
    h *= x
    return h.add_(h).relu_()


def earlier_use(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.sin()
    before = h + 1
    h.mul_(3.0)
    return before, h


def result_of_in_place(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.sin()
    k = h.mul_(3.0)
    k.add_(1.0)
    return h + 0, k + x


def half_in_place(m: Any, x: Tensor) -> Tensor:
    h = x.to(torch.bfloat16) * 1
    h += x
    return h


def view_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    rows = h.view(-1, D)
    rows.add_(1.0)
    return h


def write_then_view(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    rows = h.transpose(1, 2)
    h.add_(1.0)
    return rows * 2


def chunk_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    left, _ = h.chunk(2, -1)
    left.add_(1.0)
    return h


def write_below_chunks(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    left, right = h.chunk(2, -1)
    h.add_(1.0)
    return left * right


def split_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    parts = h.split([1, D - 1], -1)
    parts[1].zero_()
    return h


def unbind_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.unbind(-1)[0].zero_()
    return h


def same_dtype_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.to(x.dtype).add_(1.0)
    return h


def contiguous_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.contiguous().add_(1.0)
    return h


def dropout_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    F.dropout(h, 0.5, training=False).add_(1.0)
    return h


def broadcast_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    same, _ = torch.broadcast_tensors(h, x)
    same.add_(1.0)
    return h


def atleast_then_write(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    torch.atleast_2d(h).add_(1.0)
    return h


def diagonal_written(m: Any, x: Tensor) -> Tensor:
    h = x @ x.mT
    h.diagonal(dim1=1, dim2=2).zero_()
    return h


def input_written(m: Any, x: Tensor) -> Tensor:
    x = x.detach()
    x.add_(1.0)
    return x * 2


def copied(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h.copy_(x * 2)
    return h + 1


def filled(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.fill_(3.0)
    return h * x


def written_by_index(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.index_put_((torch.tensor([0]),), torch.tensor(0.5))
    return h


def view_alone(m: Any, x: Tensor) -> Tensor:
    rows = torch.bmm(x, x.mT).unsqueeze(1).squeeze(1)
    rows.add_(x.sum(-1, keepdim=True))
    return rows @ x


def best_normalised(m: Any, x: Tensor) -> Tensor:
    best, at = x.exp().topk(2, dim=-1)
    best /= best.sum(-1, keepdim=True)
    return best + at


def filled_by_parts(m: Any, x: Tensor) -> Tensor:
    h = x.new_empty(*x.shape[:-1], D + 3)
    h[..., :D] = x * 2
    h[..., D:].copy_(x[..., :1].sin())
    return h.cos()


def shifted_right(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape)
    h[:, 1:] = x[:, :-1].clone()
    h[:, 0] = 0.5
    return h.masked_fill_(h > 1, -1.0) * x


def part_of_a_part(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    before = h + 1
    row = h[:, 2]
    row[:, 1:3].mul_(3.0)
    return before, h + row.sum()


def written_after_it_was_copied(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h, k = x * 2, torch.zeros_like(x)
    k.copy_(h)
    k.add_(1.0)
    return h * 3, k


def part_read_later(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    rows = h.transpose(1, 2)
    h[:, 0] = 0.0
    return rows * 2


# Written in place where nothing else sees it: plain operations of the same value.
IN_PLACE: dict[str, Body] = {
    "add_": lambda m, x: (x * 2).add_(1.0),
    "masked_fill_": lambda m, x: (x * 2).masked_fill_(x > 0, -1.0),
    "relu in place": lambda m, x: F.relu(x * 2, inplace=True),
    "chained": chained,
    "used before": earlier_use,
    "result of an in-place operation": result_of_in_place,
    "copied": copied,
    "filled": filled,
    "by index": written_by_index,
    "narrower than its operand": half_in_place,
    "through the one view": view_alone,
    "one of several results": best_normalised,
    "filled by parts": filled_by_parts,
    "shifted right": shifted_right,
    "a part of a part": part_of_a_part,
    "written after it was copied": written_after_it_was_copied,
}
# Written through or below an alias. Right or refused; never something else.
ALIASED: dict[str, Body] = {
    "an assigned slice": assigned,
    "a part read later": part_read_later,
    "a view is written": view_then_write,
    "viewed before": write_then_view,
    "a chunk is written": chunk_then_write,
    "below chunks": write_below_chunks,
    "a split part": split_then_write,
    "an unbound row": unbind_then_write,
    "to the same dtype": same_dtype_then_write,
    "contiguous": contiguous_then_write,
    "dropout that is off": dropout_then_write,
    "broadcast": broadcast_then_write,
    "atleast_2d": atleast_then_write,
    "a diagonal": diagonal_written,
    "the input": input_written,
}


# The graph has them as writes to a part, or to the one name of a value.
EXACT = ("contiguous", "atleast_2d", "to the same dtype", "an assigned slice")


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_become_plain(name: str) -> None:
    capture = check(Calls(IN_PLACE[name]))
    for node in capture.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable


@pytest.mark.parametrize("name", ALIASED)
def test_writes_through_an_alias_are_exact_or_refused(name: str) -> None:
    module, x = Calls(ALIASED[name]), torch.randn(B, S, D)
    try:
        capture = canonical(module, x)
    except PlanError as error:
        codes = {d.code for d in error.diagnostics}
        if codes != {"SC307"}:
            raise
        return
    assert name in EXACT, "an alias in the graph"
    torch.testing.assert_close(run(capture, module, x), module(x))
