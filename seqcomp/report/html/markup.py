"""Elements as text. Everything that is not markup already is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is markup; any other string is escaped where it becomes part of an element."""

    __slots__ = ()


_VOID = ("meta", "br", "col")


def el(tag: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """An element. Underscores of attribute names stand for dashes; None and False leave one out."""
    shown = "".join(
        f" {key.strip('_').replace('_', '-')}"
        + ("" if value is True else f'="{html.escape(_number(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Markup(f"<{tag}{shown}>")
    return Markup(f"<{tag}{shown}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str]) -> Markup:
    """Parts one after the other."""
    return Markup("".join(p if isinstance(p, Markup) else html.escape(clean(p)) for p in parts))


def clean(text: str) -> str:
    """Control characters and lone surrogates, which no document may hold, as their escapes."""
    return "".join(
        c
        if c in "\n\t" or (c.isprintable() or c == "\xa0")
        else c.encode("unicode_escape").decode()
        for c in text
    )


def table(caption: str, head: Iterable[str], rows: Iterable[Iterable[str]], **cells: str) -> Markup:
    """A table in a box that scrolls by itself. `cells`: classes of columns, as c0="number"."""
    kinds = {int(key[1:]): value for key, value in cells.items()}
    top = el("tr", *(el("th", h, scope="col", class_=kinds.get(i)) for i, h in enumerate(head)))
    body = [
        el("tr", *(el("td", cell, class_=kinds.get(i)) for i, cell in enumerate(row)))
        for row in rows
    ]
    whole = el("table", el("caption", caption), el("thead", top), el("tbody", *body))
    return scrolled(caption, whole)


def scrolled(label: str, content: Markup) -> Markup:
    """What may be wider than the page scrolls in its own box, by keyboard too."""
    return el("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def percent(part: float) -> str:
    """'12.5 %' of a fraction."""
    return f"{100 * part:.3g} %"


def _number(value: str | float | bool) -> str:
    return f"{value:.6g}" if isinstance(value, float) else clean(str(value))
