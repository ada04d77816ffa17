"""Whether ranks that should have the same inputs do: shapes can agree where tokens do not."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.runtime.agreement import Agreement
from seqcomp.runtime.comm import RankContext

_NOTHING = -(2**62)


def compare_inputs(
    context: RankContext, agreement: Agreement, batch: tuple[str, ...], inputs: Mapping[str, Tensor]
) -> list[Diagnostic]:
    """What differs within a sequence group, the same on all ranks; ranks along `batch` may differ.

    Collective. Raises RankLostError.
    """
    index = 0
    for axis in batch:
        index = index * context.sizes[axis] + context.coords[axis]
    groups = math.prod(context.sizes[axis] for axis in batch)
    if groups == context.world_size:
        return []
    sums = {name: checksum(x) for name, x in inputs.items()}
    digest = int(hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:14], 16)
    # One exchange for all groups: each has a maximum and a minimum in places of its own.
    values = [_NOTHING] * (2 * groups)
    values[2 * index : 2 * index + 2] = digest, -digest
    best = agreement.all_max(values)
    if all(high == -low for high, low in zip(best[::2], best[1::2], strict=True)):
        return []
    outcomes = agreement.exchange(True, json.dumps({"group": index, "sums": sums}))
    assert outcomes is not None, "what differs in a group differs between ranks"
    told = [json.loads(outcome.text) for outcome in outcomes]
    found = []
    for name in sums:
        for group in range(groups):
            ranks: dict[str, list[int]] = {}
            for outcome, one in zip(outcomes, told, strict=True):
                if one["group"] == group:
                    ranks.setdefault(one["sums"].get(name, "not passed"), []).append(outcome.rank)
            if len(ranks) > 1:
                found.append(_difference(name, ranks))
    return found


def checksum(x: Tensor) -> str:
    """16 digits that depend on every bit and its place, and not on the device."""
    x = torch.view_as_real(x) if x.is_complex() else x
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    # Integers wrap around, so the order of the sum does not matter.
    values = x.detach().contiguous().view(bits).reshape(-1).long()
    places = torch.arange(1, values.numel() + 1, device=x.device) * 0x5851F42D4C957F2D
    mixed = (values ^ (places >> 29)) * (places | 1)
    total = int((mixed ^ (mixed >> 31)).sum()) % 2**64
    return hashlib.sha256(f"{total} {list(x.shape)} {x.dtype}".encode()).hexdigest()[:16]


def _difference(name: str, ranks: Mapping[str, list[int]]) -> Diagnostic:
    return diagnostic(
        "SC504",
        where=name,
        found="; ".join(f"values with checksum {sum_} on ranks {r}" for sum_, r in ranks.items()),
        legal="the same values on all ranks of a sequence group",
        help=f"pass the same {name} on every rank of a sequence group, and different slices of the "
        "batch along data axes only (seqcomp.training.data.BatchSampler deals them out)",
    )
