"""``ModelShape`` of a real module, or by name; torch is imported for modules alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from seqcomp.cost.named import load_shape
from seqcomp.cost.parts import Bytes
from seqcomp.cost.shape import Apart, Block, ModelShape
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.plan.facts import ModelFacts

if TYPE_CHECKING:
    from torch import nn

    from seqcomp.capture.recognise import AttentionInfo
    from seqcomp.integrations.block_memory import Memory


_KINDS = ("hf", "titan", "python")


def read_shape(model: str) -> ModelShape:
    """A known shape by name, or the shape of the model that a spec names.

    Raises:
        PlanError: SC020 for what is neither, and whatever `model_shape` raises.
    """
    return model_shape(model) if model.partition(":")[0] in _KINDS else load_shape(model)


def model_shape(model: nn.Module | str) -> ModelShape:
    """The shape of a module or of the one that a spec names, from captures on fake tensors.

    Parameters are counted, heads and masks are those of a capture of the whole (of one block of
    each list, where all are equal and are called alike), and what autograd keeps is counted on the
    lowered graph of one block of each kind, in bf16 and in fp32. Masks that depend on data count as
    full. An encoder beside a decoder has as many tokens as that, where the model does not make them
    itself. The module stays as it is.

    Raises:
        PlanError: SC020, SC021 for specs, SC301, SC309 where it cannot be captured, SC022 where it
            is neither a list of blocks with one attention each nor an encoder and its decoder.
    """
    from seqcomp.capture.alike import called_alike
    from seqcomp.capture.blocks import blocks_of
    from seqcomp.capture.example import example_call
    from seqcomp.capture.facts import attentions_of, facts_of
    from seqcomp.integrations.block_kinds import kind_of, signature_of
    from seqcomp.integrations.block_memory import blocks_alone, with_memory
    from seqcomp.integrations.cut_weights import cut_weights, key_norms
    from seqcomp.integrations.models import build_model
    from seqcomp.integrations.parts_of import parts_of

    module = build_model(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) else type(model).__name__
    paths = blocks_of(module)
    lists: dict[str, list[str]] = {}
    for path in paths:
        lists.setdefault(path.rpartition(".")[0], []).append(path)
    call = example_call(module)
    alike = 0 < len(lists) <= 2 and all(
        len({signature_of(module.get_submodule(p)) for p in own}) == 1
        and called_alike(module, own, call)
        for own in lists.values()
    )
    stands = {path: own[0] if alike else path for own in lists.values() for path in own}
    firsts = tuple(own[0] for own in lists.values())
    with blocks_alone(module, firsts) if alike else nullcontext():
        capture, infos = attentions_of(module)
        facts = facts_of(capture, infos, module)
        normed = key_norms(capture)
        parts = parts_of(capture, list(lists.values()), stands)
        cut = cut_weights(capture, infos, paths)
    if parts is None:
        raise PlanError(_refused(name, len(paths), len(lists), len(infos)))
    alone = set(cut.by_tokens)
    groups: dict[Block, list[str]] = {}
    config = getattr(module, "config", None)
    sizes = _Sizes.of(module, paths, facts)
    for path in paths:
        part, at = parts[stands[path]], f"{stands[path]}."
        own = {name.removeprefix(at) for name in cut.whole if name.startswith(at)}
        block = module.get_submodule(path)
        kind = kind_of(block, part.infos, sizes.hidden, config, own, part.sources)
        linears = _linears(module, part.infos)
        by_tokens = kind.latent is None and bool(linears) and linears <= set(cut.by_tokens)
        alone -= linears if by_tokens or kind.latent else set()
        kind = replace(
            kind,
            by_tokens=by_tokens,
            ends_in_norm=cut.ends_in_norm(at[:-1]),
            starts_in_product=at[:-1] in cut.bare,
            key_norm=None if by_tokens else normed.get(part.infos[0].where),
        )
        groups.setdefault(kind, []).append(path)
    kept = with_memory(module, groups, sizes.hidden, facts.length)
    blocks = tuple(
        replace(block, count=len(own))
        for block, own in zip(kept.kinds, groups.values(), strict=True)
    )
    shared = any(b.cross is not None and not b.cross.source for b in blocks)
    return ModelShape(
        name=name,
        hidden=sizes.hidden,
        vocab=sizes.vocab if _has_head(module) else 0,
        blocks=blocks,
        embedding=sizes.embedding,
        head=sizes.head,
        other=sizes.other,
        ends=_without_logits(kept, sizes.vocab) if _has_head(module) else kept.ends,
        tied=sizes.head == 0 and _has_head(module),
        apart=tuple(_apart(module, paths, sizes)),
        by_tokens=() if any(b.latent for b in blocks) else tuple(sorted(alone)),
        frozen=sizes.frozen,
        wide_loss=kept.wide_loss,
        shared=kept.shared,
        tables=kept.tables,
        sequences=2 if shared else 1,
        whole_ends=kept.whole_ends,
    )


def _linears(module: nn.Module, infos: Sequence[AttentionInfo]) -> set[str]:
    """Paths of all linears of these attentions."""
    from torch import nn

    return {
        f"{info.where}.{name}"
        for info in infos
        for name, part in module.get_submodule(info.where).named_modules()
        if name and isinstance(part, nn.Linear)
    }


def _refused(name: str, blocks: int, lists: int, attentions: int) -> Diagnostic:
    return diagnostic(
        "SC022",
        where=name,
        message="the model is not one list of blocks with one attention each, nor an encoder and a "
        "decoder whose blocks have a second one over it",
        found=f"{blocks} blocks in {lists} lists, {attentions} attentions",
        legal="a decoder, an encoder, or both; of tokens, of images or of speech",
        help="seqcomp explain says what such a model sends and holds under a plan; a part can be "
        "priced alone (a class for it), or give estimate a ModelShape of its own",
    )


_LOGITS = 4.0  # bytes that a cross-entropy in fp32 keeps of each logit


def _has_head(module: nn.Module) -> bool:
    """Whether it gives logits: models of transformers say so, others are taken to."""
    head = getattr(module, "get_output_embeddings", None)
    return not callable(head) or head() is not None


def _without_logits(kept: Memory, vocab: int) -> Bytes:
    """Logits and what the loss keeps of them are counted apart."""
    ends, own = kept.ends, _LOGITS * vocab
    if not kept.wide_loss:
        return Bytes(ends.fixed, max(ends.elements - vocab, 0))
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
    frozen: int

    @classmethod
    def of(cls, module: nn.Module, paths: Sequence[str], facts: ModelFacts) -> _Sizes:
        from seqcomp.integrations.vocabulary import Vocabulary

        inside = {id(p) for path in paths for p in module.get_submodule(path).parameters()}
        rest = [p for p in module.parameters() if id(p) not in inside]
        hidden, vocab = facts.hidden, facts.vocab or 0
        embedding, head = Vocabulary.of(module, vocab, hidden).among(iter(rest))
        other = sum(p.numel() for p in rest) - embedding - head
        frozen = sum(p.numel() for p in rest if not p.requires_grad)
        return cls(hidden, vocab, embedding, head, other, frozen=min(frozen, other))


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
