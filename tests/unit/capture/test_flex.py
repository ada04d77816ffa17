"""FlexAttention read from the program of one pair: masks, biases, tables, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask
from torch.utils import _pytree as pytree

from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.edit import op_name
from seqcomp.capture.flex_arguments import DescribedMask
from seqcomp.capture.recognise import AttentionInfo, recognise_attention
from seqcomp.diagnostics import PlanError
from seqcomp.layout.masks import Band, Causal, Full, Mask
from tests.fixtures.flex import (
    GENERAL,
    MASKS,
    SCORES,
    FlexBranch,
    MakeMod,
    build_flex,
    causal,
    compiled,
    flex_inputs,
    same,
    window,
)
from tests.unit.capture.captured import call_of, capture_of

STATIC: dict[str, Mask] = {"causal": Causal(0), "full": Full(), "window": Band(0, 10)}


def read(
    mask: MakeMod | None = None, score: MakeMod | None = None, **kwargs: Any
) -> tuple[AttentionInfo, Any]:
    make = build_flex({"one": mask} if mask else None, {"one": score} if score else None, **kwargs)
    model = make()
    capture = canonicalise(capture_of(model, **flex_inputs()))
    (info,) = recognise_attention(capture, model)
    return info, capture


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    info, _ = read(MASKS[name])
    assert (info.heads, info.kv_heads) == (4, 2)
    if name in STATIC:
        assert info.mask == STATIC[name]
    else:
        assert info.mask is None
        assert info.pairs is not None
        assert not info.pairs.mask.additive
        assert not info.pairs.dense
        assert not info.modified


def test_scale_and_cap_are_the_attention_s_own() -> None:
    scaled, capped = (read(score=SCORES[name])[0] for name in ("scaled", "capped"))
    assert scaled.mask == capped.mask == Causal(0)
    assert scaled.scale == pytest.approx(1.7 * 8**-0.5)
    assert (capped.scale, capped.softcap) == (pytest.approx(8**-0.5), 0.3)


@pytest.mark.parametrize("name", [n for n in SCORES if n not in ("scaled", "capped")])
def test_biases(name: str) -> None:
    info, _ = read(score=SCORES[name])
    assert info.pairs is not None
    assert info.pairs.mask.additive
    assert not info.pairs.dense
    assert not info.modified
    assert bool(info.pairs.mask.trained) == (name not in ("alibi_of_head", "hidden"))
    assert bool(info.pairs.mask.tables) == (name in (
        "relative", "relative_to_length", "one_row", "sum"))  # fmt: skip


@pytest.mark.parametrize("name", GENERAL)
def test_what_has_no_name_stays_a_program(name: str) -> None:
    info, capture = read(score=GENERAL[name])
    assert info.modified
    assert info.pairs is not None
    assert not info.pairs.mask.additive
    assert not info.pairs.dense
    length = capture.shape(next(n for n in capture.graph.nodes if n.name == "input_ids"))[1]
    squares = [
        n
        for n in capture.graph.nodes
        if isinstance(n.meta.get("val"), Tensor) and list(capture.shape(n)).count(length) > 1
    ]
    assert not squares, "scores are read, not computed"


def test_layers_share_what_their_masks_are_made_of() -> None:
    model = build_flex({"a": MASKS["documents"], "b": MASKS["documents"]})()
    capture = canonicalise(capture_of(model, **flex_inputs()))
    first, second = recognise_attention(capture, model)
    assert first.pairs is not None
    assert first.pairs == second.pairs
    names = {op_name(n) for n in capture.graph.nodes}
    assert not {n for n in names if n.startswith("seqcomp")}


class Call(nn.Module):
    """One FlexAttention with the mods that the test gives."""

    def __init__(self, score: Callable[..., Any] | None, mask: Any = None, **aux: bool) -> None:
        super().__init__()
        self.score, self.mask, self.aux = score, mask, aux
        self.table = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        score = None if self.score is None else self.score(self)
        out, _ = compiled(
            q, q, q, score_mod=score, block_mask=self.mask, return_aux=AuxRequest(**self.aux)
        )
        return out


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (lambda m: lambda s, b, h, q, k: s + m.table[q].sum(), "aten.sum"),
        (lambda m: lambda s, b, h, q, k: s + m.table[q - k, q + k], "several computed indices"),
        (lambda m: lambda s, b, h, q, k: s + m.table[q, :1].squeeze(), "slice"),
        (lambda m: lambda s, b, h, q, k: (s, s), "one value per pair"),
        (lambda m: lambda s, b, h, q, k: m.table[h, q], "does not use the score"),
    ],
)
def test_mods_that_act_on_more_than_their_pair_are_refused(score: Any, says: str) -> None:
    model, x = Call(score), torch.ones(2, 16, 16)
    with pytest.raises(PlanError, match=r"SC30[23]") as refused:
        recognise_attention(canonicalise(capture_of(model, x)), model)
    assert says in str(refused.value)


def test_largest_scores_are_refused() -> None:
    with pytest.raises(PlanError, match="max_scores"):
        capture_of(Call(None, max_scores=True), torch.ones(2, 16, 16, device="meta"))


def test_blocks_without_a_function_are_refused() -> None:
    count = torch.ones((1, 1, 1), dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(count, count[..., None] * 0, BLOCK_SIZE=16)
    with pytest.raises(PlanError, match="without a mask_mod"):
        capture_of(Call(None, mask), torch.ones(2, 16, 16))


def documents(numbers: Tensor, size: int = 5) -> BlockMask:
    mod = and_masks(causal, same(numbers), window(size))
    rows = numbers.shape[1]
    return create_block_mask(mod, len(numbers), None, rows, rows, device="cpu")


def with_mask(mask: BlockMask) -> Any:
    return call_of(build_flex(bare=True)(), **flex_inputs(), block_mask=mask)


def test_a_block_mask_is_its_function_and_the_tensors_of_it() -> None:
    numbers = flex_inputs()["segments"]
    call, other = with_mask(documents(numbers)), with_mask(documents(numbers + 1))
    assert call.names[-1] == "block_mask.numbers"
    assert call.leaves[-1] is numbers
    assert len(call.leaves) == 4
    assert call.treespec == other.treespec
    assert str(call.treespec) == str(other.treespec)
    assert str(call.treespec) != str(with_mask(documents(numbers, size=6)).treespec)
    _, kwargs = pytree.tree_unflatten([*call.leaves[:-1], numbers + 7], call.treespec)
    assert isinstance(kwargs["block_mask"], DescribedMask)
    at = torch.tensor(1)
    assert kwargs["block_mask"].mask_mod(at, at, at, at)


def test_a_function_that_holds_an_object_is_refused() -> None:
    held = FlexBranch(None, None)
    mask = create_block_mask(
        lambda b, h, q, k: q >= k + held.q.in_features * 0, 1, None, 96, 96, device="cpu"
    )
    with pytest.raises(PlanError, match="an object of FlexBranch") as refused:
        with_mask(mask)
    assert refused.value.diagnostics[0].help
