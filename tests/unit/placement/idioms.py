"""Idioms: functions of shared inputs, their capture, and what they give on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.export import Capture
from tests.unit.capture.captured import capture_of

B, S, D = 4, 12, 6
Idiom = Callable[[Any], Any]


@dataclass(frozen=True)
class Given:
    """A plan's own words on one input."""

    batch: int | None
    seq: int | None


SHAPES: dict[str, tuple[tuple[int, ...], Given]] = {
    "x": ((B, S, D), Given(0, 1)),
    "y": ((B, S, D), Given(0, 1)),
    "z": ((B, S), Given(0, 1)),
    "h": ((B, 2, S, D), Given(0, 2)),
    "t": ((S, D), Given(None, 0)),
    "r": ((1, S), Given(None, 1)),
    "c": ((B, D), Given(0, None)),
    "v": ((D,), Given(None, None)),
    "ids": ((B, S), Given(0, 1)),
    "keep": ((B, S), Given(0, 1)),
}


class Inputs:
    """Attribute access to the inputs and parameters of an idiom."""

    def __init__(self, values: Mapping[str, Any], module: nn.Module):
        self.__dict__.update(values)
        self.__dict__.update(dict(module.named_parameters()))


class Idioms(nn.Module):
    """All idioms on the same inputs."""

    def __init__(self, idioms: Mapping[str, Idiom]):
        super().__init__()
        self.idioms = dict(idioms)
        generator = torch.Generator().manual_seed(3)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.weight = made(5, D)
        self.bias = made(5)
        self.scale = made(D)
        self.table = made(D, 3)

    def forward(
        self, x: Tensor, y: Tensor, z: Tensor, h: Tensor, t: Tensor, r: Tensor, c: Tensor,
        v: Tensor, ids: Tensor, keep: Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        values = Inputs({"x": x, "y": y, "z": z, "h": h, "t": t, "r": r, "c": c, "v": v,
                         "ids": ids, "keep": keep}, self)  # fmt: skip
        return {name: idiom(values) for name, idiom in self.idioms.items()}


def example() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    values = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, (shape, _) in SHAPES.items()
    }
    values["ids"] = torch.randint(0, D, (B, S), generator=generator)
    values["keep"] = torch.rand(B, S, generator=generator) < 0.6
    return values


def capture_idioms(idioms: Mapping[str, Idiom]) -> Capture:
    module = Idioms(idioms)
    capture = capture_of(module, given=lambda name: SHAPES[name][1], **example())
    canonicalise(capture)
    return capture


def weights_like(values: Sequence[Tensor]) -> list[Tensor]:
    """A fixed cotangent for each result."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(v.shape, generator=generator, dtype=torch.float64) for v in values]


def objective(values: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Tensor | None:
    parts = [
        (v * w).sum()
        for v, w in zip(values, cotangents, strict=True)
        if v.is_floating_point() and v.requires_grad
    ]
    return torch.stack(parts).sum() if parts else None


# Per idiom its results and the gradients of inputs and parameters.
Expected = dict[str, tuple[list[Tensor], list[Tensor | None]]]


def eager(idioms: Mapping[str, Idiom]) -> Expected:
    """Results and gradients of every idiom on the global tensors."""
    module, found = Idioms(idioms), {}
    for name, idiom in idioms.items():
        values = example()
        result = idiom(Inputs(values, module))
        result = list(result) if isinstance(result, tuple | list) else [result]
        wanted = [*values.values(), *module.parameters()]
        loss = objective(result, weights_like(result))
        gradients: list[Tensor | None] = [None] * len(wanted)
        if loss is not None:
            floating = [w for w in wanted if w.requires_grad]
            each = iter(torch.autograd.grad(loss, floating, allow_unused=True))
            gradients = [next(each) if w.requires_grad else None for w in wanted]
        found[name] = ([v.detach() for v in result], gradients)
    return found
