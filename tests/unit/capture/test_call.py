"""Calls bound to a signature, names of their leaves, and which dims are batch and sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from seqcomp.capture.call import (
    BATCH,
    SEQ,
    Call,
    bind_call,
    classify_inputs,
    primary_input,
)
from seqcomp.diagnostics import PlanError
from seqcomp.plan.schema import InputSpec

B, S, D = 2, 6, 5
IDS = torch.zeros(B, S, dtype=torch.long)


def plain(input_ids: Any, mask: Any = None, *, scale: float = 1.0) -> None: ...


def loose(input_ids: Any, use_cache: Any = None, **kwargs: Any) -> None: ...


def starred(x: Any, y: Any, *rest: Any, flag: bool = False) -> None: ...


def positional(x: Any, /, y: Any = 3) -> None: ...


def cached(input_ids: Any, past_key_values: Any = None) -> None: ...


def bind(fn: Callable[..., Any], *args: Any, stateless: bool = False, **kwargs: Any) -> Call:
    return bind_call(inspect.signature(fn), args, kwargs, where="M", stateless=stateless)


def again(call: Call) -> tuple[Any, Any]:
    """The arguments rebuilt from the leaves, as every call of a program rebuilds them."""
    args, kwargs = pytree.tree_unflatten(list(call.leaves), call.treespec)
    return tuple(args), kwargs


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((IDS,), {}), ((IDS, None), {}), ((), {"input_ids": IDS}), ((IDS,), {"mask": None})],
)
def test_ways_to_write_one_call_meet(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = bind(plain, *args, **kwargs)
    assert call.args == ()
    assert call.kwargs["input_ids"] is IDS
    assert set(call.names) <= {"input_ids", "mask", "scale"}


def test_defaults_are_left_to_forward() -> None:
    assert bind(plain, IDS).names == ("input_ids",)
    assert bind(positional, IDS).names == ("x",)


def test_the_order_of_keywords_does_not_matter() -> None:
    one = bind(plain, scale=2.0, mask=IDS, input_ids=IDS)
    two = bind(plain, IDS, IDS, scale=2.0)
    assert one.names == two.names == ("input_ids", "mask", "scale")
    assert one.treespec == two.treespec
    three = bind(loose, IDS, zeta=1, alpha=2)
    assert three.names == bind(loose, IDS, alpha=2, zeta=1).names == ("input_ids", "alpha", "zeta")


def test_extra_keywords_are_kept_by_name() -> None:
    call = bind(loose, IDS, labels=IDS, extra={"a": [1.5]})
    assert call.kwargs["labels"] is IDS
    assert call.names == ("input_ids", "extra.a.0", "labels")


@pytest.mark.parametrize("args", [(1, 2), (1, 2, 3, 4)])
def test_starred_arguments_stay_where_they_are(args: tuple[Any, ...]) -> None:
    call = bind(starred, *args, flag=True)
    assert inspect.signature(starred).bind(*call.args, **call.kwargs).args == args
    assert again(call) == (call.args, dict(call.kwargs))


def test_positional_only_arguments_stay_positional() -> None:
    call = bind(positional, IDS, y=4)
    assert call.args[0] is IDS
    assert call.kwargs == {"y": 4}
    assert call.names == ("x", "y")


@pytest.mark.parametrize(
    ("args", "kwargs", "word"),
    [
        ((), {}, "input_ids"),
        ((IDS,), {"unknown": 1}, "unknown"),
        ((IDS, None, 3.0), {}, "too many"),
        ((IDS,), {"input_ids": IDS}, "multiple"),
    ],
)
def test_calls_that_forward_would_not_take(
    args: tuple[Any, ...], kwargs: dict[str, Any], word: str
) -> None:
    with pytest.raises(PlanError, match=word) as caught:
        bind(plain, *args, **kwargs)
    (found,) = caught.value.diagnostics
    assert found.code == "SC501"
    assert "mask" in str(found.legal)


@pytest.mark.parametrize(
    ("fn", "kwargs", "where"),
    [
        (loose, {"use_cache": True}, "use_cache"),
        (cached, {"past_key_values": object()}, "past_key_values"),
        (loose, {"past_key_values": (IDS,)}, "past_key_values"),
        (loose, {"cache_params": object()}, "cache_params"),
    ],
)
def test_calls_that_keep_state_are_refused(
    fn: Callable[..., Any], kwargs: dict[str, Any], where: str
) -> None:
    with pytest.raises(PlanError) as caught:
        bind(fn, IDS, **kwargs)
    (found,) = caught.value.diagnostics
    assert found.code == "SC305"
    assert where in found.where


def test_state_passed_by_position_is_refused_too() -> None:
    with pytest.raises(PlanError):
        bind(cached, IDS, object())


@pytest.mark.parametrize("kwargs", [{}, {"use_cache": False}])
def test_a_cache_by_default_is_turned_off(kwargs: dict[str, Any]) -> None:
    assert bind(loose, IDS, stateless=True, **kwargs).kwargs["use_cache"] is False


def test_no_cache_passed_is_no_state() -> None:
    assert bind(cached, IDS, None).kwargs["past_key_values"] is None
    assert "use_cache" not in bind(loose, IDS).kwargs


def test_names_of_nested_leaves() -> None:
    nested = {"b": (IDS, [IDS, None]), "a": IDS}
    call = bind(loose, IDS, batch=nested)
    assert set(call.names) >= {"input_ids", "batch.b.0", "batch.b.1.0", "batch.a"}
    assert len(call.names) == len(call.leaves)
    by_name = dict(zip(call.names, call.leaves, strict=True))
    assert by_name["batch.a"] is IDS


# --- classification ------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    batch: int | None = 0
    seq: int | None = None


def dims(given: dict[str, Given] | None = None, **tensors: Any) -> dict[str, Any]:
    def forward(**kwargs: Any) -> None: ...

    call = bind(forward, **tensors)
    found = classify_inputs(call, (given or {}).get)
    return {n: d.dims if d else None for n, d in zip(call.names, found, strict=True)}


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("input_ids", ints(B, S), (BATCH, SEQ)),
        ("labels", ints(B, S), (BATCH, SEQ)),
        ("position_ids", ints(B, S), (BATCH, SEQ)),
        ("position_ids", ints(1, S), (None, SEQ)),
        ("position_ids", ints(S), (SEQ,)),
        ("position_ids", ints(3, B, S), (None, BATCH, SEQ)),
        ("attention_mask", ints(B, S), (BATCH, SEQ)),
        ("attention_mask", floats(B, 1, S, S), (BATCH, None, SEQ, SEQ)),
        ("attention_mask", floats(1, 1, S, S), (None, None, SEQ, SEQ)),
        ("bias", floats(S, S), (SEQ, SEQ)),
        ("inputs_embeds", floats(B, S, D), (BATCH, SEQ, None)),
        ("inputs_embeds", floats(B, S, S), (BATCH, SEQ, None)),
        ("frequencies", floats(S, D), (SEQ, None)),
        ("lengths", ints(B), (BATCH,)),
        ("scale", floats(), ()),
        ("weights", floats(7, 7), (None, None)),
        ("pooled", floats(B, D), (BATCH, None)),
        ("memory", floats(B, 9, D), (BATCH, None, None)),
    ],
)
def test_dims_beside_token_ids(
    name: str, tensor: torch.Tensor, expected: tuple[str | None, ...]
) -> None:
    beside = {} if name == "input_ids" else {"input_ids": IDS}
    assert dims(**beside, **{name: tensor})[name] == expected


def test_three_axes_of_positions_of_three_samples() -> None:
    """[3, B, S] with B = 3: the batch is the middle dim."""
    found = dims(input_ids=ints(3, S), position_ids=ints(3, 3, S))
    assert found["position_ids"] == (None, BATCH, SEQ)


@pytest.mark.parametrize(("batch", "length"), [(1, 6), (4, 4), (6, 1), (1, 1)])
@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "attention_mask"])
def test_tokens_are_batch_then_sequence_whatever_their_sizes(
    name: str, batch: int, length: int
) -> None:
    found = dims(**{"input_ids": ints(batch, length), name: ints(batch, length)})
    assert found[name] == (BATCH, SEQ)


def test_features_as_long_as_the_sequence() -> None:
    assert dims(x=floats(B, 8, 8))["x"] == (BATCH, SEQ, None)
    found = dims(x=floats(8, 8, 8), y=floats(8, 8, 8))
    assert found["x"] == found["y"] == (BATCH, SEQ, None)


def test_numbers_and_none_have_no_dims() -> None:
    assert dims(input_ids=IDS, flag=True, nothing=None, name="a")["flag"] is None


def test_the_plan_says_otherwise() -> None:
    given = {"x": Given(batch=1, seq=0), "extra": Given(batch=None, seq=-1)}
    found = dims(given, x=floats(S, B, D), extra=floats(4, S), other=floats(B, S))
    assert found == {"x": (SEQ, BATCH, None), "extra": (None, SEQ), "other": (BATCH, SEQ)}


def test_the_plan_says_that_there_is_no_sequence() -> None:
    given = {"images": Given(batch=0)}
    found = dims(given, images=floats(B, S, 3, 3), input_ids=IDS)
    assert found["images"] == (BATCH, None, None, None)


def test_the_primary_input_gives_the_sizes() -> None:
    tensors = {"other": floats(3, 4), "input_ids": IDS}
    assert primary_input(tensors) == "input_ids"
    assert primary_input({"a": floats(3), "b": floats(3, 4)}) == "b"
    assert primary_input({"a": floats(3)}) is None
    assert dims(a=floats(3))["a"] == (None,)


def test_leaves_of_containers_are_classified_by_their_sizes() -> None:
    found = dims(batch={"tokens": ints(B, S), "table": floats(S, 4), "n": 3})
    assert found["batch.tokens"] == (BATCH, SEQ)
    assert found["batch.table"] == (SEQ, None)
    assert found["batch.n"] is None


def dims_of(names: dict[str, torch.Tensor], **given: Any) -> dict[str, tuple[str | None, ...]]:
    def forward(**kwargs: Any) -> None: ...

    call = bind(forward, **names)
    return {d.name: d.dims for d in classify_inputs(call, given.get) if d is not None}


def test_images_have_no_sequence() -> None:
    """Neither their channels, nor a side as long as the text beside them."""
    image = torch.zeros(B, 3, S, S)
    batch_only = (BATCH, None, None, None)
    assert dims_of({"pixel_values": image}) == {"pixel_values": batch_only}
    assert dims_of({"x": image, "labels": torch.zeros(B)}) == {"x": batch_only, "labels": (BATCH,)}
    assert dims_of({"input_ids": IDS, "pixel_values": image})["pixel_values"] == batch_only
    # A bias of scores has as many dims and two sequences.
    mask = dims_of({"input_ids": IDS, "attention_mask": torch.zeros(B, 1, S, S)})
    assert mask["attention_mask"] == (BATCH, None, SEQ, SEQ)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize(("batch", "length"), [(2, 6), (1, 6), (3, 6), (4, 6), (2, 3), (3, 3)])
def test_positions_of_several_axes(axes: int, batch: int, length: int) -> None:
    """[axes, batch, sequence] whatever sizes happen to agree, as a plan may say too."""
    ids = torch.zeros(batch, length, dtype=torch.long)
    positions = ids.expand(axes, batch, length)
    found = dims_of({"input_ids": ids, "position_ids": positions})
    assert found["position_ids"] == (None, BATCH, SEQ)
    said = InputSpec(batch=1, seq=2)
    assert dims_of({"input_ids": ids, "position_ids": positions}, position_ids=said) == found
