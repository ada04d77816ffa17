"""What the plan's rules need to know about a model, read from a capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from seqcomp.capture.call import bind_call, classify_inputs, signature_of
from seqcomp.capture.canonical import canonicalise
from seqcomp.capture.edit import op_name
from seqcomp.capture.example import example_call
from seqcomp.capture.export import Capture, exported
from seqcomp.capture.inner import inner_sequence
from seqcomp.capture.recognise import AttentionInfo, recognise_attention
from seqcomp.layout.documents import Documents
from seqcomp.layout.masks import Band, Causal, Full
from seqcomp.plan.facts import AttentionFacts, ModelFacts


def facts_of(
    capture: Capture, attentions: tuple[AttentionInfo, ...], module: torch.nn.Module
) -> ModelFacts:
    """Facts of a captured call."""
    config = getattr(module, "config", None)
    tables = [
        tuple(node.args[0].meta["val"].shape)
        for node in capture.graph.nodes
        if node.op == "call_function" and op_name(node) == "aten.embedding"
    ]
    # One of positions may come first, as that of an encoder of speech does.
    words = [table for table in tables if table[0] == getattr(config, "vocab_size", None)]
    vocab, hidden = next(iter((*words, *tables)), (None, 0))
    length, made_in = (inner_sequence(capture) if capture.length is None else None) or (None, "")
    return ModelFacts(
        attentions=tuple(
            AttentionFacts(
                where=a.where,
                heads=a.heads,
                kv_heads=a.kv_heads,
                head_dim=a.head_dim,
                causal=a.causal,
                mask=mask_name(a),
            )
            for a in attentions
        ),
        hidden=hidden or getattr(config, "hidden_size", 0),
        mlp_width=getattr(config, "intermediate_size", None),
        layers=len({a.where for a in attentions}),
        vocab=None if made_in else vocab,  # of such models embeddings are tables of positions
        length=length,
        made_in=made_in,
    )


def mask_name(info: AttentionInfo) -> str:
    """'full', 'causal', 'window', 'documents', 'data' or 'other'."""
    if info.mask == Full():
        return "full"
    if info.pairs is not None:
        return "data"
    if isinstance(info.mask, Band | Documents):
        return "window" if isinstance(info.mask, Band) else "documents"
    return "causal" if isinstance(info.mask, Causal) else "other"


def model_facts(module: torch.nn.Module, example: Mapping[str, Any] | None = None) -> ModelFacts:
    """Facts of a module from one capture on fake tensors; arguments as of `attentions_of`."""
    return facts_of(*attentions_of(module, example), module)


def attentions_of(
    module: torch.nn.Module, example: Mapping[str, Any] | None = None
) -> tuple[Capture, tuple[AttentionInfo, ...]]:
    """A capture of a module and its attentions, in the order of the forward.

    `example` are keyword arguments of a call (fake or real tensors). Without them a call is made
    up (`example_call`). Raises PlanError: SC309 where no call can be made up,
    SC301 where the model cannot be captured.
    """
    signature = signature_of(module.forward)
    kwargs = dict(example) if example is not None else example_call(module)
    call = bind_call(
        signature, (), kwargs, where=type(module).__name__, stateless=makes_cache(module)
    )
    dims = classify_inputs(call, lambda name: None)
    with (
        torch.no_grad(),
        exported(module, call, dims, data_degree=1, where=type(module).__name__) as capture,
    ):
        canonicalise(capture)
        return capture, recognise_attention(capture, module)


def makes_cache(module: torch.nn.Module, forward: Callable[..., Any] | None = None) -> bool:
    """Whether the model would make a KV cache by its own default (transformers).

    forward: the module's own, where it has been replaced.
    """
    takes = "use_cache" in signature_of(forward or module.forward).parameters
    return takes or bool(getattr(getattr(module, "config", None), "use_cache", False))
