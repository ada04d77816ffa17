"""What a mask is read as is what it is, or it is not read at all.

Each idiom is exported with an attention around it; the attention with the description must give
what the attention with the mask's own tensor gives, also at lengths other than the captured one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.recognise import recognise_attention
from seqcomp.layout.masks import Mask
from tests.unit.capture.captured import capture_of
from tests.unit.capture.mask_idioms import (
    BOOLS,
    CAUSAL,
    CAUSAL_IDIOMS,
    FULL,
    FULL_IDIOMS,
    IDIOMS,
    LENGTH,
    OFFSET_IDIOMS,
    OTHER_IDIOMS,
    UNREAD,
    WINDOW_IDIOMS,
    B,
    D,
    H,
    MaskFn,
    ones,
    positions,
)


class Attends(nn.Module):
    """x [B, H, S, D] attends to itself under the mask of each idiom."""

    def __init__(self, masks: Mapping[str, MaskFn]):
        super().__init__()
        self.masks = dict(masks)
        for name, value in BOOLS.items():
            self.register_buffer(name, value.clone(), persistent=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask(self, x))
            for mask in self.masks.values()
        ]


def given_axes(name: str) -> Any:
    return type("Given", (), {"batch": 0, "seq": 2})


@functools.cache
def read() -> dict[str, Mask | None]:
    """All idioms in one capture."""
    torch.manual_seed(0)
    module = Attends(IDIOMS)
    capture = capture_of(module, torch.randn(B, H, LENGTH, D), given=given_axes)
    canonicalise(capture)
    found = recognise_attention(capture, module)
    return dict(zip(IDIOMS, (info.mask for info in found), strict=True))


def described(mask: Mask, x: Tensor) -> Tensor:
    q, k = positions(x)
    allowed = torch.as_tensor(mask.visible(q, k)).expand(x.shape[2], x.shape[2])
    return F.scaled_dot_product_attention(x, x, x, attn_mask=allowed)


def check_sound(mask: Mask, name: str) -> None:
    module = Attends({name: IDIOMS[name]})
    for length in (LENGTH, 5, 12):
        x = torch.randn(B, H, length, D)
        torch.testing.assert_close(described(mask, x), module(x)[0], equal_nan=True)


@pytest.mark.parametrize("name", [n for n in CAUSAL_IDIOMS if n not in UNREAD])
def test_causal_idioms_are_read(name: str) -> None:
    assert read()[name] == CAUSAL
    check_sound(CAUSAL, name)


BANDS = OFFSET_IDIOMS | WINDOW_IDIOMS


@pytest.mark.parametrize("name", BANDS)
def test_offsets_and_windows_are_read(name: str) -> None:
    expected = BANDS[name][1]
    assert read()[name] == expected
    check_sound(expected, name)


@pytest.mark.parametrize("name", [n for n in FULL_IDIOMS if n not in UNREAD])
def test_masks_that_hide_nothing_are_full(name: str) -> None:
    assert read()[name] == FULL
    check_sound(FULL, name)


@pytest.mark.parametrize("name", sorted(UNREAD))
def test_what_is_not_proved_is_never_read_as_something_else(name: str) -> None:
    expected = FULL if name in FULL_IDIOMS else CAUSAL
    assert read()[name] in (expected, None)
    check_sound(expected, name)


@pytest.mark.parametrize("name", OTHER_IDIOMS)
def test_what_is_neither_is_not_read(name: str) -> None:
    assert read()[name] is None
    assert not holds(CAUSAL, name), "the idiom is causal after all"
    assert not holds(FULL, name), "the idiom is full after all"


def holds(mask: Mask, name: str) -> bool:
    """Whether the description gives what the idiom gives, at every length."""
    try:
        check_sound(mask, name)
    except AssertionError:
        return False
    return True


def test_the_keys_of_an_input_are_not_causal() -> None:
    """A key padding mask [B, S] that is passed in, alone and joined to a causal one."""

    class Padded(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
            keys = attention_mask[:, None, None, :].bool()
            causal = ones(x).tril() & keys
            return (
                F.scaled_dot_product_attention(x, x, x, attn_mask=keys),
                F.scaled_dot_product_attention(x, x, x, attn_mask=causal),
            )

    module, x = Padded(), torch.randn(B, H, LENGTH, D)
    mask = torch.ones(B, LENGTH, dtype=torch.long)
    capture = capture_of(
        module, x, mask, given=lambda name: given_axes(name) if name == "x" else None
    )
    canonicalise(capture)
    for info in recognise_attention(capture, module):
        assert info.mask is None
        assert "mask made by" in info.mask_found


def test_is_causal_and_a_mask_together_are_not_read() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=ones(x), is_causal=True)

    capture = capture_of(Both(), torch.randn(B, H, LENGTH, D), given=given_axes)
    (info,) = recognise_attention(capture, Both())
    assert info.mask is None
    assert "is_causal" in info.mask_found


@pytest.mark.parametrize("kind", ["attention_mask=None", "position_ids", "ones"])
def test_the_masks_of_transformers_are_causal(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    ids = torch.randint(0, 32, (B, LENGTH))
    extra: dict[str, Any] = {}
    if kind == "position_ids":
        extra["position_ids"] = torch.arange(LENGTH)[None]
    if kind == "ones":
        extra["attention_mask"] = torch.ones(B, LENGTH, dtype=torch.long)
    with torch.no_grad():
        capture = capture_of(model, ids, use_cache=False, **extra)
    canonicalise(capture)
    (info,) = recognise_attention(capture, model)
    # What an input holds is not known: only what is made without it is causal.
    assert info.mask == (CAUSAL if kind == "attention_mask=None" else None)
