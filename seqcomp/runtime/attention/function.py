"""The whole sequence-parallel attention as one autograd node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqcomp.layout.heads import head_map
from seqcomp.layout.masks import Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.runtime.attention import kernels, lse_gradient, ring, ulysses
from seqcomp.runtime.attention import sinks as sink
from seqcomp.runtime.attention.heads import of_heads
from seqcomp.runtime.attention.pair_dropout import PairDropout, RingDropout
from seqcomp.runtime.attention.tiling import StaticTiling, Tiling
from seqcomp.runtime.comm import Communicator
from seqcomp.runtime.recompute import Keep, keep_nothing

Transport = Literal["p2p", "allgather"]


@dataclass(frozen=True)
class AttentionPlan:
    """How one attention runs. ``scale`` None is 1/sqrt(d).

    ``layout.ring`` must be the ring's size; its inner degree does not matter here, because the
    tokens of a ring rank do not depend on it. ``mask`` None: the call brings its own tiling.
    ``lse``: the log-sum-exp is one more column of the result, which is in accumulator dtype.
    """

    mask: Mask | None
    layout: SequenceLayout
    transport: Transport = "p2p"
    scale: float | None = None
    softcap: float = 0.0
    lse: bool = False


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    tiling: Tiling | None = None,
    sinks: Tensor | None = None,
    *,
    dropout: PairDropout | None = None,
    ring: Communicator | None = None,
    ulysses: Communicator | None = None,
    length: int | None = None,
    label: str = "",
    keep: Keep = keep_nothing,
) -> Tensor:
    """[B, Hq, s, d] queries, [B, Hkv, s, d] keys and values of this rank -> [B, Hq, s, dv], or
    [B, Hq, s, dv + 1] with the log-sum-exp where the plan says so.

    tiling: of a mask that depends on data; shared by the attentions of one forward. What its
    inputs learn from this rank's queries flows back into them.
    sinks: [Hq] logits of the heads of q, appended to every softmax.
    dropout: of the probabilities; computed in plain tensor operations.
    length: of the whole sequence, whose last tokens are padding that no query sees; None for none.
    keep: of what is exchanged and computed, where the forward may run again.
    s is the local length, S / (ring * ulysses); the output has the dtype of q, gradients those
    of their inputs. Hkv divides Hq; heads that the Ulysses degree does not divide are padded with
    zeros on the way (layout/heads.py). Every rank of both groups takes part, in forward and in
    backward. Under autocast the inputs are cast as scaled_dot_product_attention casts them;
    otherwise TypeError where their dtypes differ. Saves 1/P of the sequence: q, k, v, the output
    and its log-sum-exp.
    """
    q, k, v = _same_dtype(q, k, v)
    ring = ring if ring is not None and ring.size > 1 else None
    ulysses = ulysses if ulysses is not None and ulysses.size > 1 else None
    assert plan.layout.ring == (ring.size if ring else 1), f"{plan.layout} in a ring of {ring}"
    assert k.shape[:3] == v.shape[:3], f"k {list(k.shape)}, v {list(v.shape)}"
    assert k.shape[2] == q.shape[2], f"{q.shape[2]} queries, {k.shape[2]} keys"
    assert q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads, {k.shape[1]} KV heads"
    assert sinks is None or not plan.lse, "sinks have a log-sum-exp of their own"
    if tiling is None:
        assert plan.mask is not None, "neither a mask nor a tiling"
        dealt = q.shape[2] * (ulysses.size if ulysses else 1) * plan.layout.ring
        tiling = StaticTiling(plan.mask, plan.layout, dealt, q.device, length, q.dtype)
    drop = None
    if dropout is not None:
        dealt = q.shape[2] * (ulysses.size if ulysses else 1) * plan.layout.ring
        drop = RingDropout(dropout, plan.layout, dealt)
    return _Attention.apply(
        q, k, v, sinks, plan, tiling, drop, ring, ulysses, label, keep, *tiling.trained
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: AttentionPlan,
        tiling: Tiling,
        dropout: RingDropout | None,
        ring_comm: Communicator | None,
        heads_comm: Communicator | None,
        label: str,
        keep: Keep,
        *trained: Tensor,
    ) -> Tensor:
        degree, rank = (1, 0) if heads_comm is None else (heads_comm.size, heads_comm.rank)
        heads = head_map(q.shape[1], k.shape[1], degree)
        ctx.slots = (heads.queries, heads.keys, heads.keys)
        ctx.heads_comm = heads_comm
        ctx.label = label
        if heads_comm is not None:
            comm, given = heads_comm, (q, k, v)
            q, k, v = keep(lambda: ulysses.to_heads(given, ctx.slots, comm, label=label))
        q, k, v = (_dense(x) for x in (q, k, v))
        extra = lse_gradient.COLUMNS if plan.lse else 0
        fastest, masked = (
            kernels.kernel(
                "math"
                if plan.softcap or tiling.modifies or dropout is not None
                else choose(q.device, q.dtype, q.shape[3] + extra, v.shape[3] + extra),
                group=heads.chunk,
                softcap=plan.softcap,
            )
            for choose in (kernels.choose, kernels.choose_masked)
        )
        ctx.ring = ring.Ring(
            comm=ring_comm,
            tiling=tiling,
            gathered=plan.transport == "allgather",
            kernel=fastest,
            masked=masked,
            heads=heads.heads_of(rank),
            uses=heads.uses_of(rank),
            scale=q.shape[3] ** -0.5 if plan.scale is None else plan.scale,
            softcap=plan.softcap,
            label=label,
            travel=tiling.travel() if ring_comm is not None else None,
            dropout=dropout,
        )

        def computed() -> tuple[Tensor, Tensor]:
            out, lse = ring.forward(ctx.ring, q, k, v)
            if sinks is not None:
                out, lse = sink.apply(out, lse, of_heads(sinks, ctx.ring.heads, 0))
            return out if plan.lse else out.to(q.dtype), lse

        out, lse = keep(computed)
        result = torch.cat((out, lse.unsqueeze(-1)), -1) if plan.lse else out
        ctx.with_lse = plan.lse
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse, sinks)
        if heads_comm is None:
            return result
        (result,) = keep(lambda: ulysses.to_tokens((result,), ctx.slots[:1], comm, label=label))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        comm: Communicator | None = ctx.heads_comm
        if comm is not None:
            slots = ctx.slots[:1]
            dout = ulysses.to_heads((dout,), slots, comm, phase="backward", label=ctx.label)[0]
        if ctx.with_lse:
            dout, out = lse_gradient.columns(dout, out)
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        grads, trained = ring.backward(ctx.ring, dout, q, k, v, out, lse)
        dq, dk, dv = (grad.to(q.dtype) for grad in grads)
        d_sinks = None
        if sinks is not None:
            d_sinks = sink.gradient(dout, out, lse, sinks, ctx.ring.heads)
        if comm is not None:
            dq, dk, dv = ulysses.to_tokens(
                (dq, dk, dv), ctx.slots, comm, phase="backward", label=ctx.label
            )
        return dq, dk, dv, d_sinks, None, None, None, None, None, None, None, *trained


def _same_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"attention needs one dtype, found q {q.dtype}, k {k.dtype}, v {v.dtype}; "
            "cast them, or run under torch.autocast"
        )
    return q, k, v


def _dense(x: Tensor) -> Tensor:
    # Kernels read rows of d adjacent numbers, and some misread other strides silently.
    return x if x.stride(-1) == 1 else x.contiguous()
