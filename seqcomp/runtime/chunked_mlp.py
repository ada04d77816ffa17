"""Work on single tokens, a few tokens at a time: an MLP whose wide values never exist whole.

Between its linears an MLP holds several values of [tokens, width], each wider than what goes in
and out; the backward of a block needs them all at once. Here chunks of tokens go through one after
the other: in forward for the result alone, and in backward again, each chunk just before its
gradients. That is as many products as running the block again takes anyway, where the forward of
the second run leaves the result out (`skip`): nothing in a block reads it then.

The weights' gradients are added up over the chunks, in no less than fp32. Nothing is sent in
between, so ranks may have different numbers of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqcomp.runtime.tensor_parallel import Regathered

FEWEST = 1024
"""Tokens of a chunk at least. Each chunk reads all weights and adds to all their gradients: n
tokens are n FLOPs for a byte of a bf16 weight, and an accelerator makes some hundred of them in
the time of reading that byte."""

Body = Callable[..., Tensor]
"""(linear of x, x [.., n, h], parameters) -> [.., n, out], each token by itself."""


@dataclass(frozen=True)
class Chunks:
    """How `body` is run: in `number` chunks; `uses`: how often it asks for its gathered input.

    `skip`: the result is not needed, only what the backward saves. `kept`: how the result is made.
    """

    body: Body
    number: int
    uses: int
    skip: bool
    keep: Callable[[Callable[[], Sequence[Any]]], tuple[Any, ...]]


def number_of(x: Tensor, wanted: int) -> int:
    """In how many chunks the tokens of x [.., n, h] go, where `wanted` would be best."""
    return max(1, min(wanted, x.numel() // x.shape[-1] // FEWEST))


def chunked(
    how: Chunks,
    x: Tensor,
    shard: Tensor | None,
    again: Regathered | None,
    parameters: Sequence[Tensor],
) -> Tensor:
    """`body` of x, chunk by chunk; saves x and the parameters alone.

    shard, again: of a gathered x the part that is saved, and the promise to gather it again.
    """
    own = None if shard is None else shard.detach()
    result: Tensor = _Chunked.apply(x, own, how, again, *parameters)
    return result


def _rows(x: Tensor) -> Tensor:
    """[.., n, h] as [1, .., tokens, h]: dims counted from the front keep their meaning."""
    return x.reshape(*[1] * (x.dim() - 2), -1, x.shape[-1])


def in_chunks(how: Chunks, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """[.., n, h] -> [.., n, out]. Without gradients."""
    rows = _rows(x)
    made: Tensor | None = None
    start = 0
    for some in rows.tensor_split(how.number, -2):
        part = how.body(torch.nn.functional.linear, some, *parameters)
        if made is None:
            made = part.new_empty(*rows.shape[:-1], part.shape[-1])
        made.narrow(-2, start, some.shape[-2]).copy_(part)
        start += some.shape[-2]
    assert made is not None
    return made.view(*x.shape[:-1], made.shape[-1])


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Tensor | None,
        how: Chunks,
        again: Regathered | None,
        *parameters: Tensor,
    ) -> Tensor:
        device = x.device.type
        enabled = torch.is_autocast_enabled(device)
        ctx.autocast = (device, torch.get_autocast_dtype(device), enabled)
        ctx.how, ctx.again, ctx.shape = how, again, x.shape
        ctx.save_for_backward(x if shard is None else shard, *parameters)
        if again is not None:
            again.offer(x)
        if how.skip:
            one = how.body(torch.nn.functional.linear, _rows(x)[..., :1, :], *parameters)
            # Of the right shape, and without memory.
            return one.new_zeros(()).expand(*x.shape[:-1], one.shape[-1])
        return how.keep(lambda: (in_chunks(how, x, parameters),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        if ctx.again is not None:
            x = _gathered(ctx.again, x, ctx.how.uses)
        needs_x, _, _, _, *needed = ctx.needs_input_grad
        rows, grads = _rows(x), _rows(grad)
        d_x = torch.empty_like(rows) if needs_x else None
        totals: list[Tensor | None] = [None] * len(parameters)
        start = 0
        for some, cotangent in zip(
            rows.tensor_split(ctx.how.number, -2),
            grads.tensor_split(ctx.how.number, -2),
            strict=True,
        ):
            with torch.autocast(*ctx.autocast):
                own, *found = _pulled(ctx.how.body, some, parameters, cotangent, needs_x, needed)
            if d_x is not None:
                d_x.narrow(-2, start, some.shape[-2]).copy_(own)
            totals = [_added(total, new) for total, new in zip(totals, found, strict=True)]
            start += some.shape[-2]
        return (
            None if d_x is None else d_x.view(ctx.shape),
            None,
            None,
            None,
            *(
                None if total is None else total.to(parameter.dtype)
                for total, parameter in zip(totals, parameters, strict=True)
            ),
        )


def _gathered(again: Regathered, shard: Tensor, uses: int) -> Tensor:
    whole: Tensor | None = None
    for _ in range(uses):
        again.start(shard)
        whole = again.whole()
    assert whole is not None
    return whole


def _pulled(
    body: Body,
    rows: Tensor,
    parameters: Sequence[Tensor],
    cotangent: Tensor,
    needs_x: bool,
    needed: Sequence[bool],
) -> list[Any]:
    """The cotangents of a chunk's rows and of the parameters; None for what needs none."""
    leaves = [rows.detach().requires_grad_(needs_x)]
    leaves += [p.detach().requires_grad_(need) for p, need in zip(parameters, needed, strict=True)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with torch.enable_grad():
        out = body(torch.nn.functional.linear, *leaves)
    found = iter(torch.autograd.grad(out, wanted, cotangent.to(out.dtype)))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _added(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Sums of many chunks are no narrower than fp32."""
    if new is None:
        return None
    if total is None:
        # A sum over one token may be the cotangent itself; matrices are products.
        own = new if new.dim() > 1 else new.clone()
        return own.float() if own.dtype.itemsize < 4 else own
    return total.add_(new)
