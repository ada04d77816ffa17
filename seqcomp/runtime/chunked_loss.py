"""A linear head and the cross-entropy of its logits, a few tokens at a time.

Logits [s, V] of a large vocabulary are the largest value of many models, and the loss needs each
row once. They are made in chunks of tokens and dropped: in forward for the losses, and again in
backward for the gradients. That costs the head's product once more (2 * s * h * V FLOPs, of 6), and
holds no value that grows with both tokens and vocabulary. Gradients made in the forward
instead would cost no product, but hold a gradient of the whole head weight, in at least fp32, from
the forward on, need to know the cotangents ahead, and be wasted where nobody asks for them.

Where the group of a tensor axis shares the vocabulary, each rank measures its own classes chunk by
chunk, and what the ranks tell each other is told once for all tokens: as much as without chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqcomp.layout.parts import part
from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.tensor_parallel import Regathered, own_ids


class TokenLoss(ABC):
    """The loss of each token from its logits, in two steps: what a rank sees, what all see."""

    @abstractmethod
    def measure(self, logits: Tensor, target: Tensor) -> Tensor:
        """[n, V] and [n] -> [k, n]."""

    @abstractmethod
    def combine(self, measured: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """[k, n] of all tokens -> their losses [n], and what `pull` wants to see again [n]."""

    @abstractmethod
    def arrived(self, grad: Tensor) -> Tensor:
        """The cotangents [n] of all tokens, complete."""

    @abstractmethod
    def pull(
        self, logits: Tensor, target: Tensor, kept: Tensor | None, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A value made of `logits`, and its cotangent, where those of the losses are `grad`."""


@dataclass(frozen=True)
class WholeLoss(TokenLoss):
    """Of logits of all classes. ``each(logits, target)`` gives one value per token."""

    each: Callable[[Tensor, Tensor], Tensor]

    def measure(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.each(logits, target).unsqueeze(0)

    def combine(self, measured: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        return measured[0], None

    def arrived(self, grad: Tensor) -> Tensor:
        return grad

    def pull(
        self, logits: Tensor, target: Tensor, kept: Tensor | None, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.each(logits, target), grad


@dataclass(frozen=True)
class SharedLoss(TokenLoss):
    """Of logits whose `words` classes `comm` shares (see `vocabulary_cross_entropy`)."""

    comm: Communicator
    words: int
    ignore_index: int
    dtype: torch.dtype
    label: str

    def measure(self, logits: Tensor, target: Tensor) -> Tensor:
        """The log-sum-exp of this rank's classes, and the target's logit where it is one."""
        wide = _wide(logits)
        own, local, _, _ = self._ids(target)
        assert logits.shape[-1] == len(own), f"{logits.shape[-1]} logits for the words {own}"
        if not own:
            nothing = wide.new_zeros(target.shape)
            return torch.stack([nothing - torch.inf, nothing])
        picked = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        return torch.stack([wide.logsumexp(-1), picked])

    def combine(self, measured: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        own, picked = measured
        _, _, inside, valid = self._ids(target)
        top = self.comm.all_reduce(own, "max", label=self.label)
        # Relative to the maximum: two large numbers would cancel.
        parts = torch.stack([(own - top).exp(), torch.where(inside, picked - top, 0.0)])
        total, right = self.comm.all_reduce(parts, label=self.label)
        losses = torch.where(valid, total.log() - right, 0.0)
        return losses.to(self.dtype), top + total.log()

    def arrived(self, grad: Tensor) -> Tensor:
        return self.comm.all_reduce(grad, phase="backward", label=self.label)

    def pull(
        self, logits: Tensor, target: Tensor, kept: Tensor | None, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert kept is not None
        own, local, inside, valid = self._ids(target)
        result = (_wide(logits.detach()) - kept.unsqueeze(-1)).exp()
        grad = torch.where(valid, grad.to(result.dtype), 0.0)
        result *= grad.unsqueeze(-1)
        if own:
            result.scatter_add_(-1, local.unsqueeze(-1), (-grad * inside).unsqueeze(-1))
        return logits, result.to(logits.dtype)

    def _ids(self, target: Tensor) -> tuple[range, Tensor, Tensor, Tensor]:
        """This rank's words; of each target its place there, whether it is there, and counts."""
        own = part(self.words, self.comm.size, self.comm.rank)
        local, inside = own_ids(target, own)
        valid = target != self.ignore_index
        return own, local, inside & valid, valid


@dataclass(frozen=True)
class Head:
    """How a chunk becomes losses: a linear, `after` on each of its results, `loss`; in `chunks`."""

    chunks: int
    after: Callable[[Tensor], Tensor]
    loss: TokenLoss


def chunked_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    head: Head,
    shard: Tensor | None = None,
    again: Regathered | None = None,
) -> Tensor:
    """[.., h] activations, [V, h], [V], and targets of as many tokens -> a loss of each target.

    shard, again: of a gathered x the part that is saved, and the promise to gather it again.
    Saves x, the targets and the parameters, and one number per token.
    """
    return _ChunkedLoss.apply(
        x, weight, bias, target, None if shard is None else shard.detach(), head, again
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        shard: Tensor | None,
        head: Head,
        again: Regathered | None,
    ) -> Tensor:
        device = x.device.type
        ctx.head, ctx.again, ctx.shape = head, again, x.shape
        enabled = torch.is_autocast_enabled(device)
        ctx.autocast = (device, torch.get_autocast_dtype(device), enabled)
        targets = target.reshape(-1)
        measured = [
            head.loss.measure(head.after(torch.nn.functional.linear(rows, weight, bias)), some)
            for rows, some in _chunks(head, x.flatten(0, -2), targets)
        ]
        losses, kept = head.loss.combine(torch.cat(measured, -1), targets)
        ctx.save_for_backward(x if shard is None else shard, weight, bias, target, kept)
        return losses.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, weight, bias, target, kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        head: Head = ctx.head
        if ctx.again is not None:
            ctx.again.start(saved)
        grad = head.loss.arrived(grad.reshape(-1))
        rows = (saved if ctx.again is None else ctx.again.whole()).flatten(0, -2)
        d_x = torch.empty_like(rows) if needs_x else None
        d_weight = _accumulator(weight) if needs_weight else None
        d_bias = _accumulator(bias) if bias is not None and needs_bias else None
        start = 0
        for some, *others in _chunks(head, rows, target.reshape(-1), kept, grad):
            with torch.autocast(*ctx.autocast):
                d_out = _pulled(head, some, weight, bias, *others)
            if d_x is not None:
                d_x[start : start + len(some)] = d_out @ weight.to(d_out.dtype)
            if d_weight is not None:
                _add_product(d_weight, d_out, some)
            if d_bias is not None:
                d_bias += d_out.sum(0)
            start += len(some)
        return (
            None if d_x is None else d_x.view(ctx.shape),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _chunks(head: Head, *values: Tensor | None) -> list[tuple[Any, ...]]:
    """Tuples of the same tokens of each value; None has None everywhere."""
    first = values[0]
    assert first is not None
    size = max(1, -(-len(first) // head.chunks))
    number = max(1, -(-len(first) // size))
    parts = [[None] * number if v is None else v.split(size) for v in values]
    return list(zip(*parts, strict=True))


def _pulled(
    head: Head,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    kept: Tensor | None,
    grad: Tensor,
) -> Tensor:
    """The cotangent [n, V] of the linear's result."""
    out = torch.nn.functional.linear(rows, weight, bias)
    with torch.enable_grad():
        out.requires_grad_()
        value, cotangent = head.loss.pull(head.after(out), target, kept, grad)
        (d_out,) = torch.autograd.grad(value, out, cotangent)
    return d_out


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype.itemsize < 4 else logits


def _accumulator(parameter: Tensor) -> Tensor:
    """Sums of many chunks are no narrower than fp32."""
    return torch.zeros_like(parameter, dtype=_wide(parameter[:0]).dtype)


def _add_product(total: Tensor, d_out: Tensor, rows: Tensor) -> None:
    rows = rows.to(d_out.dtype)
    if total.dtype == d_out.dtype:
        total.addmm_(d_out.t(), rows)
    else:
        total += d_out.t() @ rows
