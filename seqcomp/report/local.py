"""The sizes of every value on one rank, found by running its local graph on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg

from seqcomp.capture.call import BATCH, SEQ, InputDims
from seqcomp.capture.edit import op_name
from seqcomp.layout.parts import part_size
from seqcomp.lowering import ops
from seqcomp.lowering.program import Program
from seqcomp.runtime.picked import tokens_at
from seqcomp.runtime.uneven import pad_to

# Operations whose result is like their operand.
_SAME = (
    ops.ScaleCotangent, ops.SumGradient, ops.LocalPart, ops.HidePadding,
)  # fmt: skip
_MATMULS = ("aten.linear", "aten.matmul", "aten.mm", "aten.addmm", "aten.bmm")
_NARROW = (torch.bfloat16, torch.float16)


Saved = dict[Node, list[Tensor]]
"""What the autograd node of each node of a program saves; its own operations are left out."""


def local_values(
    program: Program,
    batch: int | None,
    length: int | None,
    degrees: Mapping[str, int],
    saved: Saved | None = None,
) -> dict[Node, Any]:
    """What every node of `program.flat` gives on the first rank.

    Fake tensors, and integers for sizes. batch: of this rank. length: the full one. degrees: size
    of each mesh axis. Nothing is computed or sent, no memory is used. Whether a tensor requires a
    gradient is as in a call. `saved` is filled.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[Node, Any] = {}
    inputs = dict(zip(program.capture.inputs, program.capture.dims, strict=True))
    running: list[Node] = []

    def pack(x: Tensor) -> None:
        if saved is not None and not isinstance(running[-1].target, ops.Op):
            saved.setdefault(running[-1], []).append(x)

    with fake, _modes(program), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for node in program.flat.nodes:
            running.append(node)
            if node.op == "placeholder":
                values[node] = _given(node, inputs.get(node.name), batch, length)
                values[node] = _cut(values[node], program, node.name, degrees)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                if isinstance(node.target, ops.Op):
                    values[node] = _imitate(node, node.target, args, degrees, fake, program)
                elif is_fused(node, values):
                    values[node] = _attended(node, args)
                else:
                    values[node] = node.target(*args, **kwargs)
    return values


def is_fused(node: Node, values: Mapping[Node, Any]) -> bool:
    """Whole attention that one kernel will compute, on meta: there torch writes all scores down."""
    info = node.meta.get("attention")
    if info is None or isinstance(node.target, ops.Op):
        return False
    return not info.written and bool(values[node.all_input_nodes[0]].is_meta)


def _attended(node: Node, given: Iterable[Any], *, side_by_side: bool = False) -> Tensor:
    """The result [B, H, s, d] of attention, of which kernels lay out dims as those of the queries.

    side_by_side: are the heads of a token, as after an exchange between ranks.
    """
    tensors = [x for x in given if isinstance(x, Tensor)]
    q, v = tensors[0], tensors[2]
    shape = (*q.shape[:3], v.shape[3])
    strides = (0, 2, 1, 3) if side_by_side else [-n for n in q.stride()]
    order = sorted(range(4), key=strides.__getitem__)
    out = q.new_empty([shape[i] for i in order], dtype=node.meta["val"].dtype)
    out = out.permute([order.index(i) for i in range(4)])
    return out.requires_grad_(torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


@contextlib.contextmanager
def _modes(program: Program) -> Iterator[None]:
    """Grad mode and autocast as they were in the call."""
    dtype, device = _autocast(program)
    with (
        torch.set_grad_enabled(program.grad),
        torch.autocast(device, dtype, enabled=dtype is not None),
    ):
        yield


def _autocast(program: Program) -> tuple[torch.dtype | None, str]:
    """A product that is narrower than its wide operands was captured under autocast."""
    for node in program.flat.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or op_name(node) not in _MATMULS:
            continue
        given = [_captured_dtype(operand) for operand in node.all_input_nodes]
        if value.dtype in _NARROW and any(d in (torch.float32, torch.float64) for d in given):
            return value.dtype, value.device.type
    return None, "cpu"


def _captured_dtype(node: Node) -> torch.dtype | None:
    while "val" not in node.meta and isinstance(node.target, ops.Op) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    node = node if "val" in node.meta else node.meta.get("source", node)
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _given(node: Node, dims: InputDims | None, batch: int | None, length: int | None) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    roles: tuple[str | None, ...] = dims.dims if dims else (None,) * value.dim()
    known = {BATCH: batch, SEQ: length}
    shape: list[int] = []
    for size, role in zip(value.shape, roles, strict=True):
        # A size of 1 broadcasts, whatever its role.
        fixed = isinstance(size, int) and size == 1
        new = int(size) if role is None or fixed else known[role]
        assert new is not None, f"{node.name} has a dim of {role}, the call has none"
        shape.append(new)
    return torch.empty(
        shape, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
    )


def _cut(value: Any, program: Program, name: str, degrees: Mapping[str, int]) -> Any:
    """This rank's part of a parameter that an axis divides; a tied one is cut under any name."""
    path = program.capture.state.get(name, "")
    names = program.aliases.get(path, (path,))
    cut = next((program.cuts[one] for one in names if one in program.cuts), None)
    if cut is None:
        return value
    part: Tensor = value.detach().chunk(degrees[cut.axis], cut.dim)[0]  # the largest
    return torch.empty_like(part).requires_grad_(value.requires_grad)


def _imitate(
    node: Node,
    op: ops.Op,
    args: Any,
    degrees: Mapping[str, int],
    fake: FakeTensorMode,
    program: Program,
) -> Any:
    computed = _computed(node, op, args, fake, degrees, program)
    if computed is not None:
        return computed
    degree = 1
    for axis in op.axes_used():
        degree *= degrees[axis]
    match op:
        case ops.Shard() | ops.ReduceScatter():
            x = args[0]
            if len(args) > 1:
                x = pad_to(x, op.dim, program.layout.padded(args[1]))
            return x.narrow(op.dim, 0, x.shape[op.dim] // degree).clone()
        case ops.Gather():
            whole = torch.cat([args[0]] * degree, op.dim)
            return whole.narrow(op.dim, 0, args[1]) if len(args) > 1 else whole
        case ops.PaddedLength():
            return program.layout.padded(args[0])
        case ops.AllToAll():
            (x,) = args
            part = x.narrow(op.scatter_dim, 0, x.shape[op.scatter_dim] // degree)
            return torch.cat([part] * degree, op.gather_dim)
        case ops.AllReduce() | ops.OwnCotangent():
            return args[0].clone()
        case ops.PadPart():
            return pad_to(args[0], op.dim, part_size(op.size, degree))
        case ops.Part():
            return args[0].narrow(op.dim, 0, part_size(op.size, degree))
        case ops.OpenBucket():
            return tuple(args)
        case ops.FillBucket():
            return args[0]
    assert isinstance(op, _SAME), op
    return args[0].view_as(args[0])


def _computed(
    node: Node,
    op: ops.Op,
    args: Any,
    fake: FakeTensorMode,
    degrees: Mapping[str, int],
    program: Program,
) -> Any:
    """What operations that compute give; None for the others."""
    match op:
        case ops.Constant():
            return fake.from_tensor(op.value)
        case ops.Attention():
            tiling, sinks = args[3:5]
            side_by_side = program.layout.inner > 1 and not op.whole
            return _attended(node, (*args[:3], *(tiling or ()), sinks), side_by_side=side_by_side)
        case ops.Dropout():
            return args[0] * 1.0
        case ops.DropPairs() | ops.Remember():
            return args[0]
        case ops.MaskTiling():
            return args[1:]  # what attention may hand gradients to
        case ops.ColumnLinear():
            x, _, weight, bias, _ = args
            return torch.nn.functional.linear(x, weight, bias)
        case ops.VocabularyEmbedding():
            weight, index = args
            return torch.nn.functional.embedding(index, weight)
        case ops.VocabularyLoss():
            logits = args[0].sum(op.classes if args[0].dim() > 1 else 0)
            return logits.sum() if op.reduce else logits
        case ops.ChunkedMlp():
            x, _, _, *parameters = args
            return op.whole(x, None, None, *parameters)
        case ops.ChunkedLoss():
            x, _, weight, bias, _, target, _ = args
            wanted = torch.is_grad_enabled() and any(
                v.requires_grad for v in (x, weight, bias) if v is not None
            )
            shape = () if op.reduce else target.shape
            return x.new_empty(shape, dtype=op.dtype).requires_grad_(wanted)
        case ops.TokenLocal():
            inputs, parameters = args
            wanted = torch.is_grad_enabled() and any(
                x.requires_grad for x in (*inputs, *parameters)
            )
            shapes = op.shapes([x.shape for x in inputs], degrees)
            return [
                inputs[0]
                .new_empty(shape, dtype=dtype)
                .requires_grad_(wanted and dtype.is_floating_point)
                for shape, dtype in zip(shapes, op.unit.results.dtypes, strict=True)
            ]
        case ops.OwnHeads():
            return args[0].narrow(1, 0, 1)
        case ops.Windowed():
            return op.window(*args)
        case ops.RunningSum():
            return args[0].cumsum(op.dim, dtype=op.dtype)
        case ops.TokensAt():
            x, index, length = args
            index = torch.tensor(index) if isinstance(index, list) else index
            return tokens_at(x, op.dim, index, length, (range(x.shape[op.dim]),), op.how)
    return None
