"""What Megatron-SP computes on cut weights: linears, embedding and loss over a tensor group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqcomp.layout.parts import part
from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.tokens import Tokens

aten = torch.ops.aten


class Regathered:
    """The gathered input of column-parallel linears, made again in backward for all of them once.

    Saving it would cost the whole sequence per layer: the shard is saved, and gathered when the
    first of `uses` weight gradients asks (Korthikanti et al., 2022, section 4.2.2).
    """

    def __init__(self, tokens: Tokens, uses: int) -> None:
        self._tokens = tokens
        self._uses = uses
        self._left = 0
        self._expecting = False
        self._gather: Callable[[], Tensor] | None = None
        self._whole: Tensor | None = None

    def expect(self) -> None:
        """The forward runs again: what it gathers is what the weight gradients need."""
        self._expecting = True

    def offer(self, whole: Tensor) -> None:
        """The gathered value, from a use in the forward."""
        if self._expecting:
            self._expecting, self._whole, self._left = False, whole.detach(), self._uses

    def start(self, shard: Tensor) -> None:
        """Send this rank's [.., s, h] off, unless an earlier use did. Each use calls it once."""
        if self._gather is None and self._whole is None:
            self._gather = self._tokens.start_gathered(shard, "backward")
            self._left = self._uses

    def whole(self) -> Tensor:
        """[.., P * s, h]; kept until every use has asked."""
        if self._whole is None:
            assert self._gather is not None, "not started"
            self._whole = self._gather()
        result = self._whole
        self._left -= 1
        if self._left == 0:
            self._whole = self._gather = None
        return result


def column_linear(
    x: Tensor, shard: Tensor, weight: Tensor, bias: Tensor | None, again: Regathered
) -> Tensor:
    """x @ weight.T + bias for gathered x [.., s, in] and this rank's rows of the weight.

    `shard` is the cut value that x was gathered from; the backward saves it instead of x.
    """
    return _ColumnLinear.apply(x, shard.detach(), weight, bias, again)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        again: Regathered,
    ) -> Tensor:
        ctx.again = again
        ctx.dtypes = (shard.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.save_for_backward(shard, weight)
        if ctx.needs_input_grad[2]:
            again.offer(x)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shard, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs_x, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        d_x = d_weight = d_bias = None
        if needs_weight:
            ctx.again.start(shard)  # it travels while d_x is computed
        rows = grad.flatten(0, -2)
        if needs_x:
            d_x = (grad @ weight.to(grad.dtype)).to(x_dtype)
        if needs_weight:
            x = ctx.again.whole()
            flat = x.reshape(-1, x.shape[-1]).to(grad.dtype)
            d_weight = (rows.t() @ flat).to(weight_dtype)
        if bias_dtype is not None and needs_bias:
            d_bias = rows.sum(0).to(bias_dtype)
        return d_x, None, d_weight, d_bias, None


def vocabulary_embedding(
    weight: Tensor, index: Tensor, padding_idx: int, words: int, comm: Communicator
) -> Tensor:
    """Rows of this rank's part of an embedding [words, h]; zero for ids that live elsewhere.

    The sum over the group is the embedding.
    """
    own = part(words, comm.size, comm.rank)
    assert weight.shape[0] == len(own), f"{weight.shape[0]} rows for the words {own}"
    if not own:  # zeros that lead back to the weight: it has a gradient, which is empty
        return weight.sum(0).expand(*index.shape, -1)
    local, inside = own_ids(index, own)
    padding = padding_idx - own.start if padding_idx in own else None
    rows = torch.nn.functional.embedding(local, weight, padding)
    return rows * inside.unsqueeze(-1).to(rows.dtype)


def own_ids(index: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """(row in this rank's part, whether the id lives there)."""
    local = index - own.start
    inside = (local >= 0) & (local < len(own))
    return local.clamp(0, max(len(own), 1) - 1), inside


def vocabulary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    comm: Communicator,
    *,
    classes: int,
    words: int,
    ignore_index: int,
    reduce: bool,
    label: str = "",
) -> Tensor:
    """Cross-entropy of logits whose classes (dim `classes`), `words` in all, the group shares.

    Returns the sum over valid targets (`reduce`) or one value per target, the same on every rank
    of the group. Maximum, sum of exponentials and the target's logit are exchanged, never logits
    (Shoeybi et al., 2019). The cotangent is partial: it is summed over the group.
    """
    moved = logits.movedim(classes, -1) if logits.dim() > 1 else logits
    own = part(words, comm.size, comm.rank)
    assert moved.shape[-1] == len(own), f"{moved.shape[-1]} logits for the words {own}"
    each = _VocabularyLoss.apply(moved, target, own, comm, ignore_index, label)
    return each.sum() if reduce else each


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        own: range,
        comm: Communicator,
        ignore: int,
        label: str,
    ) -> Tensor:
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        if not own:  # one class that cannot be: a maximum needs something to look at
            wide = torch.nn.functional.pad(wide, (0, 1), value=-torch.inf)
        local, inside = own_ids(target, own)
        valid = target != ignore
        inside &= valid
        top = comm.all_reduce(wide.amax(-1), "max", label=label)
        exponentials = (wide - top.unsqueeze(-1)).exp()
        picked = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1) - top
        parts = torch.stack([exponentials.sum(-1), torch.where(inside, picked, 0.0)])
        total, right = comm.all_reduce(parts, label=label)
        ctx.comm, ctx.label, ctx.dtype, ctx.count = comm, label, logits.dtype, len(own)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, inside, valid)
        return torch.where(valid, total.log() - right, 0.0).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, inside, valid = ctx.saved_tensors
        grad = ctx.comm.all_reduce(grad, phase="backward", label=ctx.label)
        grad = torch.where(valid, grad.to(probabilities.dtype), 0.0)
        result = probabilities * grad.unsqueeze(-1)
        result.scatter_add_(-1, local.unsqueeze(-1), (-grad * inside).unsqueeze(-1))
        return result.to(ctx.dtype)[..., : ctx.count], None, None, None, None, None


def own_heads(x: Tensor, heads: int, comm: Communicator) -> Tensor:
    """[B, Hkv, s, d] -> the KV head [B, 1, s, d] of this rank's query heads, Hkv < P.

    Rank r owns KV head r // (P / Hkv): query heads are dealt out in contiguous groups.
    """
    copies = comm.size // heads
    return x.narrow(1, comm.rank // copies, 1)
