"""torch.export of one call, in the global view, on fake tensors.

The graph that comes out is for the *global* batch and the *full* sequence; nothing in it knows
about ranks. Batch and sequence are symbolic where the model allows it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from seqcomp.capture.call import BATCH, SEQ, Call, InputDims
from seqcomp.capture.export_input import by_parameter, dynamic_dims, example_of, named_keywords
from seqcomp.capture.flex_trace import flex_as_operations
from seqcomp.capture.guards import refuse_hidden_gradients, refuse_kept_values
from seqcomp.capture.sizes import BATCH_SYMBOL, LENGTH_SYMBOL, Size, expression
from seqcomp.capture.units import Units, opaque_units
from seqcomp.diagnostics import PlanError, diagnostic


@dataclass
class Capture:
    """A captured call. Shapes in `node.meta['val']` are global."""

    graph: torch.fx.Graph
    state: dict[str, str]  # placeholder name -> name of the parameter, buffer or constant
    parameters: frozenset[str]  # placeholders that are parameters
    constants: dict[str, torch.Tensor]  # lifted constants by name
    inputs: tuple[str, ...]  # placeholder per leaf of the call
    dims: tuple[InputDims | None, ...]
    output_names: tuple[str, ...]
    out_spec: pytree.TreeSpec
    canonical: dict[Size, Size]  # symbols of torch, and the length of a sequence made inside
    hints: dict[sympy.Symbol, int]
    batch: Size | None
    length: Size | None
    ranges: dict[sympy.Symbol, Any]
    fake_mode: FakeTensorMode
    units: Units
    checks: list[sympy.Basic] = field(default_factory=list)
    read: set[str] = field(default_factory=set)  # buffers whose values are baked in
    dropouts: int = 0  # that draw in each call
    dropout_keys: str | None = None  # the placeholder of their keys, an input of our own

    def shape(self, node: torch.fx.Node) -> tuple[Size, ...]:
        """Global shape of a tensor node in B and S."""
        cached = node.meta.get("sc_shape")
        if cached is None:
            cached = tuple(expression(size, self.canonical) for size in node.meta["val"].shape)
            node.meta["sc_shape"] = cached
        return cached

    def is_specialised(self) -> bool:
        """Whether an assertion allows one value of a symbolic size only."""
        return any(isinstance(c, sympy.Eq) and c.free_symbols for c in self.checks)

    def accepts(self, batch: int | None, length: int | None) -> bool:
        """Whether what was specialised and asserted holds for these global sizes."""
        values = {BATCH_SYMBOL: batch, LENGTH_SYMBOL: length}
        for role, size in ((self.batch, batch), (self.length, length)):
            if role is not None and size is not None and role.is_Integer and int(role) != size:
                return False
        known = {k: v for k, v in values.items() if v is not None}
        for symbol, bounds in self.ranges.items():
            value = symbol.subs(known)
            if value.is_Integer and not (bounds.lower <= value <= bounds.upper):
                return False
        return all(check.subs(known) is not sympy.false for check in self.checks)


@contextlib.contextmanager
def exported(
    module: torch.nn.Module,
    call: Call,
    dims: Sequence[InputDims | None],
    *,
    data_degree: int,
    where: str,
    symbolic: bool = True,
    is_unit: Callable[[str], bool] = lambda path: False,
) -> Iterator[Capture]:
    """A capture of `call` with the batch of all data ranks, for any sizes where `symbolic`.

    At the end, however it comes, all is freed that only a lowering needs.
    `is_unit(path)`: modules that are one operation of the graph, besides those that are known.
    Raises PlanError SC301 with the cause when torch.export cannot capture the module.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    program, units = _export(
        module, call, dims, fake_mode, data_degree, where, symbolic=symbolic, is_unit=is_unit
    )
    if torch.is_grad_enabled():
        units.count_kept()
    mode = _mode_of(program.graph) or fake_mode
    try:
        yield _capture(program, dims, mode, units)
    finally:
        units.probes.clear()  # they hold the module; a program may outlive it
        # The ShapeEnv of an export is never freed (torch 2.13), nor what it knows of operations.
        assert mode.shape_env is not None
        mode.shape_env.fake_tensor_cache.clear()


def _export(
    module: torch.nn.Module,
    call: Call,
    dims: Sequence[InputDims | None],
    fake_mode: FakeTensorMode,
    data_degree: int,
    where: str,
    *,
    symbolic: bool,
    is_unit: Callable[[str], bool],
) -> tuple[torch.export.ExportedProgram, Units]:
    pairs = list(zip(call.leaves, dims, strict=True))
    leaves = [example_of(leaf, dim, data_degree, fake_mode) for leaf, dim in pairs]
    args, kwargs = pytree.tree_unflatten(leaves, call.treespec)
    shapes = [
        dynamic_dims(leaf, dim) if symbolic else None
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    try:
        with (
            flex_as_operations(),
            refuse_kept_values(module),
            named_keywords(module, kwargs),
            _quiet(),
            refuse_hidden_gradients(module),
            opaque_units(module, is_unit) as units,
            torch.autograd.graph.saved_tensors_hooks(_same, _same),
        ):
            program = torch.export.export(
                module,
                tuple(args),
                dict(kwargs),
                dynamic_shapes=by_parameter(module, *pytree.tree_unflatten(shapes, call.treespec)),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            [
                diagnostic(
                    "SC301",
                    where=where,
                    found=f"{type(error).__name__}: {_first_lines(str(error))}",
                    legal="a module that torch.export.export(..., strict=False) captures whole",
                    help="make the forward free of data-dependent Python control flow "
                    "(torch.export.draft_export lists every place)",
                )
            ]
        ) from error
    return program, units


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _same(x: Any) -> Any:
    """Keeps hooks of the caller (checkpointing, offloading) away from fake tensors."""
    return x


def _first_lines(text: str, count: int = 4) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines[:count])


def _capture(
    program: torch.export.ExportedProgram,
    dims: Sequence[InputDims | None],
    fake_mode: FakeTensorMode,
    units: Units,
) -> Capture:
    signature = program.graph_signature
    mutated = [
        spec.target
        for spec in signature.output_specs
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    ]
    if mutated:
        raise PlanError(
            [
                diagnostic(
                    "SC307",
                    where=str(name),
                    found="forward writes to it",
                    legal="a forward that leaves its buffers and inputs as they are",
                    help="move the update out of forward, or put the module in eval() mode",
                )
                for name in mutated
            ]
        )
    graph = program.graph
    state, parameters, constants, inputs = {}, set(), {}, []
    for spec in signature.input_specs:
        name = getattr(spec.arg, "name", None)
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            state[name] = spec.target
            if spec.kind is InputKind.PARAMETER:
                parameters.add(name)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            state[name] = spec.target
            constants[spec.target] = program.constants[spec.target]
        else:
            raise PlanError(
                [
                    diagnostic(
                        "SC301",
                        where=str(spec.target),
                        found=str(spec.kind),
                        legal="tensors, numbers, None and containers of them",
                        help="pass plain tensors",
                    )
                ]
            )
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    canonical, hints, batch, length = _canonical(placeholders, inputs, dims)
    # A symbol with one legal value is that value: x [B, S, D] + table [8, D] fixes S only so.
    fixed = {
        canonical[symbol]: sympy.Integer(int(bounds.lower))
        for symbol, bounds in program.range_constraints.items()
        if symbol in canonical and bounds.lower == bounds.upper
    }
    canonical = {symbol: fixed.get(target, target) for symbol, target in canonical.items()}
    batch, length = (fixed.get(size, size) for size in (batch, length))
    output = graph.output_node()
    out_spec = program.call_spec.out_spec
    ranges = {
        canonical.get(symbol, symbol): bounds
        for symbol, bounds in program.range_constraints.items()
    }
    return Capture(
        graph=graph,
        state=state,
        parameters=frozenset(parameters),
        constants=constants,
        inputs=tuple(inputs),
        dims=tuple(dims),
        output_names=_output_names(out_spec, len(output.args[0])),
        out_spec=out_spec,
        canonical=canonical,
        hints=hints,
        batch=batch,
        length=length,
        ranges=ranges,
        fake_mode=fake_mode,
        units=units,
    )


def _mode_of(graph: torch.fx.Graph) -> FakeTensorMode | None:
    for node in graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def _canonical(
    placeholders: Mapping[str, torch.fx.Node],
    inputs: Sequence[str],
    dims: Sequence[InputDims | None],
) -> tuple[dict[sympy.Symbol, Size], dict[sympy.Symbol, int], Size | None, Size | None]:
    canonical: dict[sympy.Symbol, Size] = {}
    hints: dict[sympy.Symbol, int] = {}
    found: dict[str, Size] = {}
    symbols = {BATCH: BATCH_SYMBOL, SEQ: LENGTH_SYMBOL}
    static: dict[str, int] = {}
    for name, dim in zip(inputs, dims, strict=True):
        if dim is None:
            continue
        shape = placeholders[name].meta["val"].shape
        for size, role in zip(shape, dim.dims, strict=True):
            if role is not None and not isinstance(size, torch.SymInt):
                static.setdefault(role, int(size))
    for name, dim in zip(inputs, dims, strict=True):
        if dim is None:
            continue
        shape = placeholders[name].meta["val"].shape
        for size, role in zip(shape, dim.dims, strict=True):
            if role is None or not isinstance(size, torch.SymInt):
                continue
            expr = size.node.expr
            hint = int(size.node.hint)
            if not expr.is_Symbol:
                continue
            # One input of a role that torch specialised fixes the size for all of them.
            target = sympy.Integer(hint) if static.get(role) == hint else symbols[role]
            canonical[expr] = target
            hints[symbols[role]] = hint
            found[role] = target
    for role, size in static.items():
        found.setdefault(role, sympy.Integer(size))
    return canonical, hints, found.get(BATCH), found.get(SEQ)


def _output_names(spec: pytree.TreeSpec, count: int) -> tuple[str, ...]:
    tree = pytree.tree_unflatten(list(range(count)), spec)
    paths, _ = pytree.tree_flatten_with_path(tree)
    names = [""] * count
    for path, index in paths:
        names[index] = ".".join(
            str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path
        )
    return tuple(name or "output" for name in names)
