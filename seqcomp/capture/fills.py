"""The masks of attention that is written out, as one bias: numbers that are added or filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from seqcomp.capture.edit import Editor
from seqcomp.capture.export import Capture

aten = torch.ops.aten


@dataclass(frozen=True)
class Fill:
    """Scores of which `low` takes the place where `condition` is `when`; `zero` is of its dtype."""

    condition: Node
    when: bool
    low: Node
    zero: Node


def sum_of(capture: Capture, masks: Sequence[Node | Fill], before: Node) -> Node | None:
    """What the masks make of scores of 0, the last one first."""
    editor, total = Editor(capture), None
    for mask in reversed(masks):
        if isinstance(mask, Fill):
            rest = mask.zero if total is None else total
            pair = (mask.low, rest) if mask.when else (rest, mask.low)
            total = editor.call(aten.where.self, (mask.condition, *pair), before=before)
        else:
            both = (aten.add.Tensor, (total, mask))
            total = mask if total is None else editor.call(*both, before=before)
    return total


def filled_in(capture: Capture, masks: Sequence[Node | Fill], before: Node) -> Node | None:
    """Which pairs have no score left: boolean; None for none."""
    editor, found = Editor(capture), None
    for mask in masks:
        if isinstance(mask, Fill):
            own = mask.condition
            if not mask.when:
                own = editor.call(aten.logical_not.default, (own,), before=before)
            both = (aten.logical_or.default, (found, own))
            found = own if found is None else editor.call(*both, before=before)
    return found
