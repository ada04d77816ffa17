"""Latency and bandwidth from times of several sizes; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence


def latency_and_bandwidth(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds and bytes/s of the line seconds = latency + bytes / bandwidth nearest to ``points``
    (bytes, seconds), by relative least squares: short messages count as much as long ones.

    Latency is not below 0. Where larger messages take no longer, bandwidth is that of the largest.
    """
    assert points
    largest = max(points)
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - x) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    both = sum(w * (s - x) * (t - y) for w, (s, t) in zip(weights, points, strict=True))
    if both <= 0 or spread == 0:
        return 0.0, largest[0] / largest[1]
    slope = both / spread
    latency = y - slope * x
    if latency >= 0:
        return latency, 1 / slope
    through_zero = sum(w * s * t for w, (s, t) in zip(weights, points, strict=True))
    squares = sum(w * s * s for w, (s, _) in zip(weights, points, strict=True))
    return 0.0, squares / through_zero
