"""Blocks that a model treats alike, and those that it tells apart by their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqcomp.capture.alike import called_alike

Arguments = Callable[[int, Tensor], dict[str, Any]]
PATHS = ("blocks.0", "blocks.1", "blocks.2")


class Part(nn.Module):
    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(8, 8), form

    def forward(self, x: Tensor, causal: bool = True, mask: Tensor | None = None) -> Any:
        return self.form(self.linear(x) if causal else x)


class Stack(nn.Module):
    """Blocks in a row; `arguments` says what each gets besides."""

    def __init__(self, arguments: Arguments, *, in_tuples: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        form = (lambda x: (x,)) if in_tuples else (lambda x: x)
        self.blocks = nn.ModuleList(Part(form) for _ in PATHS)
        self.arguments, self.in_tuples = arguments, in_tuples

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        shared = torch.ones(ids.shape[1], ids.shape[1])
        for index, block in enumerate(self.blocks):
            x = block(x, **self.arguments(index, shared))
            x = x[0] if self.in_tuples else x
        return x


def fails(index: int, shared: Tensor) -> dict[str, Any]:
    raise RuntimeError("no such block")


@pytest.mark.parametrize(
    ("arguments", "alike"),
    [
        (lambda index, shared: {}, True),
        (lambda index, shared: {"mask": shared}, True),
        (lambda index, shared: {"causal": False}, True),
        (lambda index, shared: {"causal": index != 1}, False),
        (lambda index, shared: {"mask": shared.tril(index)}, False),
        (lambda index, shared: {"mask": shared if index else None}, False),
        (lambda index, shared: {"mask": shared > index}, False),
        (lambda index, shared: {"mask": shared} if index else {}, False),
        (fails, False),
    ],
)
@pytest.mark.parametrize("in_tuples", [False, True])
def test_arguments_tell_blocks_apart(arguments: Arguments, alike: bool, in_tuples: bool) -> None:
    module = Stack(arguments, in_tuples=in_tuples)
    call = {"ids": torch.zeros(2, 4, dtype=torch.long)}
    assert called_alike(module, PATHS, call) == alike
    assert all("forward" not in vars(block) for block in module.blocks)
    if arguments is not fails:
        module(**call)


def test_blocks_that_are_left_out_or_come_again() -> None:
    module = Stack(lambda index, shared: {})
    call = {"ids": torch.zeros(2, 4, dtype=torch.long)}
    assert not called_alike(module, PATHS[:2][::-1], call)
    module.blocks.append(module.blocks[0])
    assert not called_alike(module, PATHS, call)
