"""Operations in which every token looks at its neighbours get one form.

A causal convolution is written as a convolution with padding whose end is cut off, a shift as a
slice with padding or zeros behind it. Between the parts of such a phrase the sequence has another
length; the whole keeps it, and can be run on shards that know their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from seqcomp.capture.edit import argument, is_tensor, op_name
from seqcomp.capture.export import Capture

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """Token t along `dim` becomes a function of the tokens t + low to t + high; lengths stay.

    inner: an operation with `high - low` less tokens in its result; None gives back the token
    itself (then low = high). fill: what stands outside of the sequence; None: it is a circle.
    Called with the whole sequence and the other operands of `inner`.
    """

    inner: Any
    dim: int
    low: int
    high: int
    fill: float | None
    written: str  # the operation that it was
    __name__ = "window"

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        length = x.shape[self.dim]
        if self.fill is None:
            return x.roll(-self.low, self.dim)
        before = max(-self.low, 0)
        pads = [before, max(self.high, 0)]
        extended = F.pad(x, [0, 0] * (x.dim() - 1 - self.dim) + pads, value=self.fill)
        seen = extended.narrow(self.dim, before + self.low, length + self.high - self.low)
        return self.apply(seen, others)

    def apply(self, seen: Tensor, others: Sequence[Any]) -> Tensor:
        """`inner` on all that some token looks at."""
        result: Tensor = seen if self.inner is None else self.inner(seen, *others)
        return result

    @property
    def mixes_channels(self) -> bool:
        return self.inner is aten.conv1d.default


@dataclass(frozen=True)
class _Found:
    """A window on `source`: for a convolution without its last slice the lengths may differ."""

    window: Window
    source: Node
    others: tuple[Any, ...] = ()


def recognise_windows(capture: Capture) -> None:
    """Rewrites the graph in place: convolutions, poolings, rolls and shifts along the sequence."""
    if capture.length is None:
        return
    for node in list(capture.graph.nodes):
        if node.op != "call_function" or not is_tensor(node):
            continue
        read = _READERS.get(op_name(node))
        if read is None or not node.meta["val"].is_floating_point():
            continue
        found = read(node, capture)
        if found is None or not _keeps_length(found, node, capture):
            continue
        with capture.graph.inserting_before(node):
            new = capture.graph.call_function(
                found.window, (found.source, *found.others), name=node.name
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        capture.graph.erase_node(node)
    capture.graph.eliminate_dead_code()


def _keeps_length(found: _Found, node: Node, capture: Capture) -> bool:
    dim, window = found.window.dim, found.window
    sizes = capture.shape(found.source)[dim], capture.shape(node)[dim]
    return all(size == capture.length for size in sizes) and window.low <= window.high


def _convolution(node: Node, capture: Capture) -> _Found | None:
    """conv1d with stride 1, whatever it is padded with."""
    x, weight = node.args[:2]
    if node.meta["val"].dim() != x.meta["val"].dim() or weight.meta["val"].dim() != 3:
        return None
    if op_name(node) == "aten.convolution" and argument(node, 6, "transposed"):
        return None
    (dilation,) = _numbers(argument(node, 5, "dilation", 1))
    (stride,) = _numbers(argument(node, 3, "stride", 1))
    width = int(weight.meta["val"].shape[-1])
    padding = argument(node, 4, "padding", 0)
    reach = dilation * (width - 1)
    if padding == "valid":
        before = 0
    elif padding == "same":
        before = reach // 2
    elif isinstance(padding, str):
        return None
    else:
        (before,) = _numbers(padding)
    if stride != 1:
        return None
    others = (
        weight, argument(node, 2, "bias"), [1], [0], [dilation], argument(node, 8, "groups", 1),
    )  # fmt: skip
    window = Window(aten.conv1d.default, _last(x), -before, reach - before, 0.0, op_name(node))
    return _behind_padding(_Found(window, x, others), padded=bool(before))


def _pooling(node: Node, capture: Capture) -> _Found | None:
    """avg_pool1d and max_pool1d with stride 1."""
    x, average = node.args[0], op_name(node) == "aten.avg_pool1d"
    (width,) = _numbers(node.args[1])
    (stride,) = _numbers(argument(node, 2, "stride", None) or [width])
    (before,) = _numbers(argument(node, 3, "padding", 0))
    (dilation,) = _numbers(argument(node, 4, "dilation", 1))
    counts_padding = argument(node, 5, "count_include_pad", True)
    if stride != 1 or argument(node, 4, "ceil_mode", False):
        return None
    if average and before and not counts_padding:
        return None
    inner = aten.avg_pool1d.default if average else aten.max_pool1d.default
    others = ([width], [1], [0]) if average else ([width], [1], [0], [dilation])
    reach, fill = dilation * (width - 1), 0.0 if average else -torch.inf
    window = Window(inner, _last(x), -before, reach - before, fill, op_name(node))
    return _behind_padding(_Found(window, x, others), padded=bool(before))


def _roll(node: Node, capture: Capture) -> _Found | None:
    shifts, dims = _numbers(node.args[1]), _numbers(argument(node, 2, "dims", []))
    x = node.args[0]
    if len(shifts) != 1 or len(dims) != 1:
        return None
    return _Found(_shift(-shifts[0], dims[0] % x.meta["val"].dim(), None, node), x)


def _slice(node: Node, capture: Capture) -> _Found | None:
    """The part that is kept of a padded sequence, or of what was made of it."""
    part = _part(node)
    inner = node.args[0]
    if part is None or not is_tensor(inner):
        return None
    dim, start = part
    found: _Found | None
    if op_name(inner) in _PADS:
        found = _behind_padding(_Found(_shift(0, dim, None, inner), inner), padded=False)
    elif op_name(inner) in _MAKERS and len(inner.users) == 1:
        found = _READERS[op_name(inner)](inner, capture)
    else:
        return None
    if found is None or found.source is inner or found.window.dim != dim or start < 0:
        return None
    low = found.window.low + start
    reach = found.window.high - found.window.low
    return replace(found, window=replace(found.window, low=low, high=low + reach))


def _pad(node: Node, capture: Capture) -> _Found | None:
    """A slice moved to the other end of the sequence by the padding on the other side."""
    padding = _padding(node)
    inner = node.args[0]
    if padding is None or op_name(inner) != "aten.slice":
        return None
    dim, before, after, fill = padding
    return _moved(inner, dim, before, after, fill, node)


def _cat(node: Node, capture: Capture) -> _Found | None:
    """[x[k:], zeros], [zeros, x[:-k]] and [x[k:], x[:k]]."""
    parts = list(node.args[0])
    dim = argument(node, 1, "dim", 0) % node.meta["val"].dim()
    if len(parts) != 2:
        return None
    first, second = parts
    sizes = [capture.shape(p)[dim] for p in parts]
    if _is_zeros(second) and sizes[1].is_Integer:
        return _moved(first, dim, 0, int(sizes[1]), 0.0, node)
    if _is_zeros(first) and sizes[0].is_Integer:
        return _moved(second, dim, int(sizes[0]), 0, 0.0, node)
    ends = [_part(p) for p in parts]
    if None in ends or first.args[0] is not second.args[0] or ends[1] != (dim, 0):
        return None
    front, start = ends[0] or (dim, 0)
    if front != dim or start < 0 or sizes[1] != start:
        return None
    return _Found(_shift(start, dim, None, node), first.args[0])


def _moved(part: Node, dim: int, before: int, after: int, fill: float, node: Node) -> _Found | None:
    """`part`, one end of a sequence, with as many tokens of `fill` at the other end."""
    cut = _part(part)
    if cut is None or cut[0] != dim or (before and after):
        return None
    start = cut[1]
    # With the length kept, x[k:] lacks what `after` adds, and x[:-k] what `before` does.
    if start != after:
        return None
    return _Found(_shift(after - before, dim, fill, node), part.args[0])


def _shift(by: int, dim: int, fill: float | None, node: Node) -> Window:
    return Window(None, dim, by, by, fill, op_name(node))


def _behind_padding(found: _Found, padded: bool) -> _Found:
    """The window on what was padded before, where both see the same outside."""
    padding = _padding(found.source)
    window = found.window
    if padding is None or padding[0] != window.dim:
        return found
    _, before, _, fill = padding
    anything = not padded and (window.fill is None or window.inner is not None)
    if not anything and fill != window.fill:
        return found
    window = replace(window, low=window.low - before, high=window.high - before, fill=fill)
    return replace(found, window=window, source=found.source.args[0])


def _padding(node: Any) -> tuple[int, int, int, float] | None:
    """(dim, before, after, fill) of constant padding along one dim."""
    if not is_tensor(node) or op_name(node) not in _PADS:
        return None
    if op_name(node) == "aten.pad" and argument(node, 2, "mode", "constant") != "constant":
        return None
    pads, fill = list(node.args[1]), argument(node, 2, "value", 0.0)
    if not all(isinstance(p, int) and p >= 0 for p in pads):
        return None
    touched = {i // 2 for i, p in enumerate(pads) if p}
    if len(touched) != 1:
        return None
    (at,) = touched
    dim = node.meta["val"].dim() - 1 - at
    return dim, pads[2 * at], pads[2 * at + 1], float(fill)


def _part(node: Any) -> tuple[int, int] | None:
    """(dim, start) of a slice with step 1."""
    if not is_tensor(node) or op_name(node) != "aten.slice":
        return None
    start = argument(node, 2, "start", 0)
    if not isinstance(start, int) or argument(node, 4, "step", 1) != 1:
        return None
    return argument(node, 1, "dim", 0) % node.meta["val"].dim(), start


def _is_zeros(node: Any) -> bool:
    return is_tensor(node) and op_name(node) in (
        "aten.zeros", "aten.new_zeros", "aten.zeros_like",
    )  # fmt: skip


def _numbers(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _last(x: Node) -> int:
    return int(x.meta["val"].dim()) - 1


_PADS = ("aten.constant_pad_nd", "aten.pad")
_MAKERS = ("aten.conv1d", "aten.convolution", "aten.avg_pool1d", "aten.max_pool1d")
_READERS: dict[str, Callable[[Node, Capture], _Found | None]] = {
    "aten.conv1d": _convolution,
    "aten.convolution": _convolution,
    "aten.avg_pool1d": _pooling,
    "aten.max_pool1d": _pooling,
    "aten.roll": _roll,
    "aten.slice": _slice,
    "aten.constant_pad_nd": _pad,
    "aten.pad": _pad,
    "aten.cat": _cat,
}
