"""Names of dtypes on the command line: short ones, and torch's own."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    """Of weights and buffers."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    fp64 = "fp64"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


class VerifiedDtype(StrEnum):
    """Those in which the verifier has bounds."""

    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


def torch_name(dtype: StrEnum) -> str:
    """'bfloat16' for 'bf16'."""
    kind, bits = dtype.value.rstrip("0123456789"), dtype.value.lstrip("abcdefghijklmnopqrstuvwxyz")
    return {"bf": "bfloat", "fp": "float"}.get(kind, kind) + bits
