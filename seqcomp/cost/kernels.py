"""How long kernels take on one device: a roofline, each kind with its measured efficiency."""

from __future__ import annotations

import math

from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.hardware.cluster import Device


def peak_of(device: Device, dtype: str) -> float:
    """Peak FLOP/s in a dtype. Raises PlanError SC029 where the device has none."""
    if dtype not in device.peak:
        raise PlanError(
            diagnostic("SC029", where=device.name, found=dtype, legal=tuple(device.peak))
        )
    return device.peak[dtype]


def dense_seconds(device: Device, dtype: str, flops: float, rows: float, moved: float) -> float:
    """A matrix product of ``rows`` tokens that reads and writes ``moved`` bytes."""
    if flops == 0:
        return 0.0
    rate = peak_of(device, dtype) * device.kernels.dense.at(rows)
    return max(flops / rate, stream_seconds(device, moved))


def attention_seconds(
    device: Device, dtype: str, pairs: float, flops: float, *, backward: bool = False
) -> float:
    """A tile of fused attention with ``pairs`` visible pairs a head.

    Its efficiency is that of the causal square with as many pairs.
    """
    if flops == 0:
        return 0.0
    kernels = device.kernels
    curve = kernels.attention_backward if backward else kernels.attention_forward
    rate = peak_of(device, dtype) * curve.at(math.sqrt(2 * pairs))
    return max(flops / rate, kernels.launch)


def stream_seconds(device: Device, moved: float) -> float:
    """An element-wise operation that reads and writes ``moved`` bytes."""
    kernels = device.kernels
    return max(moved / (device.bandwidth * kernels.streaming), kernels.launch) if moved else 0.0
