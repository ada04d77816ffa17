"""A plain module on one device with the dropout that its compiled form has.

While it is in use, ATen's dropout and attention are those of the captured graph: the n-th dropout
that is on takes the n-th key. Code that torch.utils.checkpoint runs again gets the keys that it had
before: the numbers go by torch's random state, which checkpoint restores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from seqcomp.capture.dropout import BY_CHANNEL, keyed_dropout
from seqcomp.capture.recognise import attention
from seqcomp.runtime.random import drawn_seed, keys_of

_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
SEED = 0


@contextlib.contextmanager
def same_dropout(seed: int) -> Iterator[None]:
    """seed: what the compiled call drew, see `drawn_seed`. For one call and its backward, in a
    process in which nothing else runs."""
    used = _Numbers(seed)
    kernels: dict[str, Callable[..., Any]] = {
        "dropout": used.dropout,
        "dropout_": lambda x, p, train: x.copy_(used.dropout(x, p, train)),
        "feature_dropout": used.by_channel,
        "feature_dropout_": lambda x, p, train: x.copy_(used.by_channel(x, p, train)),
        "scaled_dot_product_attention": used.attention,
    }
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            for key in _KEYS:
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


def seed_of_verification() -> int:
    """What a call draws after torch.manual_seed(SEED)."""
    return drawn_seed(torch.Generator().manual_seed(SEED))


class _Numbers:
    """The kernels, and which number each dropout has."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._known: dict[int, int] = {}

    def dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        return self._dropped(x, p, x.dim()) if train and p > 0 else x

    def by_channel(self, x: Tensor, p: float, train: bool) -> Tensor:
        return self._dropped(x, p, min(x.dim(), BY_CHANNEL)) if train and p > 0 else x

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p <= 0:
            op = torch.ops.aten.scaled_dot_product_attention.default
            how = {"scale": scale, "enable_gqa": enable_gqa}
            return op.decompose(q, k, v, attn_mask, 0.0, is_causal, **how)
        number = self._next()
        return attention(
            q, k, v, attn_mask, is_causal, q.shape[-1] ** -0.5 if scale is None else scale,
            dropout=self._keys(number, q.device), number=number, p=dropout_p,
        )  # fmt: skip

    def _dropped(self, x: Tensor, p: float, dims: int) -> Tensor:
        number = self._next()
        return keyed_dropout(x, self._keys(number, x.device), number, p, dims)

    def _keys(self, number: int, device: torch.device) -> Tensor:
        return keys_of(self._seed, number + 1, device)

    def _next(self) -> int:
        return self._known.setdefault(drawn_seed(), len(self._known))
