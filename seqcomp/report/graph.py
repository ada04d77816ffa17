"""The regions of a program with what they send, and the values between them with their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from seqcomp.lowering import ops
from seqcomp.lowering.program import Program
from seqcomp.lowering.regions import region_graph
from seqcomp.placement.spec import Spec
from seqcomp.report.rows import Event


@dataclass(frozen=True)
class Region:
    """Local work, or one redistribution (`kind` "move"), or an "input" or "output".

    `label`: what it does; `modules`: where. `ops`: how many operations. `block`: the path of the
    repeated block that it is in, `times`: of how many equal ones. `forward`, `backward`: bytes
    that one rank sends. `level`: redistributions and blocks before it.
    """

    id: int
    kind: str
    label: str
    modules: tuple[str, ...]
    ops: int
    block: str
    times: int
    level: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Flow:
    """Values that go from one region to another: local shape, dtype and placement of each.

    `bytes`: of all of them on one rank.
    """

    source: int
    target: int
    values: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Regions:
    """Regions of a program without cycles. `repeats`: equal blocks, the first of each is drawn."""

    regions: tuple[Region, ...]
    flows: tuple[Flow, ...]
    repeats: tuple[tuple[str, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "regions": [asdict(r) | {"modules": list(r.modules)} for r in self.regions],
            "flows": [asdict(f) | {"values": list(f.values)} for f in self.flows],
            "repeats": [list(paths) for paths in self.repeats],
        }

    def has(self, path: str) -> bool:
        """Whether a region is in the module of that path."""
        return any(_is_in(module, path) for r in self.regions for module in r.modules)

    def within(self, path: str) -> Regions:
        """The regions of one module, and those beside it that it takes from or gives to."""
        inside = {r.id for r in self.regions if any(_is_in(module, path) for module in r.modules)}
        flows = tuple(f for f in self.flows if f.source in inside or f.target in inside)
        shown = inside.union(*((f.source, f.target) for f in flows)) if flows else inside
        kept = tuple(r for r in self.regions if r.id in shown)
        return Regions(kept, flows, self.repeats)


def _is_in(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def regions_of(
    program: Program, values: Mapping[Node, Any], events: Iterable[Event], *, fold: bool = True
) -> Regions:
    """values: as from `local_values`. fold: of equal blocks the first stands for all."""
    graph = region_graph(program.flat, program.capture.inputs, fold=fold)
    repeats = tuple(repeat.paths for repeat in graph.graph["repeats"])
    times = {paths[0]: len(paths) for paths in repeats}
    nodes = {node.name: node for node in program.flat.nodes}
    sent: dict[tuple[str, str], int] = {}
    for event in events:
        key = (event.node, event.row.phase)
        sent[key] = sent.get(key, 0) + event.row.bytes_sent
    outputs = _output_names(program)
    regions = []
    for index, data in graph.nodes(data=True):
        members = [nodes[name] for name in data["members"]]
        inside = data["kind"] in ("work", "move")
        forward, backward = (
            sum(sent.get((n.name, phase), 0) for n in members) if inside else 0
            for phase in ("forward", "backward")
        )
        regions.append(
            Region(
                id=index,
                kind=data["kind"],
                label=_label(data["kind"], members, outputs),
                modules=data["modules"],
                ops=data["ops"],
                block=data["block"],
                times=times.get(data["block"], 1),
                level=data["level"],
                forward=forward,
                backward=backward,
            )
        )
    flows = []
    for source, target, data in graph.edges(data=True):
        crossing = [nodes[name] for name in data["values"]]
        texts = tuple(filter(None, (_value_text(n, values.get(n)) for n in crossing)))
        size = sum(_bytes(values.get(n)) for n in crossing)
        flows.append(Flow(source, target, texts, size))
    return Regions(tuple(regions), tuple(flows), repeats)


def _output_names(program: Program) -> dict[str, str]:
    leaves: Any = program.flat.output_node().args[0]
    names = zip(leaves, program.capture.output_names, strict=True)
    return {leaf.name: name for leaf, name in names if isinstance(leaf, Node)}


def _label(kind: str, members: list[Node], outputs: Mapping[str, str]) -> str:
    first = members[0]
    if kind == "input":
        return f"input {first.name}"
    if kind == "output":
        return f"output {outputs.get(first.name, first.name)}"
    if kind == "work" and not (len(members) == 1 and isinstance(first.target, ops.Op)):
        return "local work"
    return operation_text(first.target) + (f" ({len(members)} values)" if members[1:] else "")


def operation_text(op: Any) -> str:
    """'all-gather over tensor'."""
    name = str(getattr(op, "__name__", op)).replace("_", "-")
    axes = "+".join(op.axes_used()) if isinstance(op, ops.Op) else ""
    match op:
        case ops.Attention():
            return "attention"
        case ops.MaskTiling():
            return "tiles of a mask"
        case ops.DropPairs():
            return "numbers for dropout"
        case ops.Shard() | ops.Part() | ops.PadPart():
            return f"own part over {axes}"
        case ops.VocabularyLoss():
            return f"loss over a cut vocabulary ({axes})"
    return f"{name} over {axes}" if axes else name


def _value_text(node: Node, value: Any) -> str:
    if isinstance(value, tuple | list):
        return "" if not value else f"{len(value)} values" if value[1:] else "1 value"
    if not isinstance(value, Tensor):
        return ""
    shape = " x ".join(map(str, value.shape)) or "scalar"
    dtype = str(value.dtype).removeprefix("torch.")
    spec, op = node.meta.get("spec"), node.target
    place = placement_text(spec) if isinstance(spec, Spec) else ""
    if not place and isinstance(op, ops.Shard):  # made for several users at once
        place = f"dim {op.dim} over {'+'.join(op.axes)}"
    return f"{shape} {dtype}" + (f": {place}" if place else "")


def placement_text(spec: Spec) -> str:
    """'dim 1 over ring+ulysses', 'summands over tensor', 'whole on every rank'."""
    parts = [
        f"dim {i} over {'+'.join(spec.axes_of(i))}"
        for i in range(len(spec.dims))
        if spec.axes_of(i)
    ]
    if spec.partial:
        parts.append(f"summands over {'+'.join(spec.partial)}")
    return ", ".join(parts) or "whole"


def _bytes(value: Any) -> int:
    if isinstance(value, tuple | list):
        return sum(map(_bytes, value))
    return value.nbytes if isinstance(value, Tensor) else 0
