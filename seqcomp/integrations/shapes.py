"""``ModelShape`` of a real module, or by name; torch is imported for modules alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from seqcomp.cost.named import load_shape
from seqcomp.cost.parts import Bytes, Latent, Parameters, Saved
from seqcomp.cost.shape import Apart, Block, MaskKind, ModelShape
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.layout.masks import Band
from seqcomp.plan.facts import ModelFacts

if TYPE_CHECKING:
    from torch import nn

    from seqcomp.capture.recognise import AttentionInfo

_KINDS = ("hf", "titan", "python")
_RANKS, _TOKENS = 2, 64  # of a rank, in the calls whose saved bytes are counted


def read_shape(model: str) -> ModelShape:
    """A known shape by name, or the shape of the model that a spec names.

    Raises:
        PlanError: SC020 for what is neither, and whatever `model_shape` raises.
    """
    return model_shape(model) if model.partition(":")[0] in _KINDS else load_shape(model)


def model_shape(model: nn.Module | str) -> ModelShape:
    """The shape of a module or of the one that a spec names, from captures on fake tensors.

    Parameters are counted, heads and masks are those of a capture of the whole (of one block, where
    all are equal and are called alike), and what autograd keeps is counted on the lowered graph of
    one block of each kind, in bf16 and in fp32 (of experts that run untraced by formula). Masks
    that depend on data count as full. The module stays as it is.

    Raises:
        PlanError: SC020, SC021 for specs, SC301, SC309 where it cannot be captured, SC022 where it
            is not one list of blocks with one attention each.
    """
    from seqcomp.capture.alike import called_alike
    from seqcomp.capture.blocks import blocks_of
    from seqcomp.capture.example import example_call
    from seqcomp.capture.facts import attentions_of, facts_of
    from seqcomp.integrations.cut_weights import cut_weights, key_norms
    from seqcomp.integrations.models import build_model

    module = build_model(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) else type(model).__name__
    paths = blocks_of(module)
    lists = {path.rpartition(".")[0] for path in paths}
    alike = (
        len(lists) == 1
        and len({_signature(module.get_submodule(p)) for p in paths}) == 1
        and called_alike(module, paths, example_call(module))
    )
    with _alone(module, paths[0]) if alike else nullcontext():
        capture, infos = attentions_of(module)
        facts = facts_of(capture, infos, module)
        normed = key_norms(capture)
        cut = cut_weights(capture, infos, paths)
    inside = {
        path: infos[:1] if alike else [i for i in infos if f"{i.where}.".startswith(f"{path}.")]
        for path in paths
    }
    if len(lists) != 1 or any(len(found) != 1 for found in inside.values()):
        raise PlanError(
            diagnostic(
                "SC022",
                where=name,
                message="the model is not one list of blocks with one attention each",
                found=f"{len(paths)} blocks in {len(lists)} lists, {len(infos)} attentions",
                legal="a decoder or an encoder, of tokens or of images",
                help="seqcomp explain says what such a model sends and holds under a plan; of an "
                "encoder-decoder the longer part can be priced alone (an encoder class, such as "
                "T5EncoderModel), or give estimate a ModelShape of its own",
            )
        )
    groups: dict[Block, list[str]] = {}
    config = getattr(module, "config", None)
    sizes = _Sizes.of(module, paths, facts)
    for path in paths:
        at = f"{paths[0] if alike else path}."
        own = {name.removeprefix(at) for name in cut.whole if name.startswith(at)}
        kind = _kind(module.get_submodule(path), inside[path][0], sizes.hidden, config, own)
        kind = replace(
            kind,
            ends_in_norm=cut.ends_in_norm(at[:-1]),
            key_norm=normed.get(inside[path][0].where),
        )
        groups.setdefault(kind, []).append(path)
    blocks, ends = [], Bytes(0, 0)
    for kind, members in groups.items():
        saved, ends = _saved(module, members[0], kind, sizes.hidden, facts.length)
        blocks.append(replace(kind, count=len(members), saved=saved))
    return ModelShape(
        name=name,
        hidden=sizes.hidden,
        vocab=sizes.vocab if _has_head(module) else 0,
        blocks=tuple(blocks),
        embedding=sizes.embedding,
        head=sizes.head,
        other=sizes.other,
        ends=_without_logits(ends, sizes.vocab) if _has_head(module) else ends,
        tied=sizes.head == 0 and _has_head(module),
        apart=tuple(_apart(module, paths, sizes)),
        by_tokens=() if any(b.latent for b in blocks) else cut.by_tokens,
    )


_PLACES = ("layer_idx", "layer_id", "layer_index")
_NOTHING = Saved(Bytes(0, 0), Bytes(0, 0), Bytes(0, 0))
_LOGITS = 4.0  # bytes that a cross-entropy in fp32 keeps of each logit


def _has_head(module: nn.Module) -> bool:
    """Whether it gives logits: models of transformers say so, others are taken to."""
    head = getattr(module, "get_output_embeddings", None)
    return not callable(head) or head() is not None


def _without_logits(ends: Bytes, vocab: int) -> Bytes:
    """Logits and what the loss keeps of them are counted apart."""
    own = _LOGITS * vocab
    return Bytes(ends.fixed - own, ends.elements) if ends.fixed >= own else ends


# --- parameters and heads --------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """Of what is outside of the blocks."""

    hidden: int
    vocab: int
    embedding: int
    head: int
    other: int

    @classmethod
    def of(cls, module: nn.Module, paths: Sequence[str], facts: ModelFacts) -> _Sizes:
        from seqcomp.integrations.vocabulary import Vocabulary

        inside = {id(p) for path in paths for p in module.get_submodule(path).parameters()}
        rest = [p for p in module.parameters() if id(p) not in inside]
        hidden, vocab = facts.hidden, facts.vocab or 0
        embedding, head = Vocabulary.of(module, vocab, hidden).among(iter(rest))
        other = sum(p.numel() for p in rest) - embedding - head
        return cls(hidden=hidden, vocab=vocab, embedding=embedding, head=head, other=other)


def _apart(module: nn.Module, paths: Sequence[str], sizes: _Sizes) -> Iterator[Apart]:
    """Large embeddings and linears outside of the blocks."""
    from torch import nn

    from seqcomp.integrations.vocabulary import Vocabulary
    from seqcomp.lowering.fsdp_units import candidates

    vocabulary = Vocabulary.of(module, sizes.vocab, sizes.hidden)
    for path in candidates(module):
        if path in paths:
            continue
        part = module.get_submodule(path)
        words = sum(vocabulary.among(part.parameters()))
        other = sum(p.numel() for p in part.parameters()) - words
        yield Apart(words, other, first=isinstance(part, nn.Embedding))


def _kind(
    block: nn.Module, info: AttentionInfo, hidden: int, config: Any, whole: Collection[str]
) -> Block:
    """A block without its number and what it saves: equal for blocks of one kind.

    whole: names of parameters that Megatron-SP does not cut, among them.
    """
    named = dict(block.named_parameters())
    of_experts = {n: p for n, p in named.items() if "experts" in n.split(".") and p.dim() > 1}
    matrix = {n: p for n, p in named.items() if p.dim() > 1 and n not in of_experts}
    total = sum(p.numel() for p in named.values())
    routed = sum(p.numel() for p in of_experts.values())
    experts = _setting(config, ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = experts or max((p.shape[0] for p in of_experts.values()), default=0)
    if of_experts:  # the router is whole on every rank, too
        matrix = {n: p for n, p in matrix.items() if tuple(p.shape) != (experts, hidden)}
    biases = sum(p.numel() for n, p in named.items() if p.dim() == 1 and whole and n not in whole)
    latent, into_latent = _latent(config, hidden)
    products = sum(p.numel() for p in matrix.values()) - into_latent
    kv = min((latent.keys if latent else hidden) * _kv_width(info, latent), products)
    active = _setting(config, ("num_experts_per_tok", "top_k")) or 1
    queries = latent.queries if latent and latent.queries else hidden
    heads = info.heads * (queries * info.head_dim + hidden * info.value_dim)
    shared = own = products - heads - kv
    if of_experts:
        width = _setting(config, ("moe_intermediate_size", "intermediate_size"))
        own = routed // max(experts, 1)
    else:
        width = _setting(config, ("intermediate_size", "n_inner", "ffn_dim"))
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
        latent=latent,
        parameters=Parameters(
            products + biases,
            kv,
            routed,
            total - products - biases - routed - into_latent,
            into_latent,
            fused=fused,
            fused_kv=0 if len(alone) > 1 else min(kv, fused),
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
    return ("causal", 0) if info.causal else ("full", 0)


def _setting(config: Any, names: tuple[str, ...]) -> int:
    return next((v for n in names if isinstance(v := getattr(config, n, None), int)), 0)


def _signature(block: nn.Module) -> tuple[Any, ...]:
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


# --- what autograd keeps ---------------------------------------------------------------------


def _saved(
    module: nn.Module, path: str, kind: Block, hidden: int, length: int | None
) -> tuple[Saved, Bytes]:
    """Of one block, which keeps its input where all of it runs again, and of all outside.

    length: of the sequence, where the model makes it itself.
    """
    length = length or _RANKS * _TOKENS
    with _alone(module, path):
        wide = _counted(module, "fp32", length)
        try:
            narrow = _counted(module, "bf16", length)
        except PlanError:
            # Experts of transformers cannot be imitated in bf16 everywhere; halves are near.
            narrow = {name: value / 2 for name, value in wide.items()}

    def affine(name: str) -> Bytes:
        elements = (wide[name] - narrow[name]) / 2
        return Bytes(2 * narrow[name] - wide[name], elements)

    none = affine("none")
    if wide["untraced"]:
        # Of each expert that a token visits: its input and output, gate, activation, up, product.
        routed = kind.active * (2 * hidden + 4 * kind.mlp_width)
        none = Bytes(none.fixed, none.elements + routed)
    return Saved(none, affine("selective"), Bytes(0, hidden)), affine("outside")


def _counted(module: nn.Module, dtype: str, length: int) -> Mapping[str, float]:
    """Bytes a token of a module of one block, in one dtype.

    On a rank of a ring, whose attention keeps no scores however the model writes it.
    """
    from seqcomp.integrations.explain import explain

    plan = {
        "mesh": {"ring": _RANKS},
        "strategies": {"ring": {}},
        "memory": {"checkpoint": "selective"},
        "padding": "pad",
    }
    report = explain(module, plan, seq_len=length, dtype=dtype)
    tokens = -(-length // _RANKS)
    (row,) = [r for r in report.memory if r.what.startswith("checkpoint")]
    total = next(r.bytes for r in report.footprint if r.what == "saved activations")
    return {
        "none": row.bytes_without / tokens,
        "selective": row.bytes_kept / tokens,
        "outside": (total - row.bytes_kept) / tokens,
        "untraced": float(row.at_least),
    }


@contextmanager
def _alone(module: nn.Module, path: str) -> Iterator[None]:
    """The module with one of its blocks for all of them."""
    container, _, key = path.rpartition(".")
    holder = module.get_submodule(container)
    before = dict(holder._modules)
    first = next(iter(before))
    holder._modules.clear()
    holder._modules[first if first.isdigit() else key] = before[key]
    try:
        yield
    finally:
        holder._modules.clear()
        holder._modules.update(before)
