"""One call of a module, bound to its signature and flattened in a fixed order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from seqcomp.capture.flex_arguments import described
from seqcomp.diagnostics import PlanError, diagnostic

BATCH = "batch"
SEQ = "seq"

_SEQUENCES = ("input_ids", "inputs_embeds", "ids", "tokens", "hidden_states", "x", "src")
_PRIMARY = (*_SEQUENCES, "decoder_input_ids")
# Two-dim inputs of these names are [batch, sequence] whatever their sizes say.
_PER_TOKEN = frozenset(
    {"labels", "targets", "position_ids", "positions", "attention_mask", "loss_mask",
     "token_type_ids", *_SEQUENCES}
)  # fmt: skip
_IMAGES = frozenset({"pixel_values", "pixel_values_videos", "image", "images", "video", "videos"})
_STATEFUL = ("past_key_values", "past_key_value", "cache_params", "kv_cache")


@dataclass(frozen=True)
class Call:
    """Arguments of one call. `names` has one dotted name per leaf, in flattened order."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    treespec: pytree.TreeSpec

    def tensors(self) -> dict[str, torch.Tensor]:
        """The leaves that are tensors, by name."""
        named = zip(self.names, self.leaves, strict=True)
        return {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}


@dataclass(frozen=True)
class InputDims:
    """What each dim of a tensor leaf is: 'batch', 'seq' or None (a fixed size)."""

    name: str
    dims: tuple[str | None, ...]

    def index(self, role: str) -> int | None:
        return self.dims.index(role) if role in self.dims else None


def signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def bind_call(
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    where: str,
    stateless: bool,
) -> Call:
    """Binds (args, kwargs) as `forward` would, everything by name where that is possible.

    Raises PlanError: SC501 for missing or unknown arguments, SC305 for calls that keep state.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise PlanError(
            [
                diagnostic(
                    "SC501",
                    where=where,
                    found=str(error),
                    legal=f"forward{signature}",
                    help="call the module with the arguments of its own forward",
                )
            ]
        ) from error
    positional: list[Any] = []
    named: dict[str, Any] = {}
    star = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    by_position = bool(star and bound.arguments.get(star))
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional.extend(value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.POSITIONAL_ONLY or (
            by_position and kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ):
            positional.append(value)
        else:
            named[name] = value
    _refuse_state(named, where)
    if stateless and "use_cache" not in named:
        named["use_cache"] = False
    named = dict(sorted(named.items(), key=lambda item: _order(signature, item[0])))
    positional, named = described((positional, named), where)
    paths, treespec = pytree.tree_flatten_with_path((tuple(positional), named))
    leaves = tuple(leaf for _, leaf in paths)
    names = tuple(_leaf_name(path, signature) for path, _ in paths)
    return Call(tuple(positional), named, leaves, names, treespec)


def _order(signature: inspect.Signature, name: str) -> tuple[int, str]:
    known = list(signature.parameters)
    return (known.index(name) if name in known else len(known), name)


def _leaf_name(path: Sequence[Any], signature: inspect.Signature) -> str:
    keys = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path]
    if keys[0] == 0:
        parameters = list(signature.parameters)
        first = parameters[keys[1]] if keys[1] < len(parameters) else f"arg{keys[1]}"
        keys = [None, first, *keys[2:]]
    return ".".join(str(k) for k in keys[1:])


def _refuse_state(named: Mapping[str, Any], where: str) -> None:
    if named.get("use_cache"):
        raise PlanError(
            [
                diagnostic(
                    "SC305",
                    where=f"{where}(use_cache)",
                    found="use_cache=True",
                    legal="use_cache=False or left out",
                    help="pass use_cache=False",
                )
            ]
        )
    for name in _STATEFUL:
        if named.get(name) is not None:
            raise PlanError(
                [
                    diagnostic(
                        "SC305",
                        where=f"{where}({name})",
                        found=type(named[name]).__name__,
                        legal="None",
                        help=f"call without {name}: decoding with a cache is not supported",
                    )
                ]
            )


def classify_inputs(call: Call, given: Callable[[str], Any]) -> tuple[InputDims | None, ...]:
    """Which dims of each leaf are the batch and the sequence; None for leaves without a tensor.

    `given(name)` returns the plan's own entry for an input (attributes batch, seq) or None.
    Without one, the primary input (input_ids, inputs_embeds, x, ... else the first tensor of
    two dims or more) is [batch, seq, ...] and sizes equal to its sizes are taken for the same.
    Images [batch, channels, height, width] have no sequence: the model makes one of them.
    """
    tensors = {
        name: leaf
        for name, leaf in zip(call.names, call.leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    }
    primary = primary_input(tensors)
    batch, length = _primary_sizes(primary, tensors, given)
    result: list[InputDims | None] = []
    for name, leaf in zip(call.names, call.leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            result.append(None)
            continue
        spec = given(name)
        if spec is not None:
            result.append(InputDims(name, _given_dims(leaf, spec)))
        elif is_image(name, leaf, primary):
            lead = BATCH if leaf.shape[0] == batch else None
            result.append(InputDims(name, (lead, *(None,) * (leaf.ndim - 1))))
        else:
            result.append(InputDims(name, _inferred_dims(name, leaf, batch, length)))
    return tuple(result)


def primary_input(tensors: Mapping[str, torch.Tensor]) -> str | None:
    for name in _PRIMARY:
        if name in tensors and tensors[name].ndim >= 2:
            return name
    return next((name for name, t in tensors.items() if t.ndim >= 2), None)


def is_image(name: str, tensor: torch.Tensor, primary: str | None) -> bool:
    """Floating [batch, channels, ..., height, width]: by its name, or as the first input."""
    if name == "input_features" and name != primary:  # spectra, of which an encoder makes tokens
        return tensor.is_floating_point()
    own = name in _IMAGES or name == primary
    return own and tensor.is_floating_point() and tensor.ndim >= 4


def _primary_sizes(
    primary: str | None, tensors: Mapping[str, torch.Tensor], given: Callable[[str], Any]
) -> tuple[int | None, int | None]:
    if primary is None:
        return None, None
    tensor, spec = tensors[primary], given(primary)
    if spec is None:
        return tensor.shape[0], None if is_image(primary, tensor, primary) else tensor.shape[1]
    dims = _given_dims(tensor, spec)
    sizes = [tensor.shape[dims.index(role)] if role in dims else None for role in (BATCH, SEQ)]
    return sizes[0], sizes[1]


def _given_dims(tensor: torch.Tensor, spec: Any) -> tuple[str | None, ...]:
    dims: list[str | None] = [None] * tensor.ndim
    for role, index in ((BATCH, spec.batch), (SEQ, spec.seq)):
        if index is not None and -tensor.ndim <= index < tensor.ndim:
            dims[index] = role
    return tuple(dims)


def _inferred_dims(
    name: str, tensor: torch.Tensor, batch: int | None, length: int | None
) -> tuple[str | None, ...]:
    shape = tuple(tensor.shape)
    dims: list[str | None] = [None] * len(shape)
    if batch is None or not shape:
        return tuple(dims)
    if len(shape) == 2 and name in _PER_TOKEN and shape[0] in (1, batch):
        return (BATCH if shape[0] == batch else None, SEQ)
    if len(shape) == 1:
        dims[0] = SEQ if shape[0] == length else BATCH if shape[0] == batch else None
        return tuple(dims)
    square = len(shape) == 2 and shape[0] == shape[1] == length != batch
    extra = shape[:1] != (batch,) or name in ("position_ids", "positions")  # [axes, batch, seq]
    leading_extra = len(shape) == 3 and shape[1:] == (batch, length) and extra
    start = 0
    if leading_extra:
        dims[1], start = BATCH, 2
    elif not square and shape[0] == batch:
        dims[0], start = BATCH, 1
    for index in range(start, len(shape)):
        if shape[index] == length:
            dims[index] = SEQ
    # A trailing feature dim may happen to have the sequence's size: one sequence dim is enough
    # for a floating [batch, seq, features] input; square masks keep both.
    if tensor.is_floating_point() and len(shape) == 3 and dims[1] == SEQ:
        dims[2] = None
    return tuple(dims)
