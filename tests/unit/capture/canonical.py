"""Canonical graphs beside the modules that they were captured from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.export import Capture
from tests.unit.capture.captured import capture_of, run

B, S, D = 2, 6, 4
Body = Callable[[Any, Tensor], Any]


def canonical(module: nn.Module, *args: Tensor) -> Capture:
    capture = capture_of(module, *args)
    canonicalise(capture)
    return capture


def outcome(compute: Callable[[Tensor], Any], module: nn.Module, x: Tensor) -> list[Any]:
    """Results, gradient of the input and of the parameters."""
    leaf = x.clone().requires_grad_()
    result = compute(leaf)
    results = list(result) if isinstance(result, tuple | list) else [result]
    wanted = [leaf, *module.parameters()]
    differentiable = [r.sin().sum() for r in results if r.requires_grad]
    grads: list[Any] = []
    if differentiable:
        total = torch.stack(differentiable).sum()
        grads = list(torch.autograd.grad(total, wanted, allow_unused=True))
    return [*[r.detach() for r in results], *grads]


def check(module: nn.Module, lengths: tuple[int, ...] = (S, 9)) -> Capture:
    generator = torch.Generator().manual_seed(0)
    capture = canonical(module, torch.randn(B, S, D, requires_grad=True))
    for length in lengths:
        x = torch.randn(B, length, D, generator=generator, dtype=torch.float32)
        expected = outcome(module, module, x)
        found = outcome(lambda leaf: run(capture, module, leaf), module, x)
        torch.testing.assert_close(found, expected)
        for own, want in zip(found, expected, strict=True):
            assert (own is None) == (want is None)
            if want is not None:
                assert own.dtype == want.dtype
    return capture
