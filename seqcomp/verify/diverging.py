"""Finds the first operation whose result on some rank is not a part of one device's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seqcomp.lowering.context import Traced
from seqcomp.lowering.snapshot import Operation
from seqcomp.verify.parts import own_part
from seqcomp.verify.report import Divergence
from seqcomp.verify.trace import RankTrace, Whole

_SHOWN = 4
_FLOOR = 1e-4  # of the tolerance times the largest value: what cancels to zero is noise


def first_divergence(
    ranks: Sequence[RankTrace], whole: Whole, tolerance: float
) -> Divergence | None:
    """In the order of execution: forward, then backward from the loss on.

    A value matches when it is within `tolerance` of its size (2-norm), summed over the ranks that
    hold summands of it.
    """
    order = {operation.name: i for i, operation in enumerate(whole.operations)}
    # An operation's own result before what redistributions make of it.
    values = sorted(
        whole.traced.items(), key=lambda item: (order[item[1].source], item[1].moved is not None)
    )
    for local, traced in values:
        operation = whole.operations[order[traced.source]]
        found = _Compared("forward", local, traced, operation, traced.spec.partial)
        result = found.against(ranks, whole, tolerance)
        if result is not None:
            return result
    for local, traced in reversed(values):
        if traced.moved is None:
            operation = whole.operations[order[traced.source]]
            partial = _summed_in_backward(traced, operation, whole)
            found = _Compared("backward", local, traced, operation, partial)
            result = found.against(ranks, whole, tolerance)
            if result is not None:
                return result
    return None


def _summed_in_backward(traced: Traced, operation: Operation, whole: Whole) -> tuple[str, ...]:
    """The cotangent of a value that axes replicate is partial over them, and the other way round.

    Those of parameters and inputs have been summed.
    """
    if operation.is_given:
        return ()
    return tuple(a for a in whole.axes if a not in (*traced.spec.axes, *traced.spec.partial))


@dataclass(frozen=True)
class _Compared:
    """One value or cotangent; its parts are summed over the axes `partial`."""

    phase: Literal["forward", "backward"]
    local: str
    traced: Traced
    operation: Operation
    partial: tuple[str, ...]

    def against(
        self, ranks: Sequence[RankTrace], whole: Whole, tolerance: float
    ) -> Divergence | None:
        """The first rank whose part is not the one of the whole."""
        forward, partial = self.phase == "forward", self.partial
        known = whole.trace.values if forward else whole.trace.gradients
        if self.traced.source not in known:
            return None
        traces = [rank.trace.values if forward else rank.trace.gradients for rank in ranks]
        parts = [trace.get(self.local) for trace in traces]
        floor = _FLOOR * tolerance * largest(known)
        totals: dict[tuple[tuple[str, int], ...], Tensor] = {}
        for rank, part in zip(ranks, parts, strict=True):
            key = _others(rank.place.coords, partial)
            if part is not None:
                totals[key] = totals[key] + part if key in totals else part
        for rank in ranks:
            want = own_part(known[self.traced.source], self.traced.spec, rank.place, whole.sizes)
            got = totals.get(_others(rank.place.coords, partial))
            if got is None:
                got = torch.zeros_like(want)
            relative = distance(want, got, floor)
            if not relative <= tolerance:
                return self._divergence(rank.rank, relative, want, got)
        return None

    def _divergence(self, rank: int, relative: float, want: Tensor, got: Tensor) -> Divergence:
        index, expected, found = first_values(want, got)
        moved = self.traced.moved
        return Divergence(
            phase=self.phase,
            module=self.operation.module,
            node=self.traced.source if moved is None else f"{self.traced.source} -> {self.local}",
            op=self.operation.op if moved is None else f"{moved} of {self.operation.op}",
            rank=rank,
            relative=relative,
            index=index,
            expected=expected,
            found=found,
        )


def _others(coords: Mapping[str, int], axes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((axis, at) for axis, at in coords.items() if axis not in axes)


def largest(values: Mapping[str, Tensor]) -> float:
    """The largest norm among floating values."""
    sizes = (float(_finite(x).norm()) for x in values.values() if x.is_floating_point())
    return max(sizes, default=0.0)


def distance(want: Tensor, got: Tensor, floor: float = 0.0) -> float:
    """|got - want| / |want| in the 2-norm; differences below `floor` are rounding.

    Infinite for other shapes, and where NaN or infinities are not at the same places.
    """
    if want.shape != got.shape:
        return float("inf")
    if not want.is_floating_point() and not want.is_complex():
        return 0.0 if torch.equal(want, got.to(want.dtype)) else 1.0
    special = [x.where(~x.isfinite(), 0) for x in (_real(want), _real(got))]
    if not torch.equal(special[0].nan_to_num(nan=1.0), special[1].nan_to_num(nan=1.0)):
        return float("inf")
    a, b = _finite(want), _finite(got)
    difference, size = float((a - b).norm()), float(a.norm())
    if difference <= floor:
        return 0.0
    return difference / size if size else float("inf")


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).double() if x.is_complex() else x.double()


def _finite(x: Tensor) -> Tensor:
    return _real(x).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def first_values(
    want: Tensor, got: Tensor
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """Index and values from the first clear difference on, in row-major order."""
    if want.shape != got.shape or want.numel() == 0:
        return (), tuple(_some(want, 0)), tuple(_some(got, 0))
    a, b = _finite(want).reshape(-1), _finite(got).reshape(-1)
    gap = (a - b).abs()
    start = int((gap > 0.5 * gap.max()).nonzero()[0])
    place = torch.unravel_index(torch.tensor(start * want.numel() // a.numel()), want.shape)
    index = tuple(int(i) for i in place)
    return index, tuple(_some(a, start)), tuple(_some(b, start))


def _some(x: Tensor, start: int) -> Iterator[float]:
    return (float(v) for v in x.reshape(-1)[start : start + _SHOWN])
