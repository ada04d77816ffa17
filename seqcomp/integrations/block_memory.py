"""What autograd keeps of the blocks of a module and around them, counted on its lowered graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from seqcomp.capture.edit import op_name
from seqcomp.cost.parts import Bytes, Saved
from seqcomp.cost.shape import Block
from seqcomp.diagnostics import PlanError
from seqcomp.integrations.explain import Lowered, lowered
from seqcomp.report.block import bytes_by_call
from seqcomp.report.local import Saved as SavedTensors
from seqcomp.report.local import local_values

_RANKS, _TOKENS = 2, 64  # of a rank, in the calls whose saved bytes are counted
_OUTSIDE, _TABLES = "", "tables"
_PARTS = ("none", "selective", "attended")


@dataclass(frozen=True)
class Kept:
    """Bytes of one rank, of the blocks of one path (``none``: that keep all) or around them."""

    none: float
    selective: float = 0.0
    attended: float = 0.0
    narrow_loss: bool = False


@dataclass(frozen=True)
class Memory:
    """Of one kind of blocks each, and outside of them: ``ends`` for a token, ``whole_ends`` for
    each sequence whatever its length. ``shared``: for a token, once for all blocks; apart from that
    ``tables``, which do not learn. ``wide_loss``: the logits are fp32 for the loss."""

    kinds: tuple[Block, ...]
    ends: Bytes
    whole_ends: Bytes | None
    shared: Saved
    tables: Bytes
    wide_loss: bool


def with_memory(
    module: nn.Module, kinds: Mapping[Block, Sequence[str]], hidden: int, length: int | None
) -> Memory:
    """The kinds with what is kept of one of each; they stand at the paths beside them.

    Counted on a rank of a ring, whose attention keeps no scores however the model writes it, in
    bf16 and in fp32; of a sequence that the model makes beside the call's at two lengths. Of two
    blocks of a kind, where there are two, the first has what all share. A block that runs again
    whole keeps its input. length: of the sequence, where the model makes it itself.
    """
    whole = any(kind.source for kind in kinds)
    length = length or _RANKS * _TOKENS
    with blocks_alone(module, [path for own in kinds.values() for path in own[:2]]) as names:
        short = _by_width(module, length)
        long = _by_width(module, 2 * length) if whole else None
    tokens = -(-length // _RANKS)

    def of(path: str, what: str) -> tuple[Bytes, Bytes]:
        """A token's, and a sequence's."""
        first = _affine(short, path, what)
        if long is None:
            return _scaled(first, 1 / tokens), Bytes(0, 0)
        token = _scaled(_less(_affine(long, path, what), first), 1 / tokens)
        return token, _less(first, _scaled(token, tokens))

    found, shared = [], dict.fromkeys(("none", "selective"), Bytes(0, 0))
    for kind, paths in kinds.items():
        name = names[paths[:2][-1]]
        token, sequence = ({what: of(name, what)[i] for what in _PARTS} for i in (0, 1))
        if len(paths) > 1:
            for what, before in shared.items():
                more = _less(of(names[paths[0]], what)[0], token[what])
                shared[what] = _less(before, _scaled(more, -1))
        saved = Saved(**token, block=Bytes(0, 0 if kind.source else hidden))
        own = Saved(**sequence, block=Bytes(0, kind.source * hidden)) if whole else None
        found.append(replace(kind, saved=saved, whole=own))
    ends, whole_ends = of(_OUTSIDE, "none")
    crosses = any(kind.cross is not None and not kind.cross.source for kind in kinds)
    return Memory(
        tuple(found),
        ends,
        whole_ends if whole else None,
        Saved(**shared, block=Bytes(0, hidden if crosses else 0)),
        of(_TABLES, "none")[0],
        not short[1][_OUTSIDE].narrow_loss,
    )


Widths = tuple[Mapping[str, Kept], Mapping[str, Kept]]
"""In fp32 and in bf16, by path."""


def _by_width(module: nn.Module, length: int) -> Widths:
    wide = _counted(module, "fp32", length)
    try:
        return wide, _counted(module, "bf16", length)
    except PlanError:
        # Experts of transformers cannot be imitated in bf16 everywhere; halves are near.
        half = {p: Kept(k.none / 2, k.selective / 2, k.attended / 2) for p, k in wide.items()}
        return wide, half


def _affine(widths: Widths, path: str, what: str) -> Bytes:
    """Of both widths what is fixed, and what has the width of activations."""
    wide, narrow = (getattr(kept[path], what) for kept in widths)
    return Bytes(2 * narrow - wide, (wide - narrow) / 2)


def _less(first: Bytes, second: Bytes) -> Bytes:
    return Bytes(first.fixed - second.fixed, first.elements - second.elements)


def _scaled(size: Bytes, by: float) -> Bytes:
    return Bytes(size.fixed * by, size.elements * by)


def _counted(module: nn.Module, dtype: str, length: int) -> Mapping[str, Kept]:
    """By path, of a module of one block of each kind, in one dtype."""
    plan = {
        "mesh": {"ring": _RANKS},
        "strategies": {"ring": {}},
        "memory": {"checkpoint": "selective"},
        "padding": "pad",
    }
    return lowered(module, plan, _by_path, seq_len=length, dtype=dtype)


def _by_path(what: Lowered) -> dict[str, Kept]:
    saved: SavedTensors = {}
    values = local_values(what.program, what.batch, what.length, what.resolved.axes, saved)
    blocks = bytes_by_call(what.program, values, saved, what.resolved)
    saved.clear()  # or what was imagined and the hooks that hold it live for good
    found: dict[str, Kept] = defaultdict(lambda: Kept(0))
    for call in blocks.calls:
        before = found[call.path]
        found[call.path] = Kept(
            before.none + call.without,
            before.selective + call.kept,
            before.attended + call.attended,
        )
    logits = (
        values[node.all_input_nodes[0]]
        for node in what.program.flat.nodes
        if op_name(node) == "aten.cross_entropy_loss"
    )
    narrow = any(x.element_size() < 4 for x in logits)
    outside = Kept(blocks.outside, narrow_loss=narrow)
    return {**found, _OUTSIDE: outside, _TABLES: Kept(blocks.tables)}


@contextmanager
def blocks_alone(module: nn.Module, paths: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """The module with these of its blocks for all of them; gives the paths that they have then."""
    lists: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        container, _, key = path.rpartition(".")
        lists[container].append(key)
    before = {at: dict(module.get_submodule(at)._modules) for at in lists}
    names = {}
    try:
        for at, keys in lists.items():
            holder, own = module.get_submodule(at), before[at]
            holder._modules.clear()
            for place, key in enumerate(keys):
                name = list(own)[place] if key.isdigit() else key
                holder._modules[name] = own[key]
                names[f"{at}.{key}" if at else key] = f"{at}.{name}" if at else name
        yield names
    finally:
        for at, own in before.items():
            holder = module.get_submodule(at)
            holder._modules.clear()
            holder._modules.update(own)
