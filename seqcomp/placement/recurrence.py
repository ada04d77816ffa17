"""Recurrences over the sequence, told by how a capture shows them, and refused by name.

A state that goes from token to token cannot be divided by tokens. Gathered piece by piece it would
be exact, with a collective for every token, or the work of the whole on every rank: a plan that
says nothing about it is more likely a mistake than a wish.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from torch.fx import Node

from seqcomp.capture.edit import argument, is_tensor, module_path, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import RECURRENT
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.placement.recurrent import state_dim
from seqcomp.placement.rule import Decision
from seqcomp.placement.spec import Spec

FEWEST = 4
"""Tokens of the shortest sequence that is called a loop when its tokens are taken one by one."""


def refuse_recurrences(
    capture: Capture,
    axes: Collection[str],
    decisions: Mapping[Node, Decision],
    native: Mapping[Node, Spec | tuple[Spec, ...]],
    whole: Collection[Node],
) -> None:
    """Raises PlanError SC315 for modules that run a state along sharded tokens: recurrent layers,
    loops, and scans of chunks.

    axes: those that share out the sequence. whole: nodes of modules that the plan runs on the
    whole sequence; they may.
    """
    if not axes or capture.length is None:
        return
    made = _made_of_tokens(capture, axes, native)
    loops: dict[str, set[int]] = {}  # by module, the tokens that it takes one by one
    found: dict[str, str] = {}
    for node in capture.graph.nodes:
        if node.op != "call_function" or node in whole or not node.args:
            continue
        if node.args[0] not in made:
            continue
        path = module_path(node)
        if _carries_along_tokens(node, axes, native):
            layer = op_name(node).removeprefix("aten.").partition("_")[0].upper()
            found[path] = f"{layer}: a state that goes from token to token"
            continue
        positions = set(_taken_alone(node, capture))
        if positions:
            loops.setdefault(path, set()).update(positions)
        elif _scans_chunks(node, path, decisions):
            found[path] = (
                "exp(cumsum) over chunks of the sequence: a scan whose state goes from one chunk "
                "to the next"
            )
    if capture.length.is_Integer and int(capture.length) >= FEWEST:
        length = int(capture.length)
        found |= {
            path: f"a loop over the tokens: {len(taken)} of {length} are taken one by one"
            for path, taken in loops.items()
            if len(taken) >= length - 1
        }
    if found:
        raise PlanError(list(_errors(found)))


def _made_of_tokens(
    capture: Capture, axes: Collection[str], native: Mapping[Node, Spec | tuple[Spec, ...]]
) -> set[Node]:
    """Values that sharded tokens went into, also where they are whole by now."""
    made: set[Node] = set()
    for node in capture.graph.nodes:
        spec = native.get(node)
        own = isinstance(spec, Spec) and any(a in axes for a in spec.axes)
        if own or any(n in made for n in node.all_input_nodes):
            made.add(node)
    return made


def _carries_along_tokens(
    node: Node, axes: Collection[str], native: Mapping[Node, Spec | tuple[Spec, ...]]
) -> bool:
    """Whether this is an LSTM, GRU or RNN along a dim that sequence axes share out."""
    if op_name(node) not in RECURRENT:
        return False
    spec, along = native[node.args[0]], state_dim(node)
    assert isinstance(spec, Spec)
    dims = range(len(spec.dims)) if along is None else (along,)
    return any(a in axes for d in dims for a in spec.axes_of(d))


def _taken_alone(node: Node, capture: Capture) -> Iterator[int]:
    """Positions along the sequence at which this node takes single tokens."""
    name = op_name(node)
    if name not in ("aten.select", "aten.slice", "aten.unbind"):
        return
    source = node.args[0]
    shape = capture.shape(source)
    dim = argument(node, 1, "dim", 0) % len(shape)
    if shape[dim] != capture.length or not capture.length.is_Integer:
        return
    length = int(capture.length)
    if name == "aten.unbind":
        yield from range(length)
        return
    at = node.args[2] if name == "aten.select" else argument(node, 2, "start", 0)
    alone = name == "aten.select" or (is_tensor(node) and capture.shape(node)[dim] == 1)
    if alone and isinstance(at, int):
        yield at % length


def _scans_chunks(node: Node, path: str, decisions: Mapping[Node, Decision]) -> bool:
    """A cumsum that had to have its tokens whole, and whose exponential the module uses."""
    if op_name(node) != "aten.cumsum" or not is_tensor(node):
        return False
    decision = decisions.get(node)
    if decision is None or decision.form == "running_sum":
        return False
    work, seen = [node], {node}
    while work:
        for user in work.pop().users:
            if user in seen or module_path(user) != path:
                continue
            if op_name(user) in ("aten.exp", "aten.exp_", "aten.exp2"):
                return True
            seen.add(user)
            work.append(user)
    return False


def _errors(found: Mapping[str, str]) -> Iterator[Diagnostic]:
    """One for all modules that are alike but for their numbers."""
    alike: dict[tuple[str, str], list[str]] = {}
    for path, what in found.items():
        alike.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path), what), []).append(
            path
        )
    for (pattern, what), paths in alike.items():
        others = f", and {len(paths) - 1} more like it" if len(paths) > 1 else ""
        yield diagnostic(
            "SC315",
            where=f"{paths[0] or '<root>'}{others}",
            found=what,
            legal="operations that act on each token alone, attention, convolutions, running sums",
            help=f'run it on the whole sequence: overrides: [{{match: "{pattern}", gather: true}}]'
            if pattern
            else "put the recurrence into a module of its own and run that on the whole "
            "sequence, with overrides: [{match: ..., gather: true}]",
        )
