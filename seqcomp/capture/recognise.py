"""Finds every attention of a capture and what it is: heads, KV heads, mask, scale.

`aten.scaled_dot_product_attention`, and attention that is written out (eager.py), becomes a call
of `attention` with the KV heads as they are stored (a repetition for grouped queries is undone:
otherwise K/V would travel Hq/Hkv times too heavy); its mask is a description in
`node.meta["attention"]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from seqcomp.capture.dropout import refuse_unread_attention
from seqcomp.capture.eager import Written, find_eager
from seqcomp.capture.edit import argument, module_path, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.flex import find_flex
from seqcomp.capture.masks import MaskReader
from seqcomp.capture.pair_masks import PairReader, PairReading
from seqcomp.capture.repeats import repeated
from seqcomp.layout.masks import Causal, Full, Mask
from seqcomp.runtime.attention.pair_dropout import PairDropout

aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionInfo:
    """One attention: q [B, heads, Sq, head_dim], k and v [B, kv_heads, Skv, ...].

    `mask` is a rule on positions; None where it is not one: then `pairs` is a program on pairs
    with its inputs, and None too where there is none: `mask_found` says what stands there.
    """

    where: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    mask: Mask | None
    scale: float
    mask_found: str = ""
    pairs: PairReading | None = None
    softcap: float = 0.0
    dtype: torch.dtype | None = None  # of the softmax, where the model fixes it
    lse: bool = False  # the log-sum-exp is one more column of the result
    dropout: float = 0.0
    sinks: bool = False

    @property
    def written(self) -> bool:
        """Whether `attention` writes its scores down: no fused kernel does what it asks for."""
        return bool(self.softcap or self.sinks or self.lse or self.dropout)

    @property
    def causal(self) -> bool:
        return isinstance(self.mask, Causal)

    @property
    def modified(self) -> bool:
        """Whether scores become others element by element, in a form that has no name."""
        return self.pairs is not None and self.pairs.mask.mod is not None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: bool = False,
    parts: Sequence[Tensor] = (),
    dropout: Tensor | PairDropout | None = None,
    number: int = 0,
    p: float = 0.0,
) -> Tensor:
    """The operation that attention nodes stand for, on one device. Score mods run on tiles only;
    `parts` are what their descriptions are made of. dropout: the keys of the call, of which this
    attention's is the `number`-th, or what is known on a rank that has a part of the queries."""
    if not softcap and sinks is None and not lse and dropout is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~ones.tril(), float("-inf"))
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if hidden else scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    if dropout is None:
        out = scores.softmax(-1)[..., : k.shape[2]] @ v
    else:
        if not isinstance(dropout, PairDropout):
            sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
            dropout = PairDropout.whole(dropout[number], p, sizes)
        # Like the fused ones: a query that sees nothing gets zeros.
        nothing = scores.isneginf().all(-1, keepdim=True)
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        factors = dropout.all_keys().factors(slice(None), weights.dtype)
        out = (weights[..., : k.shape[2]] * factors) @ v
    return torch.cat((out, scores.logsumexp(-1, keepdim=True)), -1) if lse else out


def recognise_attention(capture: Capture, module: torch.nn.Module) -> tuple[AttentionInfo, ...]:
    """Rewrites the attentions of a capture in place and returns them in order."""
    state = dict(module.named_buffers(remove_duplicate=False))

    def constant(node: Node) -> Tensor | None:
        name = capture.state.get(node.name)
        if name in state and not state[name].is_inference():
            capture.read.add(name)
        return state.get(name, capture.constants.get(name)) if name else None

    reader = MaskReader(capture, constant)
    pairs = PairReader(capture, reader)
    written = [*_fused(capture), *find_flex(capture), *find_eager(capture)]
    order = {node: i for i, node in enumerate(capture.graph.nodes)}
    found = [
        _rewrite(capture, reader, pairs, item)
        for item in sorted(written, key=lambda w: order[w.out])
    ]
    capture.graph.eliminate_dead_code()
    refuse_unread_attention(capture)
    return tuple(found)


def _fused(capture: Capture) -> list[Written]:
    """Calls of scaled_dot_product_attention."""
    return [
        Written(
            out=node,
            q=node.args[0],
            k=node.args[1],
            v=node.args[2],
            scale=argument(node, 6, "scale"),
            mask=argument(node, 3, "attn_mask"),
            causal=bool(argument(node, 5, "is_causal", False)),
            dropped=node.meta.get("dropped"),
        )
        for node in capture.graph.nodes
        if node.op == "call_function"
        and op_name(node) == "aten.scaled_dot_product_attention"
        and node.args[0].meta["val"].ndim == 4
    ]


def _rewrite(
    capture: Capture, reader: MaskReader, pairs: PairReader, written: Written
) -> AttentionInfo:
    node, q, k, v = written.out, written.q, written.k, written.v
    mask_node, causal = written.mask, written.causal
    key_source, value_source = _ungrouped(capture, k), _ungrouped(capture, v)
    if key_source is not None and value_source is not None:
        k, v = key_source, value_source
    head_dim = int(q.meta["val"].shape[-1])
    scale = float(written.scale) if written.scale is not None else 1.0 / math.sqrt(head_dim)
    mask, found = _read_mask(reader, mask_node, causal, capture, q, k)
    reading = None
    if written.mod is not None:
        mask, found = None, "a FlexAttention score_mod"
    if mask is None and not causal:
        rows, columns = capture.shape(q)[2], capture.shape(k)[2]
        reading = pairs.read(
            mask_node,
            rows,
            columns,
            written.mod,
            filled=written.filled,
            sinks=written.sinks is not None,
        )
    info = AttentionInfo(
        where=module_path(node) or "<root>",
        heads=int(q.meta["val"].shape[1]),
        kv_heads=int(k.meta["val"].shape[1]),
        head_dim=head_dim,
        value_dim=int(v.meta["val"].shape[-1]),
        mask=mask,
        scale=scale,
        mask_found=found,
        pairs=reading,
        softcap=written.softcap,
        dtype=written.dtype,
        lse=written.lse,
        dropout=written.dropped.p if written.dropped else 0.0,
        sinks=written.sinks is not None,
    )
    keep_mask = mask_node if mask is None or _needs_operand(mask) else None
    # What a description is made of that is not behind the mask: sizes, and all parts of a mod.
    parts = []
    if reading is not None:
        keep_mask = None if written.mod is not None else keep_mask
        parts = [item.node for item in reading.inputs if written.mod or not item.node.users]
    args = (
        q, k, v, keep_mask, mask == Causal(0), scale, written.softcap, written.sinks, written.lse,
        parts,
    )  # fmt: skip
    if written.dropped is not None:
        keys = next(n for n in capture.graph.nodes if n.name == capture.dropout_keys)
        args = (*args, keys, written.dropped.number, written.dropped.p)
    with capture.graph.inserting_before(node):
        new = capture.graph.call_function(attention, args)
    new.meta.update(node.meta)
    new.meta["attention"] = info
    node.replace_all_uses_with(new)
    capture.graph.erase_node(node)
    return info


def _needs_operand(mask: Mask) -> bool:
    """Masks that the single-device form cannot express without a mask tensor."""
    return mask not in (Full(), Causal(0))


def _read_mask(
    reader: MaskReader, mask_node: Any, causal: bool, capture: Capture, q: Node, k: Node
) -> tuple[Mask | None, str]:
    if mask_node is None:
        return (Causal(0) if causal else Full()), ""
    mask = reader.read(mask_node)
    if mask is None:
        return None, f"a mask made by {op_name(mask_node)} ({mask_node.name})"
    if causal:
        return None, "attn_mask together with is_causal=True"
    return mask, ""


def _ungrouped(capture: Capture, node: Node) -> Node | None:
    """The KV tensor [B, Hkv, S, d] behind a repetition to [B, Hq, S, d], if there is one."""
    found = repeated(capture, node)
    return found.source if found is not None and found.dim == 1 else None
