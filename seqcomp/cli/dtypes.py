"""Names of dtypes on the command line: short ones, and torch's own."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from seqcomp.diagnostics import Diagnostic, diagnostic

if TYPE_CHECKING:
    from seqcomp.hardware.cluster import Cluster


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


class Speed(StrEnum):
    """Those in which machines may have speeds."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def dtype_on(cluster: Cluster, wanted: StrEnum | None) -> tuple[str, tuple[Diagnostic, ...]]:
    """What is wanted; else that in which the cluster's kernels were measured, with SC419 where that
    is not bf16."""
    measured, *others = cluster.device.peak
    if wanted is not None or measured == "bf16":
        return (wanted or Speed.bf16).value, ()
    note = diagnostic(
        "SC419",
        where=cluster.name,
        message=f"computed in {measured}, in which the kernels of {cluster.device.name} were "
        "measured",
        found=measured,
        legal=(measured, *others),
        help="--dtype names another",
    )
    return measured, (note,)


def torch_name(dtype: StrEnum) -> str:
    """'bfloat16' for 'bf16'."""
    kind, bits = dtype.value.rstrip("0123456789"), dtype.value.lstrip("abcdefghijklmnopqrstuvwxyz")
    return {"bf": "bfloat", "fp": "float"}.get(kind, kind) + bits
