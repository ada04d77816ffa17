"""What a unit keeps for the backward, found by calling it on few tokens without its products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from seqcomp.capture.probes import Probe, at_sizes, symbols_of

aten = torch.ops.aten
_TOKENS = 8  # each size of the call that is open; one of them twice as many, to tell shares apart
_MOST = 1 << 22  # elements of an input of which no size is open
_PRODUCTS = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """Storages that autograd keeps of a unit's call beside parameters and buffers.

    Those of `inputs` and `results`, by number, and others of `fixed` bytes and `each` for an
    element of input `lead`.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    lead: int
    fixed: float
    each: float

    def own(self, inputs: Sequence[Tensor]) -> int:
        """Bytes beside the storages of inputs and results."""
        return round(self.fixed + self.each * inputs[self.lead].numel())


def kept_inside(probe: Probe) -> Kept | None:
    """What a call on tensors like those of the capture keeps; None where it cannot be called.

    Bytes grow with tokens, whatever experts these go to, but for what an implementation fills up.
    """
    inputs = probe.like
    known = sorted({s for x in inputs for s in symbols_of(x)}, key=str)
    first = dict.fromkeys(known, _TOKENS)
    trials = [first, *({**first, symbol: 2 * _TOKENS} for symbol in known[-1:])]
    try:
        given = [[at_sizes(x, trial, probe) for x in inputs] for trial in trials]
        if any(math.prod(shape) > _MOST for shape in given[0]):
            return None
        found = [_called(probe, shapes) for shapes in given]
    except Exception:
        # A unit is arbitrary code, which needs no gradient of made-up values.
        return None
    numels = [[math.prod(shape) for shape in shapes] for shapes in given]
    (taken, results, small), (_, _, large) = found[0], found[-1]
    lead = max(range(len(inputs)), key=lambda i: numels[-1][i] / max(numels[0][i], 1))
    more = numels[-1][lead] - numels[0][lead]
    each = (large - small) / more if more else small / max(numels[0][lead], 1)
    return Kept(taken, results, lead, max(small - each * numels[0][lead], 0.0), each)


def _called(
    probe: Probe, shapes: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Which inputs and results are kept, and the bytes of all else."""
    held: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        held.setdefault(_place(x), x.detach())
        return x

    with probe.standing_in(shapes) as made, torch.enable_grad():
        # What is changed in place must not be a leaf.
        given = [
            x.requires_grad_(like.requires_grad).view_as(x)
            for x, like in zip(made.inputs, probe.like, strict=True)
        ]
        for name, parameter in probe.parameters.items():
            made.parameters[name].requires_grad_(parameter.requires_grad)
        with _WithoutProducts(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = probe.call(given)
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        taken = tuple(i for i, x in enumerate(given) if _place(x) in held)
        own = (*made.parameters.values(), *made.buffers.values())
        places = {_place(x) for x in (*given, *own)}
        given_back = tuple(
            i for i, x in enumerate(results) if _place(x) in held and _place(x) not in places
        )
        places |= {_place(x) for x in results}
        rest = sum(x.untyped_storage().nbytes() for p, x in held.items() if p not in places)
    return taken, given_back, rest


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _WithoutProducts(TorchDispatchMode):
    """Zeros for matrix products, whose sizes alone matter: weights are never read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._grouped_mm.default and [x.dim() for x in args[:2]] == [2, 3]:
            return args[0].new_zeros(args[0].shape[0], args[1].shape[2])
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        given = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs or {}))
        made = func(*given[0], **given[1])
        return torch.zeros_like(made, device=args[0].device)
