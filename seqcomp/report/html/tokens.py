"""The mesh, and which rank holds which tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seqcomp.report.html.markup import Markup, el, joined, plural
from seqcomp.report.tokens import Place, Tokens

MOST_PLACES = 64
"""Above this the ranks of one ring rank share a line."""
HUES = 8


def tokens_section(tokens: Tokens, mesh: dict[str, int], length: int | None) -> Markup:
    axes = el(
        "ol",
        *(
            el("li", el("b", axis), " ", el("span", str(mesh[axis]), class_="degree"), " ", role)
            for axis, role in tokens.roles.items()
        ),
        class_="axes",
        aria_label="mesh axes, outermost (slowest links) first",
    )
    if tokens.padded is None or length is None:
        return joined((axes, el("p", "The model has no sequence that the plan divides.")))
    places = list(tokens.places)
    lines = _by_ring(places, tokens) if len(places) > MOST_PLACES else places
    return joined(
        (
            axes,
            el("p", *_sentence(tokens, length)),
            _strip(tokens),
            el(
                "ol",
                *(_line(place, tokens) for place in lines),
                class_="places",
                aria_label="tokens of each rank",
            ),
        )
    )


def _sentence(tokens: Tokens, length: int) -> Iterable[str]:
    assert tokens.padded is not None
    parts = len(tokens.places)
    yield f"{plural(length, 'token')}"
    if tokens.padded != length:
        yield f", padded to {tokens.padded:,}"
    yield f" in {plural(parts, 'part')} of {tokens.padded // parts:,}"
    names = {
        "contiguous": "contiguous: ring rank i has the i-th piece",
        "zigzag": f"zigzag: of {2 * tokens.ring} pieces ring rank i has the i-th and the i-th "
        "from the end, so that causal work is even",
        "striped": f"striped: ring rank i has every {tokens.ring}th token from the i-th on",
    }
    if tokens.ring > 1:
        yield f". Layout {names[tokens.layout]}"
    if tokens.inner > 1:
        yield f". What a ring rank has is cut into {tokens.inner} even pieces"
    yield "."
    if parts > MOST_PLACES:
        yield f" A line stands for the {plural(tokens.inner, 'place')} of one ring rank."


def _strip(tokens: Tokens) -> Markup:
    """The whole sequence with the ring rank that has each piece."""
    total = tokens.padded or 1
    if tokens.ring == 1 or tokens.layout == "striped":
        return Markup("")
    pieces = _pieces(tokens)
    marks = [
        el(
            "span",
            str(rank) if tokens.ring <= 16 else "",
            class_=f"piece rank{rank % HUES}",
            style=f"width:{100 * (stop - start) / total:.4f}%",
        )
        for start, stop, rank in pieces
    ]
    text = "the sequence from its first token to its last, by ring rank: " + ", ".join(
        f"{start:,} to {stop - 1:,} on {rank}" for start, stop, rank in pieces
    )
    return el("div", *marks, class_="strip", role="img", aria_label=text)


def _pieces(tokens: Tokens) -> list[tuple[int, int, int]]:
    """(first, stop, ring rank) of the pieces of the sequence."""
    merged: list[tuple[int, int, int]] = []
    parts = sorted(
        (part.start, part.stop, index // tokens.inner)
        for index, place in enumerate(tokens.places)
        for part in place.ranges
    )
    for start, stop, rank in parts:
        if merged and merged[-1][1:] == (start, rank):
            merged[-1] = (merged[-1][0], stop, rank)
        else:
            merged.append((start, stop, rank))
    return merged


def _by_ring(places: Sequence[Place], tokens: Tokens) -> list[Place]:
    """One place for all of a ring rank."""
    found = []
    for at in range(0, len(places), tokens.inner):
        group = places[at : at + tokens.inner]
        first = next(iter(group[0].coords.items())) if tokens.ring > 1 else None
        ranks = tuple(sorted(rank for place in group for rank in place.ranks))
        ranges = tuple(part for place in group for part in place.ranges)
        found.append(Place(dict([first]) if first else {}, ranks, merged(ranges)))
    return found


def merged(ranges: Iterable[range]) -> tuple[range, ...]:
    """Those that continue each other as one."""
    found: list[range] = []
    for part in sorted(ranges, key=lambda r: r.start):
        if found and found[-1].step == part.step and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop, part.step)
        else:
            found.append(part)
    return tuple(found)


def _line(place: Place, tokens: Tokens) -> Markup:
    total = tokens.padded or 1
    ring = next(iter(place.coords.values()), 0) if tokens.ring > 1 else 0
    spans = [
        el(
            "i",
            class_=f"own rank{ring % HUES}" + (" sparse" if part.step > 1 else ""),
            style=f"left:{100 * part.start / total:.4f}%;"
            f"width:{max(100 * (part.stop - part.start) / total, 0.1):.4f}%",
        )
        for part in place.ranges
    ]
    where = ", ".join(f"{axis} {at}" for axis, at in place.coords.items())
    return el(
        "li",
        el("span", _ranks(place.ranks), class_="who"),
        el("span", where, class_="where"),
        el("span", *spans, class_="track", aria_hidden="true"),
        el("span", "; ".join(map(positions, place.ranges)), class_="positions"),
    )


def _ranks(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0 to 3', 'ranks 0, 8, 16 and 29 more'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def positions(part: range) -> str:
    """'1,024 to 2,047', 'every 4th from 1 to 1,021'."""
    if len(part) == 1:
        return f"{part.start:,}"
    if part.step == 1:
        return f"{part.start:,} to {part[-1]:,}"
    return f"every {part.step}{_suffix(part.step)} from {part.start:,} to {part[-1]:,}"


def _suffix(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
