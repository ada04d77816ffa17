"""What the blocks of a module are for the cost model: equal ones are of one kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from seqcomp.cost.parts import Bytes, Cross, Latent, Parameters, Saved
from seqcomp.cost.shape import Block, MaskKind
from seqcomp.layout.masks import Band, Full

if TYPE_CHECKING:
    from torch import nn

    from seqcomp.capture.recognise import AttentionInfo

_PLACES = ("layer_idx", "layer_id", "layer_index")
_NOTHING = Saved(Bytes(0, 0), Bytes(0, 0), Bytes(0, 0))


def kind_of(
    block: nn.Module,
    infos: Sequence[AttentionInfo],
    hidden: int,
    config: Any,
    whole: Collection[str],
    sources: tuple[int, int] = (0, 0),
) -> Block:
    """A block without its number and what it saves: equal for blocks of one kind.

    infos: its attention, and in a decoder beside an encoder the one over that. whole: names of
    parameters that Megatron-SP does not cut, among them. sources: tokens of its sequence and of
    that over which the second goes, where the model makes these itself.
    """
    info = infos[0]
    tables = {f"{n}.weight" for n, part in block.named_modules() if hasattr(part, "num_embeddings")}
    named = dict(block.named_parameters())
    of_experts = {n: p for n, p in named.items() if "experts" in n.split(".") and p.dim() > 1}
    matrix = {n: p for n, p in named.items() if p.dim() > 1 and n not in of_experts}
    matrix = {n: p for n, p in matrix.items() if n not in tables}  # biases of scores
    total = sum(p.numel() for p in named.values())
    routed = sum(p.numel() for p in of_experts.values())
    experts = _setting(config, ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = experts or max((p.shape[0] for p in of_experts.values()), default=0)
    if of_experts:  # the router is whole on every rank, too
        matrix = {n: p for n, p in matrix.items() if tuple(p.shape) != (experts, hidden)}
    biases = sum(p.numel() for n, p in named.items() if p.dim() == 1 and whole and n not in whole)
    latent, into_latent = _latent(config, hidden)
    products = sum(p.numel() for p in matrix.values()) - into_latent
    one = (latent.keys if latent else hidden) * _kv_width(info, latent)
    kv = min(len(infos) * one, products)
    active = _setting(config, ("num_experts_per_tok", "top_k")) or 1
    queries = latent.queries if latent and latent.queries else hidden
    heads = len(infos) * info.heads * (queries * info.head_dim + hidden * info.value_dim)
    shared = own = products - heads - kv
    if of_experts:
        width = _setting(config, ("moe_intermediate_size", "intermediate_size"))
        own = routed // max(experts, 1)
    else:
        width = _setting(config, ("intermediate_size", "n_inner", "ffn_dim", "d_ff"))
        width = width or max((max(p.shape) for p in named.values() if p.dim() == 2), default=0)
    mask, window = _mask(info)
    fused = max(sum(p.numel() for n, p in matrix.items() if n in whole) - into_latent, 0)
    rows = {info.kv_heads * info.head_dim, info.kv_heads * info.value_dim}
    alone = [n for n, p in matrix.items() if n not in whole and rows & set(p.shape)]
    return Block(
        count=0,
        saved=_NOTHING,
        heads=info.heads,
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        value_dim=info.value_dim,
        mask=mask,
        window=window,
        mlp_width=width,
        gated=bool(width) and own > 2.5 * hidden * width,
        experts=experts if of_experts else 0,
        active=active if of_experts else 0,
        token_local=bool(of_experts) and shared <= 0,
        scores=_scores(info),
        tiled=info.pairs is not None or (bool(info.dropout) and info.mask is not None),
        latent=latent,
        cross=Cross(one, sources[1]) if len(infos) > 1 else None,
        source=sources[0],
        parameters=Parameters(
            products + biases,
            kv,
            routed,
            total - products - biases - routed - into_latent,
            into_latent,
            fused=fused,
            fused_kv=0 if len(alone) > 1 else min(kv, fused),
            with_root=bool(tables),
        ),
    )


def _latent(config: Any, hidden: int) -> tuple[Latent | None, int]:
    """Of latent attention its widths, and parameters of what projects into them."""
    keys, rotary = (_setting(config, (n,)) for n in ("kv_lora_rank", "qk_rope_head_dim"))
    if not keys:
        return None, 0
    latent = Latent(_setting(config, ("q_lora_rank",)), keys, rotary)
    return latent, hidden * (latent.queries + keys + rotary)


def _kv_width(info: AttentionInfo, latent: Latent | None) -> int:
    """Elements of a token that the projections to keys and values give."""
    turned = latent.rotary if latent else 0
    return info.kv_heads * (info.head_dim - turned + info.value_dim)


def _scores(info: AttentionInfo) -> int:
    """Softmax keeps its result, tanh too; dropout its factors."""
    return 1 + bool(info.softcap) + bool(info.dropout) if info.written else 0


def _mask(info: AttentionInfo) -> tuple[MaskKind, int]:
    if isinstance(info.mask, Band) and info.mask.low == 0:
        return "window", info.mask.high + 1
    if info.causal:
        return "causal", 0
    known = isinstance(info.mask, Band | Full)
    return ("full" if known else "data"), 0


def _setting(config: Any, names: tuple[str, ...]) -> int:
    return next((v for n in names if isinstance(v := getattr(config, n, None), int)), 0)


def signature_of(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that surely compute alike: classes, parameters, and all that is set on them
    but their place; objects must be the same ones."""
    settings = tuple(
        (name, key, value if isinstance(value, str | int | float | bool) else id(value))
        for name, part in block.named_modules()
        for key, value in sorted(vars(part).items())
        if not key.startswith("_") and key not in _PLACES
    )
    shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    return (tuple(type(part) for part in block.modules()), shapes, settings)
