"""What a placement rule is given and what it answers; helpers that rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from seqcomp.capture.edit import is_tensor
from seqcomp.capture.export import Capture
from seqcomp.capture.sizes import LENGTH_SYMBOL, Size
from seqcomp.diagnostics import Diagnostic
from seqcomp.placement.megatron import TensorPlan
from seqcomp.placement.spec import Dim, Factor, Spec, is_uneven, merged, replicated, whole


@dataclass(frozen=True)
class MeshView:
    """The mesh as placement sees it: axes of size > 1 and what they divide."""

    degrees: Mapping[str, int]
    sequence: tuple[str, ...]  # ring, ulysses, tensor order
    batch: tuple[str, ...]
    tensor: str | None = None  # the innermost sequence axis, of megatron_sp
    pads: bool = False  # whether lengths that do not divide are padded
    striped: str | None = None  # the axis over which neighbouring tokens are on different ranks

    def without_sequence(self) -> MeshView:
        """The mesh as a module sees it that runs on the whole sequence."""
        degrees = {a: n for a, n in self.degrees.items() if a not in self.sequence}
        return MeshView(degrees, (), self.batch)

    def degree(self, axes: Iterable[str]) -> int:
        total = 1
        for axis in axes:
            total *= self.degrees[axis]
        return total

    def is_padded(self, factor: Factor) -> bool:
        """Whether ranks hold tokens of a padded sequence."""
        return self.pads and factor.size == LENGTH_SYMBOL and bool(factor.axes)

    def is_uneven(self, dim: Dim) -> bool:
        """Whether ranks hold parts of unequal size of this dim."""
        return any(is_uneven(f, self.degrees) for f in dim)


@dataclass
class Env:
    """One placement run: the capture, the mesh, and the findings so far."""

    capture: Capture
    mesh: MeshView
    native: dict[Node, Spec | tuple[Spec, ...]]
    preferred: dict[Node, Spec] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)
    tensor: TensorPlan | None = None

    def shape(self, node: Node) -> tuple[Size, ...]:
        return self.capture.shape(node)

    def spec(self, node: Node) -> Spec:
        """The placement a rule may count on for an operand."""
        if node in self.preferred:
            return self.preferred[node]
        spec = self.native[node]
        assert isinstance(spec, Spec)
        return spec

    def even_degrees(self) -> dict[str, int]:
        """Axes that deal out dims in contiguous pieces (never the sequence's permuted ones)."""
        permuted = set(self.mesh.sequence) - {self.mesh.tensor}
        return {a: n for a, n in self.mesh.degrees.items() if a not in permuted}

    def role(self, node: Node) -> str | None:
        """What Megatron-SP makes of a linear or an embedding."""
        return self.tensor.roles.get(node) if self.tensor else None

    def shared_heads(self, node: Node) -> int | None:
        """The dim over which this expansion gives all heads the same, where heads are cut."""
        return self.tensor.shared.get(node) if self.tensor else None

    def inner_tokens(self, spec: Spec) -> Spec:
        """Tokens that the outer sequence axes cut, cut over the tensor axis too if it is free."""
        axis = self.mesh.tensor
        if axis is None or axis in spec.axes or axis in spec.partial:
            return spec
        return self.scattered(replace(spec, partial=(*spec.partial, axis)), fallback=spec)

    def scattered(self, spec: Spec, fallback: Spec | None = None) -> Spec:
        """A sum over the tensor axis with its summands dealt out by tokens (reduce-scatter)."""
        axis = self.mesh.tensor
        if axis is None or axis not in spec.partial:
            return spec
        outer = tuple(a for a in self.mesh.sequence if a != axis)
        for index, dim in enumerate(spec.dims):
            for at, factor in enumerate(dim):
                if factor.size == self.capture.length and factor.axes == outer:
                    cut = (*dim[:at], Factor(factor.size, (*outer, axis)), *dim[at + 1 :])
                    partial = tuple(a for a in spec.partial if a != axis)
                    return replace(spec.with_dim(index, cut), partial=partial)
        return fallback or spec


@dataclass(frozen=True)
class Decision:
    """The placements an operation needs and gives.

    `form` names how the operation is lowered when it is not simply run on local tensors; a
    `gathered` decision had to give up a sharding, for the reason stated.
    """

    wants: Mapping[Node, Spec]
    out: Spec | tuple[Spec, ...]
    form: str = "local"
    attributes: Mapping[str, Any] = field(default_factory=dict)
    gathered: str = ""


Rule = Callable[[Node, Env], Decision | None]


def tensor_args(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if is_tensor(n)]


def unsharded(spec: Spec, dims: Iterable[int]) -> Spec:
    """The spec with these dims whole (and no partial sums)."""
    axes = [a for d in dims for a in spec.axes_of(d)]
    return replace(spec.without(axes), partial=())


def summed(spec: Spec) -> Spec:
    return replace(spec, partial=())


def outputs_of(node: Node, env: Env) -> list[tuple[Size, ...]]:
    """Shapes of the outputs of a node that returns several tensors."""
    from seqcomp.capture.sizes import expression

    return [
        tuple(expression(s, env.capture.canonical) for s in val.shape) for val in node.meta["val"]
    ]


def align(
    nodes: Sequence[Node],
    shape: Sequence[Size],
    env: Env,
    specs: Mapping[Node, Spec] | None = None,
) -> tuple[dict[Node, Spec], tuple[Dim, ...]]:
    """Placements with which operands broadcast to `shape` element by element.

    Where one operand is sharded and another is not, the other is cut to match. An axis serves
    one dim only: the first dim that uses it keeps it.
    """
    given = specs if specs is not None else {n: env.spec(n) for n in nodes}
    used: set[str] = set()
    targets: list[Dim] = []
    for index, size in enumerate(shape):
        candidates = []
        for node in nodes:
            own = env.shape(node)
            at = index - (len(shape) - len(own))
            if at >= 0 and own[at] == size and size != 1:
                candidates.append(given[node].dims[at])
        chosen = max(candidates, key=lambda d: (_free_axes(d, used), len(d)), default=whole(size))
        chosen = _strip(chosen, used)
        used |= {a for f in chosen for a in f.axes}
        targets.append(chosen)
    wants = {}
    for node in nodes:
        own = env.shape(node)
        offset = len(shape) - len(own)
        dims = tuple(
            targets[i + offset] if size == shape[i + offset] and size != 1 else whole(size)
            for i, size in enumerate(own)
        )
        wants[node] = Spec(dims, given[node].partial)
    return wants, tuple(targets)


def _free_axes(dim: Dim, used: set[str]) -> int:
    return sum(1 for f in dim for a in f.axes if a not in used)


def _strip(dim: Dim, used: set[str]) -> Dim:
    return merged(tuple(Factor(f.size, tuple(a for a in f.axes if a not in used)) for f in dim))


def gather_all(node: Node, env: Env, reason: str) -> Decision:
    """Every operand whole on every rank: exact for any operation, and never free."""
    wants = {n: replicated(env.shape(n)) for n in tensor_args(node)}
    sharded = any(env.spec(n).axes for n in tensor_args(node))
    return Decision(wants, replicated_outputs(node, env), gathered=reason if sharded else "")


def replicated_outputs(node: Node, env: Env) -> Spec | tuple[Spec, ...]:
    if is_tensor(node):
        return replicated(env.shape(node))
    if isinstance(node.meta.get("val"), list | tuple):
        return tuple(replicated(shape) for shape in outputs_of(node, env))
    return Spec(())
