"""How far a compiled model may be from one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.verify.observe import Observation


@dataclass(frozen=True)
class Tolerance:
    """Values: |dx| <= value * max|x|. Gradients, per parameter p and in the 2-norm:
    |dg_p| <= gradient * |g_p| + floor * max over all parameters of |g|.
    """

    value: float
    gradient: float
    floor: float
    name: str


def tolerance_for(computed: torch.dtype, weights: torch.dtype) -> Tolerance:
    """By the coarsest dtype that the program computes in, and that of its weights."""
    if computed == torch.float64:
        return Tolerance(1e-9, 1e-8, 1e-12, "fp64")
    if computed == torch.float32 and weights == torch.float64:
        return Tolerance(1e-6, 1e-6, 1e-9, "fp64 with fp32 inside")
    if computed == torch.float32:
        return Tolerance(1e-5, 1e-4, 1e-6, "fp32")
    eps = torch.finfo(computed).eps
    return Tolerance(eps, eps, eps, f"{str(computed).removeprefix('torch.')} against fp64")


class Bounds:
    """Allowed errors of each quantity, and the errors of observations against the truth.

    In half precision `truth` is the model in fp64 and `single` the model itself on one device,
    whose error may be exceeded by half; otherwise both are the same.
    """

    def __init__(self, truth: Observation, single: Observation, tolerance: Tolerance):
        self.truth = truth
        self._single = single
        self._tolerance = tolerance
        sizes = [_norm(g) for g in truth.gradients.values() if g is not None]
        self._floor = tolerance.floor * max(sizes, default=0.0)

    def objective(self, found: float) -> tuple[float, float]:
        """(relative error, error in units of the allowed one)."""
        want = self.truth.objective
        if math.isnan(want) and math.isnan(found):
            return 0.0, 0.0  # a mean over no token is NaN on one device too
        allowed = self._tolerance.value * abs(want) + 1.5 * abs(self._single.objective - want)
        return _both(abs(found - want), abs(want), allowed)

    def output(
        self, name: str, part: Callable[[Tensor], Tensor], found: Any
    ) -> tuple[float, float]:
        """The same of one output in max norm; `part` takes the rank's part of a whole."""
        want, own = self.truth.outputs[name], self._single.outputs[name]
        if not isinstance(want, Tensor) or not isinstance(found, Tensor):
            same = not isinstance(want, Tensor) and not isinstance(found, Tensor) and want == found
            return (0.0, 0.0) if same else (float("inf"), float("inf"))
        size = _largest(want)
        try:
            want, own = part(want), part(own)
        except ValueError:
            return float("inf"), float("inf")
        if not want.is_floating_point():
            same = torch.equal(want, found.to(want.dtype))
            return (0.0, 0.0) if same else (float("inf"), float("inf"))
        if not torch.equal(want.isnan(), found.isnan()):
            return float("inf"), float("inf")
        allowed = self._tolerance.value * size + 1.5 * _largest(own.double() - want.double())
        return _both(_largest(found.double() - want.double()), size, allowed)

    def gradient(
        self, name: str, part: Callable[[Tensor], Tensor], found: Tensor | None
    ) -> tuple[float, float]:
        """The same of one parameter's gradient in the 2-norm.

        None on one device and zeros on a rank are equal: so is an expert that no token reached.
        """
        want, own = self.truth.gradients[name], self._single.gradients[name]
        if want is None or found is None or own is None:
            nothing = want is None and (found is None or not found.any())
            return (0.0, 0.0) if nothing else (float("inf"), float("inf"))
        size = _norm(want)
        error = _norm(own.double() - want.double())
        want = part(want)
        if want.shape != found.shape or not torch.equal(want.isnan(), found.isnan()):
            return float("inf"), float("inf")
        allowed = self._tolerance.gradient * size + self._floor + 1.5 * error
        # Against noise: gradients that cancel to nothing have no size to compare with.
        scale = size + self._floor / self._tolerance.gradient
        return _both(_norm(found.double() - want.double()), scale, allowed)


def _both(error: float, size: float, allowed: float) -> tuple[float, float]:
    if error == 0:
        return 0.0, 0.0
    if math.isnan(error):
        return float("inf"), float("inf")
    infinite = float("inf")
    return (error / size if size else infinite), (error / allowed if allowed else infinite)


def _norm(x: Tensor) -> float:
    return float(x.double().nan_to_num().norm())


def _largest(x: Tensor) -> float:
    return float(x.double().nan_to_num().abs().max()) if x.numel() else 0.0
