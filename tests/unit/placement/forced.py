"""Runs single operations on ranks, with operands placed as a test likes, through the real passes.

The graph of an idiom is cut out of one capture, every input it uses is brought into a chosen
placement first, and what the ranks compute and differentiate is compared with the idiom on the
global tensors.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from seqcomp.capture.export import Capture
from seqcomp.capture.sizes import BATCH_SYMBOL, LENGTH_SYMBOL, Size, evaluate
from seqcomp.diagnostics import PlanError
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.lowering import ops
from seqcomp.lowering.context import LoweringContext, run_passes
from seqcomp.lowering.passes import PASSES
from seqcomp.placement.rule import Decision, Env, MeshView
from seqcomp.placement.spec import Factor, Spec, replicated
from seqcomp.placement.special import SPECIAL_RULES
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.recompute import Recompute
from tests.unit.placement.idioms import (
    SHAPES,
    B,
    Idioms,
    S,
    example,
    objective,
    weights_like,
)

MOST = 5
EVERY = ("add", "sub", "scatter_add tokens", "cross_entropy none", "sum tokens kept")


@dataclass(frozen=True)
class Mesh:
    """Axes of a test, and how the tokens are dealt out."""

    view: MeshView
    layout: SequenceLayout

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.view.degrees)


DATA_RING = Mesh(
    MeshView({"data": 2, "ring": 2}, ("ring",), ("data",)), SequenceLayout("zigzag", 2, 1)
)
USP = Mesh(
    MeshView({"ring": 2, "ulysses": 3}, ("ring", "ulysses"), (), striped="ring"),
    SequenceLayout("striped", 2, 3),
)

# S is not a multiple of these: 12 tokens are padded to 20 and 16.
PADDED_RING = Mesh(
    MeshView({"data": 2, "ring": 5}, ("ring",), ("data",), pads=True),
    SequenceLayout("zigzag", 5, 1),
)
PADDED_USP = Mesh(
    MeshView({"ring": 2, "ulysses": 4}, ("ring", "ulysses"), (), pads=True, striped="ring"),
    SequenceLayout("striped", 2, 4),
)


@dataclass(frozen=True, eq=False)
class Force(ops.Op):
    """Stands for whatever left its operand in this placement; partial sums are made up."""

    spec: Spec
    __name__ = "force"

    def bind(self, rank: ops.RankBinding) -> Callable[..., Any]:
        if not self.spec.partial:
            return lambda x: x
        comm = rank.context.comm(self.spec.partial)
        factor = comm.size if comm.rank == 0 else -1  # they sum to one
        return lambda x: x * factor


def force_rule(node: Node, env: Env) -> Decision:
    spec = node.target.spec  # type: ignore[union-attr]
    return Decision({node.args[0]: replace(spec, partial=())}, spec)  # type: ignore[dict-item]


@dataclass
class Case:
    """One idiom under one combination of operand placements."""

    name: str
    graph: torch.fx.Graph
    outputs: tuple[Spec, ...]  # per tensor of the result, batch axes only


def extract(capture: Capture, name: str) -> Capture:
    """The part of the capture that one idiom's result needs; a tuple gives several leaves."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    output = capture.graph.output_node().args[0]
    pairs = list(zip(capture.output_names, output, strict=True))  # type: ignore[arg-type]
    chosen = [leaf for path, leaf in pairs if path == name or path.startswith(f"{name}.")]
    needed: set[Node] = set()
    pending = list(chosen)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    for node in capture.graph.nodes:
        if node in needed or (node.op == "placeholder" and node.name in capture.inputs):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[leaf] for leaf in chosen))
    names = tuple(str(i) for i in range(len(chosen)))
    return replace(capture, graph=graph, output_names=names)


def options(capture: Capture, node: Node, mesh: Mesh) -> dict[str, Spec]:
    """Placements that make sense for an input: whole, cut by tokens, by batch, sums of parts."""
    shape = capture.shape(node)
    found = {"R": replicated(shape)}
    cuts = {}
    for letter, size, axes in (
        ("B", capture.batch, mesh.view.batch),
        ("S", capture.length, mesh.view.sequence),
    ):
        if axes and size in shape:
            cuts[letter] = (shape.index(size), Factor(size, axes))
    for count in (1, 2):
        for letters in itertools.combinations(cuts, count):
            spec = found["R"]
            for letter in letters:
                spec = spec.with_dim(cuts[letter][0], (cuts[letter][1],))
            found["".join(letters)] = spec
    if node.meta["val"].is_floating_point():
        for letters, spec in list(found.items()):
            for letter, axes in (("b", mesh.view.batch), ("s", mesh.view.sequence)):
                if axes and not set(spec.axes) & set(axes):
                    found[letters + letter] = replace(spec, partial=axes)
    return found


def cases_of(
    capture: Capture, name: str, mesh: Mesh, on_error: Callable[[str], None]
) -> Iterator[Case]:
    """Combinations of operand placements: all of them, or MOST drawn from them."""
    probe = extract(capture, name)
    used = [n.name for n in probe.graph.nodes if n.op == "placeholder" and n.users]
    used = [n for n in used if n in capture.inputs]
    placeholders = [n for n in probe.graph.nodes if n.op == "placeholder" and n.name in used]
    choices = [list(options(probe, n, mesh)) for n in placeholders]
    combinations = list(itertools.product(*choices))
    if len(combinations) > MOST and name not in EVERY:
        combinations = random.Random(name).sample(combinations, MOST)
    for letters in combinations:
        named = dict(zip(used, letters, strict=True))
        try:
            yield build(capture, name, mesh, named)
        except PlanError:
            continue  # refused
        except Exception as error:
            on_error(f"{name}[{named}]: {type(error).__name__}: {error}")


def build(capture: Capture, name: str, mesh: Mesh, letters: Mapping[str, str]) -> Case:
    one = extract(capture, name)
    graph = one.graph
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in letters]:
        spec = options(one, node, mesh)[letters[node.name]]
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            forced = graph.call_function(Force(spec), (node,))
        forced.meta = {k: v for k, v in node.meta.items() if k in ("val", "sc_shape")}
        forced.meta["nn_module_stack"] = {}
        node.replace_all_uses_with(forced, delete_user_cb=lambda user, own=forced: user is not own)
    context = LoweringContext(
        capture=one, mesh=mesh.view, attentions=(), transports={},
        output_modes=("full",) * len(one.output_names), grad=True,
    )  # fmt: skip
    natives = graph.output_node().args[0]
    graph = run_passes(graph, context, PASSES)
    assert context.placement is not None
    specs = []
    for leaf in natives:
        spec = context.placement.native[leaf]
        assert isinstance(spec, Spec)
        specs.append(own_batch(spec, mesh, capture.batch))
    label = ",".join(f"{k}={v}" for k, v in letters.items())
    return Case(f"{name}[{label}]", graph, tuple(specs))


def own_batch(spec: Spec, mesh: Mesh, batch: Size | None) -> Spec:
    """What a rank returns: the whole sequence, of its own samples where there is a batch."""
    axes = mesh.view.batch
    if axes and not set(axes) & {*spec.axes, *spec.partial}:
        for index, dim in enumerate(spec.dims):
            if Factor(batch) in dim:
                at = dim.index(Factor(batch))
                spec = spec.with_dim(index, (*dim[:at], Factor(batch, axes), *dim[at + 1 :]))
                break
    return replace(spec.without(mesh.view.sequence), partial=())


def cut(x: Tensor, spec: Spec, sizes: Mapping[str, int], place: Mapping[str, int]) -> Tensor:
    """The even part of a global tensor that the rank at `place` holds."""
    hints = {BATCH_SYMBOL: B, LENGTH_SYMBOL: S}
    for index, dim in enumerate(spec.dims):
        if not any(f.axes for f in dim):
            continue
        x = x.unflatten(index, [evaluate(f.size, hints) for f in dim])
        for offset, factor in enumerate(dim):
            for axis in factor.axes:
                x = x.tensor_split(sizes[axis], index + offset)[place[axis]]
        x = x.flatten(index, index + len(dim) - 1)
    return x


class OnRank(torch.fx.Interpreter):
    """Runs a lowered graph on one rank without changing it."""

    def __init__(self, graph: torch.fx.Graph, binding: ops.RankBinding):
        super().__init__(nn.Module(), graph=graph)  # a GraphModule would be compiled, per rank
        self._binding = binding

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, ops.Op):
            target = target.bind(self._binding)
        return target(*args, **kwargs)


@dataclass
class Outcome:
    """Results and gradients of one rank, or what went wrong."""

    values: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor | None, ...] = ()
    error: str = ""


def run_rank(context: RankContext, cases: Sequence[Case], capture: Capture, mesh: Mesh,
             module: Idioms, expected: Mapping[str, Sequence[Tensor]],
) -> list[Outcome]:  # fmt: skip
    places = list(itertools.product(*(range(n) for n in mesh.sizes.values())))
    place = dict(zip(mesh.sizes, places[context.rank], strict=True))
    binding = ops.RankBinding(
        context, mesh.view.sequence, mesh.layout, "ring", "ulysses", torch.nn.Module(),
        Recompute(context.traffic),
    )  # fmt: skip
    state = dict(module.named_parameters())
    outcomes = []
    for case in cases:
        leaves = {}
        for name, value in example().items():
            spec = input_spec(capture, name, mesh)
            leaf = cut(value.detach(), spec, mesh.sizes, place).clone()
            leaves[name] = leaf.requires_grad_(value.requires_grad)
        own = {n: p.detach().clone().requires_grad_() for n, p in state.items()}
        given = {**leaves, **{k: {**own, **capture.constants}[v] for k, v in capture.state.items()}}
        try:
            names = [n.name for n in case.graph.nodes if n.op == "placeholder"]
            values = OnRank(case.graph, binding).run(
                *(given[n] for n in names), enable_io_processing=False
            )
            wanted = [*leaves.values(), *own.values()]
            cotangents = [
                cut(w, spec, mesh.sizes, place)
                for w, spec in zip(
                    weights_like(expected[case.name.partition("[")[0]]), case.outputs, strict=True
                )
            ]
            loss = objective(values, cotangents)
            gradients: tuple[Tensor | None, ...] = (None,) * len(wanted)
            if loss is not None:
                floating = [w for w in wanted if w.requires_grad]
                found = iter(torch.autograd.grad(loss, floating, allow_unused=True))
                gradients = tuple(next(found) if w.requires_grad else None for w in wanted)
            outcomes.append(Outcome(tuple(v.detach() for v in values), gradients))
        except Exception as error:  # the case fails, the others go on
            outcomes.append(Outcome(error=f"{type(error).__name__}: {error}"))
    return outcomes


def input_spec(capture: Capture, name: str, mesh: Mesh) -> Spec:
    node = next(n for n in capture.graph.nodes if n.op == "placeholder" and n.name == name)
    spec = replicated(capture.shape(node))
    at = SHAPES[name][1].batch
    if at is None or not mesh.view.batch:
        return spec
    return spec.with_dim(at, (Factor(spec.size(at), mesh.view.batch),))


SPECIAL_RULES_WITH_FORCE = {**SPECIAL_RULES, "force": force_rule}
