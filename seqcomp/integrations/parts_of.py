"""The attentions of each block of a model: one, or of a decoder beside an encoder two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from seqcomp.capture.edit import op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.capture.sizes import BATCH_SYMBOL, LENGTH_SYMBOL, evaluate


@dataclass(frozen=True)
class Part:
    """Of one block its attentions; and how many tokens its own sequence has and the one that the
    second goes over, where the model makes those itself beside the call's (0: those of that)."""

    infos: tuple[AttentionInfo, ...]
    sources: tuple[int, int] = (0, 0)


def parts_of(
    capture: Capture, lists: Sequence[Sequence[str]], stands: Mapping[str, str]
) -> dict[str, Part] | None:
    """By path of the blocks that were captured; None where they are of no kind that is known.

    stands: for each block of the lists the one that was captured.
    """
    nodes = [n for n in capture.graph.nodes if op_name(n) == "attention"]
    found = {
        path: [n for n in nodes if f"{n.meta['attention'].where}.".startswith(f"{path}.")]
        for path in dict.fromkeys(stands.values())
    }
    numbers = [{len(found[stands[path]]) for path in own} for own in lists]
    if len(nodes) != sum(map(len, found.values())):
        return None
    if numbers == [{1}]:
        return {path: Part((own[0].meta["attention"],)) for path, own in found.items()}
    if numbers != [{1}, {2}]:
        return None
    parts = {}
    for path, (first, *second) in found.items():
        made = _made(capture, second[0].args[1] if second else first.args[1])
        if made is None or (second and not _crosses(first, second[0])):
            return None
        infos = tuple(n.meta["attention"] for n in (first, *second))
        parts[path] = Part(infos, (0, made) if second else (made, 0))
    return parts


def _made(capture: Capture, keys: Node) -> int | None:
    """How many keys there are whatever the length of the call; 0: as many as that has tokens."""
    size = capture.shape(keys)[2]
    if size == capture.length:
        return 0
    varies = size.has(LENGTH_SYMBOL) or size.has(BATCH_SYMBOL)
    return None if varies else evaluate(size, capture.hints)


def _crosses(first: Node, second: Node) -> bool:
    """Whether the heads of both are alike, and keys of the second owe nothing to the first."""
    sizes = [
        (i.heads, i.kv_heads, i.head_dim, i.value_dim)
        for i in (first.meta["attention"], second.meta["attention"])
    ]
    keys = second.args[1]
    assert isinstance(keys, Node)
    waiting, seen = [keys], {keys}
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in seen]
        waiting += new
        seen.update(new)
    return sizes[0] == sizes[1] and first not in seen
