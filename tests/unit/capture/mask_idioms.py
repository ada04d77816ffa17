"""Ways to write a mask, as functions of a module with buffers and of x [B, H, S, D]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqcomp.layout.masks import Band, Causal, Full, Mask

CAUSAL = Causal(0)
FULL = Full()
INF = float("inf")
LOW = torch.finfo(torch.float32).min
B, H, D, LENGTH = 2, 3, 4, 8
MaskFn = Callable[[Any, Tensor], Tensor | None]
BOOLS: dict[str, Tensor] = {
    "tri": torch.ones(16, 16, dtype=torch.bool).tril(),
    "tri4": torch.ones(1, 1, 16, 16, dtype=torch.bool).tril(),
    "additive": torch.full((16, 16), -INF).triu(1),
    "steps": torch.arange(16),
    "steps2": torch.arange(16)[None],
    "shifted": torch.arange(3, 19),
    "even": torch.arange(0, 32, 2),
    "reverse": torch.arange(15, -1, -1),
    "upper": torch.ones(16, 16, dtype=torch.bool).triu(),
    "window": torch.ones(16, 16, dtype=torch.bool).tril() & torch.ones(16, 16).triu(-2).bool(),
    "additive_window": torch.full((16, 16), -INF).triu(1) + torch.full((16, 16), -INF).tril(-3),
    "holed": torch.ones(16, 16, dtype=torch.bool).tril() & (torch.arange(256).view(16, 16) != 33),
    "ones": torch.ones(16, 16, dtype=torch.bool),
    "yes": torch.ones(1, 1, dtype=torch.bool),
    "row": torch.tensor([[True] + [False] * 15]),
    "ramp": torch.arange(16.0)[:, None] - torch.arange(16.0)[None, :],
    "weights": torch.tril(torch.full((16, 16), 2.0)),
    "lower_bias": torch.where(torch.ones(16, 16).tril().bool(), torch.arange(16.0).sin(), -INF),
}


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(x.shape[2], device=x.device)
    return at[:, None], at[None, :]


def ones(x: Tensor, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(x.shape[2], x.shape[2], dtype=dtype)


def full(x: Tensor, value: float) -> Tensor:
    return torch.full((x.shape[2], x.shape[2]), value)


def _nested(m: Any, x: Tensor) -> Tensor:
    q, k = positions(x)
    keep = q >= k
    return keep & (q >= 0).logical_and(k >= 0) & torch.ones_like(keep)


CAUSAL_IDIOMS: dict[str, MaskFn] = {
    "q >= k": lambda m, x: positions(x)[0] >= positions(x)[1],
    "k <= q": lambda m, x: positions(x)[1] <= positions(x)[0],
    "q > k - 1": lambda m, x: positions(x)[0] > positions(x)[1] - 1,
    "k < q + 1": lambda m, x: positions(x)[1] < positions(x)[0] + 1,
    "q - k >= 0": lambda m, x: positions(x)[0] - positions(x)[1] >= 0,
    "k - q < 1": lambda m, x: positions(x)[1] - positions(x)[0] < 1,
    "0 <= q - k": lambda m, x: torch.le(0 * positions(x)[0], positions(x)[0] - positions(x)[1]),
    "not k > q": lambda m, x: ~(positions(x)[1] > positions(x)[0]),
    "logical_not": lambda m, x: torch.logical_not(positions(x)[0] < positions(x)[1]),
    "float positions": lambda m, x: positions(x)[0].float() >= positions(x)[1].float(),
    "arange float": lambda m, x: (
        torch.arange(x.shape[2], dtype=torch.float32)[:, None]
        >= torch.arange(x.shape[2], dtype=torch.float32)
    ),
    "reversed twice": lambda m, x: (
        torch.arange(x.shape[2] - 1, -1, -1)[:, None] <= torch.arange(x.shape[2] - 1, -1, -1)
    ),
    "tril of ones": lambda m, x: ones(x).tril(),
    "tril of float ones as bool": lambda m, x: torch.tril(ones(x, torch.float32)).bool(),
    "not triu(1)": lambda m, x: ~ones(x).triu(1),
    "triu of ones, float, == 0 by not": lambda m, x: ~ones(x, torch.float32).triu(1).to(torch.bool),
    "triu of -inf": lambda m, x: full(x, -INF).triu(1),
    "triu of min": lambda m, x: full(x, LOW).triu(1),
    "triu of -1e38": lambda m, x: torch.triu(full(x, LOW / 2), diagonal=1),
    "masked_fill": lambda m, x: torch.zeros_like(full(x, 1.0)).masked_fill(ones(x).triu(1), -INF),
    "masked_fill not": lambda m, x: full(x, 0.0).masked_fill(~ones(x).tril(), -INF),
    "masked_fill of -inf": lambda m, x: full(x, -INF).masked_fill(ones(x).tril(), 0.0),
    "masked_fill_ in place": lambda m, x: full(x, 0.0).masked_fill_(ones(x).triu(1), -INF),
    "masked_fill twice": lambda m, x: (
        full(x, 1.0).masked_fill(ones(x).triu(1), -INF).masked_fill(ones(x).tril(), 0.0)
    ),
    "where": lambda m, x: torch.where(ones(x).tril(), 0.0, -INF),
    "where swapped": lambda m, x: torch.where(positions(x)[0] < positions(x)[1], LOW, 0.0),
    "where of tensors": lambda m, x: torch.where(
        ones(x).tril(), torch.tensor(0.0), torch.tensor(-INF)
    ),
    "(1 - m) * min": lambda m, x: (1.0 - ones(x).tril().float()) * LOW,
    "(1 - m) * min, int one": lambda m, x: (1 - ones(x).tril().to(x.dtype)) * LOW,
    "min * m": lambda m, x: LOW * ones(x).triu(1).float(),
    "buffer": lambda m, x: m.tri[: x.shape[2], : x.shape[2]],
    "buffer, 4 dims": lambda m, x: m.tri4[:, :, : x.shape[2], : x.shape[2]],
    "additive buffer": lambda m, x: m.additive[: x.shape[2], : x.shape[2]],
    "additive buffer + 0": lambda m, x: m.additive[: x.shape[2], : x.shape[2]] + 0.0,
    "buffer & buffer": lambda m, x: (
        m.tri[: x.shape[2], : x.shape[2]] & m.ones[: x.shape[2], : x.shape[2]].tril()
    ),
    "buffer positions": lambda m, x: m.steps[: x.shape[2], None] >= m.steps[None, : x.shape[2]],
    "buffer positions 2": lambda m, x: (
        m.steps2[:, : x.shape[2]].transpose(0, 1) >= m.steps2[:, : x.shape[2]]
    ),
    "shifted positions": lambda m, x: (
        m.shifted[: x.shape[2], None] >= m.shifted[None, : x.shape[2]]
    ),
    "index of a buffer": lambda m, x: m.tri[positions(x)[0], positions(x)[1]],
    "index of positions": lambda m, x: m.steps[positions(x)[0]] >= m.shifted[positions(x)[1]] - 3,
    "unsqueeze, expand": lambda m, x: ones(x).tril()[None, None].expand(x.shape[0], H, -1, -1),
    "view": lambda m, x: ones(x).tril().view(1, 1, x.shape[2], x.shape[2]),
    "reshape 3": lambda m, x: ones(x).tril().reshape(1, x.shape[2], x.shape[2]),
    "squeeze": lambda m, x: ones(x).tril()[None, None].squeeze(0),
    "squeeze of none": lambda m, x: ones(x).tril().squeeze(0),
    "transposed upper": lambda m, x: ones(x).triu().transpose(-1, -2),
    "upper.T": lambda m, x: ones(x).triu().t(),
    "upper.mT": lambda m, x: ones(x).triu().mT,
    "permuted": lambda m, x: ones(x).triu()[None, None].permute(0, 1, 3, 2),
    "select": lambda m, x: m.tri4[0, 0][: x.shape[2], : x.shape[2]],
    "contiguous": lambda m, x: ones(x).triu().t().contiguous().clone(),
    "and with all true": _nested,
    "or with all false": lambda m, x: ones(x).tril() | torch.zeros_like(ones(x)),
    "causal & shifted causal": lambda m, x: ones(x).tril() & ones(x).tril(2),
    "mul of bools": lambda m, x: ones(x).tril() * ones(x),
    "batch dims of ones": lambda m, x: torch.ones(
        x.shape[0], 1, x.shape[2], x.shape[2], dtype=torch.bool
    ).tril(),
    "to bool from int": lambda m, x: ones(x).tril().long().bool(),
    "cast up": lambda m, x: full(x, -INF).double().triu(1).to(x.dtype),
}

OFFSET_IDIOMS: dict[str, tuple[MaskFn, Mask]] = {
    "tril(1)": (lambda m, x: ones(x).tril(1), Causal(1)),
    "tril(-1)": (lambda m, x: ones(x).tril(-1), Causal(-1)),
    "triu(2) of -inf": (lambda m, x: full(x, -INF).triu(2), Causal(1)),
    "triu(0) of -inf": (lambda m, x: full(x, -INF).triu(0), Causal(-1)),
    "q > k": (lambda m, x: positions(x)[0] > positions(x)[1], Causal(-1)),
    "q + 2 >= k": (lambda m, x: positions(x)[0] + 2 >= positions(x)[1], Causal(2)),
    "shifted buffer": (
        lambda m, x: m.shifted[: x.shape[2], None] >= m.steps[None, : x.shape[2]],
        Causal(3),
    ),
    "slice that starts later": (
        lambda m, x: m.tri[2 : x.shape[2] + 2, : x.shape[2]],
        Causal(2),
    ),
}

WINDOW_IDIOMS: dict[str, tuple[MaskFn, Mask]] = {
    "window": (
        lambda m, x: (positions(x)[0] >= positions(x)[1]) & (positions(x)[0] - positions(x)[1] < 3),
        Band(0, 2),
    ),
    "k > q - 3": (
        lambda m, x: ones(x).tril() & (positions(x)[1] > positions(x)[0] - 3),
        Band(0, 2),
    ),
    "on both sides": (
        lambda m, x: (
            (positions(x)[0] - positions(x)[1] <= 2) & (positions(x)[1] - positions(x)[0] < 2)
        ),
        Band(-1, 2),
    ),
    "two windows": (
        lambda m, x: ones(x).tril().triu(-3) & ones(x).tril(1).triu(-2),
        Band(0, 2),
    ),
    "doubled": (
        lambda m, x: ones(x).tril() & (2 * positions(x)[0] - 2 * positions(x)[1] <= 5),
        Band(0, 2),
    ),
    "triu(-2) of tril": (lambda m, x: ones(x).tril().triu(-2), Band(0, 2)),
    "window of -inf": (
        lambda m, x: full(x, -INF).triu(1).masked_fill(ones(x).tril(-3), -INF),
        Band(0, 2),
    ),
    "window of min": (lambda m, x: torch.where(ones(x).tril().triu(-2), 0.0, LOW), Band(0, 2)),
    "window buffer": (lambda m, x: m.window[: x.shape[2], : x.shape[2]], Band(0, 2)),
    "additive window buffer": (
        lambda m, x: m.additive_window[: x.shape[2], : x.shape[2]],
        Band(0, 2),
    ),
    "behind the diagonal": (lambda m, x: ones(x).tril(-1).triu(-2), Band(1, 2)),
    "upper": (lambda m, x: ones(x).triu(), Band(None, 0)),
    "upper buffer": (lambda m, x: m.upper[: x.shape[2], : x.shape[2]], Band(None, 0)),
    "transposed causal": (lambda m, x: ones(x).tril().transpose(0, 1), Band(None, 0)),
    "q <= k": (lambda m, x: positions(x)[0] <= positions(x)[1], Band(None, 0)),
    "tril of -inf": (lambda m, x: full(x, -INF).tril(-1), Band(None, 0)),
}

FULL_IDIOMS: dict[str, MaskFn] = {
    "ones": lambda m, x: ones(x),
    "no -inf at all": lambda m, x: full(x, 0.0),
    "zeros": lambda m, x: torch.zeros(x.shape[2], x.shape[2]),
    "always": lambda m, x: torch.ones_like(positions(x)[0] >= positions(x)[1]),
    "causal or true": lambda m, x: ones(x).tril() | ones(x),
    "where true": lambda m, x: torch.where(ones(x), 0.0, -INF),
    "fractions cut off": lambda m, x: ~(ones(x).triu(1).float() * 0.5).long().bool(),
    "not of zeros": lambda m, x: ~torch.zeros_like(ones(x)),
}

# Each of these is something else than causal, full or a window, however alike it looks.
OTHER_IDIOMS: dict[str, MaskFn] = {
    "window of min, empty rows": lambda m, x: torch.where(ones(x).tril(-1).triu(-2), 0.0, LOW),
    "crossed": lambda m, x: ones(x).tril(-2).triu(-1),
    "window that grows": lambda m, x: ones(x).tril() & (positions(x)[0] <= 2 * positions(x)[1]),
    "diagonal": lambda m, x: positions(x)[0] == positions(x)[1],
    "off diagonal": lambda m, x: (positions(x)[0] != positions(x)[1]) | (positions(x)[1] == 0),
    "strided keys": lambda m, x: positions(x)[0] >= 2 * positions(x)[1],
    "strided queries": lambda m, x: 2 * positions(x)[0] >= positions(x)[1],
    "even buffer": lambda m, x: m.even[: x.shape[2], None] >= m.steps[None, : x.shape[2]],
    "strided slice": lambda m, x: m.tri[: 2 * x.shape[2] : 2, : x.shape[2]],
    "reverse buffer": lambda m, x: m.reverse[: x.shape[2], None] >= m.reverse[None, : x.shape[2]],
    "modulo": lambda m, x: positions(x)[0] % 4 >= positions(x)[1] % 4,
    "blocks": lambda m, x: positions(x)[0] // 2 >= positions(x)[1] // 2,
    "blocks of floats": lambda m, x: torch.floor(positions(x)[0] / 2) >= positions(x)[1] / 2,
    "halves": lambda m, x: positions(x)[0] * 0.5 >= positions(x)[1],
    "a hole": lambda m, x: m.holed[: x.shape[2], : x.shape[2]],
    "prefix": lambda m, x: ones(x).tril() | (positions(x)[1] < 3),
    "only a prefix": lambda m, x: (positions(x)[1] < 3) & (positions(x)[0] >= 0),
    "per head": lambda m, x: (
        torch.arange(H)[:, None, None] + positions(x)[0] >= positions(x)[1]
    ),
    "per sample": lambda m, x: (
        torch.arange(x.shape[0])[:, None, None, None] + positions(x)[0] >= positions(x)[1]
    ),
    "one of two causal": lambda m, x: torch.where(
        (torch.arange(H) > 0)[:, None, None], ones(x).tril(), ones(x)
    ),
    "from values": lambda m, x: x[:, :, :, :1] >= x[:, :, None, :, 0],
    "keys of an input": lambda m, x: (x[:, 0, :, 0] < 0.2)[:, None, None, :],
    "causal & keys": lambda m, x: ones(x).tril() & (x[:, 0, :, 0] < 0.2)[:, None, None, :],
    "documents of an input": lambda m, x: (
        (x[:, 0, :, 0] > 0)[:, None, None, :] == (x[:, 0, :, 0] > 0)[:, None, :, None]
    ),
    "first rows only, sliced": lambda m, x: ones(x).tril()[:1],
    "one key of each row, sliced": lambda m, x: ones(x).tril()[:, 2:3],
    "one row": lambda m, x: m.row[:, : x.shape[2]],
    "one row of a triangle": lambda m, x: m.tri[3:4, : x.shape[2]],
    "wrapped index": lambda m, x: m.tri[positions(x)[0] - 1, positions(x)[1]],
    "wrapped positions": lambda m, x: m.steps[positions(x)[0] - 1] >= positions(x)[1],
    "half precision positions": lambda m, x: (
        (torch.arange(x.shape[2]) + 1000).to(torch.bfloat16)[:, None]
        >= (torch.arange(x.shape[2]) + 1000).to(torch.bfloat16)
    ),
    "arange of bfloat16": lambda m, x: (
        torch.arange(1000, x.shape[2] + 1000, dtype=torch.bfloat16)[:, None]
        >= torch.arange(1000, x.shape[2] + 1000, dtype=torch.bfloat16)
    ),
    "bytes that wrap": lambda m, x: (
        (torch.arange(x.shape[2]) + 125).to(torch.int8)[:, None]
        >= (torch.arange(x.shape[2]) + 125).to(torch.int8)
    ),
    "unsigned that wraps": lambda m, x: (
        torch.arange(x.shape[2]).to(torch.uint8)[:, None] - 2 >= torch.arange(x.shape[2])[None]
    ),
    "ramp bias": lambda m, x: m.ramp[: x.shape[2], : x.shape[2]],
    "weights": lambda m, x: m.weights[: x.shape[2], : x.shape[2]],
    "lower bias": lambda m, x: m.lower_bias[: x.shape[2], : x.shape[2]],
    "triu of a soft penalty": lambda m, x: full(x, -10.0).triu(1),
    "penalty -1e9": lambda m, x: full(x, -1e9).triu(1) * 1e-8,
    "shifted by one": lambda m, x: full(x, -INF).triu(1) + 1.0 - positions(x)[1],
    "where half": lambda m, x: torch.where(ones(x).tril(), 0.5, 0.0),
    "rows of min, all hidden": lambda m, x: full(x, LOW).triu(0),
    "never": lambda m, x: torch.zeros_like(ones(x)),
    "all -inf": lambda m, x: full(x, -INF),
    "causal to the end": lambda m, x: positions(x)[0] + 3 >= positions(x)[1] + x.shape[2],
    "anticausal": lambda m, x: x.shape[2] - 1 - positions(x)[0] >= positions(x)[1],
    "symbolic diagonal": lambda m, x: ones(x).tril(x.shape[2] - 4),
    "flipped": lambda m, x: ones(x).tril().flip(0).flip(0).flip(1),
    "rolled": lambda m, x: ones(x).tril().roll(1, 0),
    "xor": lambda m, x: ones(x).tril() ^ ones(x).tril(-2),
    "alpha": lambda m, x: (
        torch.sub(positions(x)[0], positions(x)[1], alpha=2) >= 0
    ),
    "rsub alpha": lambda m, x: torch.rsub(positions(x)[1], positions(x)[0], alpha=2) >= 0,
    "where of a ramp": lambda m, x: torch.where(
        ones(x).tril(), positions(x)[0].float() - positions(x)[1], -INF
    ),
}  # fmt: skip


IDIOMS: dict[str, MaskFn] = {
    **CAUSAL_IDIOMS,
    **FULL_IDIOMS,
    **OTHER_IDIOMS,
    **{name: fn for name, (fn, _) in (OFFSET_IDIOMS | WINDOW_IDIOMS).items()},
}
# True, but not proved: refused rather than read.
UNREAD = {
    "fractions cut off", "float positions", "where of tensors", "buffer & buffer", "upper.mT",
    "and with all true",
}  # fmt: skip
