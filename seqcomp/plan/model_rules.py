"""Rules of a plan against a model: heads, widths, lengths, balance."""

from __future__ import annotations

from collections.abc import Iterator

from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.layout.heads import head_map
from seqcomp.plan.axes import degree, owned_axes
from seqcomp.plan.facts import AttentionFacts, ModelFacts
from seqcomp.plan.legality import (
    divisors,
    head_degrees,
    heads_fit,
    kv_copies,
    kv_heads_fit,
    length_factor,
    nearest_lengths,
)
from seqcomp.plan.schema import Plan

Found = Iterator[Diagnostic]


def check_model(plan: Plan, facts: ModelFacts | None, seq_len: int | None) -> Found:
    """All rules of this file; those about the model need ``facts``."""
    yield from length_fits(plan, facts, seq_len)
    yield from padding_serves(plan)
    yield from length_insisted(plan, seq_len)
    if facts is not None:
        yield from tensor_heads_fit(plan, facts)
        yield from tensor_width_fits(plan, facts)
        yield from ulysses_heads_fit(plan, facts)
        yield from layout_suits(plan, facts, seq_len)
        yield from attention_exists(plan, facts)


def _head_shapes(facts: ModelFacts) -> dict[tuple[int, int], str]:
    """Each distinct (heads, KV heads) -> where it occurs, for messages."""
    places: dict[tuple[int, int], list[str]] = {}
    for item in facts.attentions:
        places.setdefault((item.heads, item.kv_heads), []).append(item.where)
    return {
        shape: paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        for shape, paths in places.items()
    }


def tensor_heads_fit(plan: Plan, facts: ModelFacts) -> Found:
    """SC203, SC204, SC403: attention can be split by heads over the tensor axis."""
    yield from _heads_fit(plan, facts, "megatron_sp", ("SC203", "SC204"), tensor=1)


def ulysses_heads_fit(plan: Plan, facts: ModelFacts) -> Found:
    """SC201, SC202, SC403, SC411: whole heads per rank after the all-to-all, or padded ones."""
    tensor = degree(plan, "megatron_sp")
    yield from _heads_fit(plan, facts, "ulysses", ("SC201", "SC202"), tensor=tensor)


def _heads_fit(
    plan: Plan, facts: ModelFacts, strategy: str, codes: tuple[str, str], *, tensor: int
) -> Found:
    parts = degree(plan, strategy)
    if parts == 1:
        return
    axis = owned_axes(plan)[strategy]
    per = f" per tensor rank (tensor {tensor})" if tensor > 1 else ""
    ulysses = plan.strategies.ulysses if strategy == "ulysses" else None
    for (all_heads, all_kv), place in _head_shapes(facts).items():
        if all_heads % tensor:
            continue  # the tensor rule has said so
        heads, kv = all_heads // tensor, max(all_kv // tensor, 1)
        q_fits, kv_fits = heads_fit(parts, heads), kv_heads_fit(parts, kv)
        legal = head_degrees(heads, kv)
        if q_fits and kv_fits:
            if kv_copies(parts, kv) > 1:
                yield diagnostic(
                    "SC403",
                    where=plan.where("mesh", axis),
                    message=f"{strategy} {parts} exceeds the {kv} KV heads{per} of {place}: "
                    f"each is held by {kv_copies(parts, kv)} ranks",
                    found=parts,
                )
            continue
        if ulysses is not None and ulysses.pad_heads:
            yield _padded(plan, axis, parts, (heads, kv), f"{per} of {place}")
            continue
        count = f"{heads} query heads" if not q_fits else f"{kv} KV heads"
        verb = "does not divide" if not q_fits else "does not fit"
        yield diagnostic(
            codes[0] if not q_fits else codes[1],
            where=plan.where("mesh", axis),
            message=f"{strategy}: the degree {parts} {verb} the {count}{per} of {place} "
            f"({heads} query heads, {kv} KV heads)",
            found=parts,
            legal=legal,
            help=f"set mesh.{axis} to {_one_of(legal)}{_use_ring(plan, strategy)}"
            f"{_use_padding(parts, heads, kv) if ulysses else ''}",
        )


def _padded(
    plan: Plan, axis: str, parts: int, heads_and_kv: tuple[int, int], where: str
) -> Diagnostic:
    """SC411: what heads that the degree does not divide cost."""
    heads, kv = heads_and_kv
    slots = head_map(heads, kv, parts)
    work = len(slots.queries)
    moved, ideal = 2 * (work + len(slots.keys)), 2 * (heads + max(kv, parts))
    return diagnostic(
        "SC411",
        where=plan.where("mesh", axis),
        message=f"ulysses {parts} with pad_heads over the {heads} query heads and {kv} KV heads"
        f"{where}: every rank has {slots.rank_queries} query heads and {slots.rank_keys} KV heads; "
        f"{work - heads} query heads of zeros ({work / heads:.2f} x the work of attention), "
        f"{moved - ideal:+d} heads per token in the exchanges ({moved / ideal:.2f} x the bytes)",
        found=parts,
        legal=head_degrees(heads, kv),
    )


def _use_padding(parts: int, heads: int, kv: int) -> str:
    work = len(head_map(heads, kv, parts).queries) / heads
    return f", or set strategies.ulysses.pad_heads: true ({work:.2f} x the work of attention)"


def _use_ring(plan: Plan, strategy: str) -> str:
    if strategy == "ulysses" and plan.strategies.ring is None:
        return ", and use a ring axis for the rest: it has no limit from heads"
    return ""


def _one_of(values: tuple[int, ...]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def tensor_width_fits(plan: Plan, facts: ModelFacts) -> Found:
    """SC205: the MLP can be split by columns."""
    parts, width = degree(plan, "megatron_sp"), facts.mlp_width
    if width is not None and width % parts:
        legal = tuple(p for p in divisors(width) if p <= 1024)
        axis = owned_axes(plan)["megatron_sp"]
        yield diagnostic(
            "SC205",
            where=plan.where("mesh", axis),
            message=f"megatron_sp: the degree {parts} does not divide the MLP width {width}",
            found=parts,
            legal=legal,
            help=f"set mesh.{axis} to {_one_of(legal)}",
        )


def _lengths(
    plan: Plan, facts: ModelFacts | None, seq_len: int | None
) -> Iterator[tuple[int, str]]:
    """The full lengths to be checked and where each was said."""
    if seq_len is not None:
        yield seq_len, plan.where()
        return
    insisted = False
    for name, spec in plan.inputs.items():
        if spec.length is not None:
            insisted = True
            yield spec.length, plan.where("inputs", name, "length")
    if not insisted and facts is not None and facts.length is not None:
        yield facts.length, plan.where()


def length_fits(plan: Plan, facts: ModelFacts | None, seq_len: int | None) -> Found:
    """SC206: the length can be cut as the layout needs it."""
    ring, ulysses, tensor = (degree(plan, name) for name in ("ring", "ulysses", "megatron_sp"))
    layout = plan.strategies.ring.layout if plan.strategies.ring else "contiguous"
    if plan.padding == "pad" and layout == "auto":
        layout = "zigzag" if facts is not None and facts.all_causal else "contiguous"
    factor = length_factor(layout, ring, ulysses * tensor)
    sizes = f"ring {ring} x ulysses {ulysses} x tensor {tensor}"
    if layout == "zigzag" and ring > 1:
        sizes = f"zigzag: ring {ring} x lcm(2, ulysses {ulysses} x tensor {tensor})"
    for length, where in _lengths(plan, facts, seq_len):
        if length % factor:
            near = nearest_lengths(length, factor)
            if plan.padding == "pad":
                yield diagnostic(
                    "SC412",
                    where=where,
                    message=f"a sequence of {length} tokens is padded to {near[-1]} ({sizes})",
                    found=length,
                    legal=near,
                )
                continue
            inside = facts.made_in if facts is not None and length == facts.length else ""
            message = f"the sequence length {length} is not a multiple of {factor} ({sizes})"
            advice = f"use a length of {_one_of(near)}"
            if inside:
                message = f"{message}: the model makes this sequence of its inputs itself"
                advice = f"use inputs that give {_one_of(near)} tokens (class tokens count)"
            yield diagnostic(
                "SC206",
                where=inside or where,
                message=message,
                found=length,
                legal=near,
                help=f"{advice}, or set padding: pad",
            )


def padding_serves(plan: Plan) -> Found:
    """SC212: what is handed out as shards has no padding in it."""
    for name, mode in plan.outputs.items():
        if plan.padding == "pad" and mode == "sharded":
            yield diagnostic(
                "SC212",
                where=plan.where("outputs", name),
                found="sharded",
                legal=("full", "drop"),
                help="use full or drop, or lengths that divide and padding: none",
            )


def length_insisted(plan: Plan, seq_len: int | None) -> Found:
    """SC503: a length given from outside is the one that the plan insists on."""
    for name, spec in plan.inputs.items():
        if seq_len is not None and spec.length is not None and spec.length != seq_len:
            yield diagnostic(
                "SC503",
                where=plan.where("inputs", name, "length"),
                message=f"the plan insists on length {spec.length} for {name!r}, not {seq_len}",
                found=seq_len,
                legal=spec.length,
                help="use that length, or change it in the plan",
            )


def layout_suits(plan: Plan, facts: ModelFacts, seq_len: int | None) -> Found:
    """SC207, SC208: the layout fits the masks; results are exact either way."""
    ring = degree(plan, "ring")
    if ring == 1 or plan.strategies.ring is None or not facts.attentions:
        return
    layout = plan.strategies.ring.layout
    where = plan.where("strategies", "ring", "layout")
    if layout in ("zigzag", "striped") and not any(_may_be_causal(a) for a in facts.attentions):
        yield diagnostic(
            "SC208",
            where=where,
            found=layout,
            legal=("auto", "contiguous"),
            help="layout: auto chooses by itself",
        )
    if not facts.all_causal:
        return
    factor = length_factor("zigzag", ring, degree(plan, "ulysses") * degree(plan, "megatron_sp"))
    lengths = [length for length, _ in _lengths(plan, facts, seq_len)]
    uneven = [length for length in lengths if length % factor and plan.padding == "none"]
    if layout == "contiguous" or (layout == "auto" and uneven):
        advice = "set layout: auto" if layout == "contiguous" else ""
        if uneven:
            near = _one_of(nearest_lengths(uneven[0], factor))
            advice += f"{' and ' if advice else ''}use a length of {near}"
        yield diagnostic(
            "SC207",
            where=where,
            message=f"contiguous layout under causal attention: the last of {ring} ring ranks "
            f"does about {2 * ring - 1} times the work of the first",
            found=layout,
            legal=("zigzag", "striped"),
            help=advice,
        )


def _may_be_causal(item: AttentionFacts) -> bool:
    """Masks that depend on data may be, as those of packed documents are."""
    return item.causal or item.mask in ("data", "other")


def attention_exists(plan: Plan, facts: ModelFacts) -> Found:
    """SC209: ring and ulysses have something to act on."""
    if not facts.attentions and (plan.strategies.ring or plan.strategies.ulysses):
        yield diagnostic("SC209", where=plan.where("strategies"))
