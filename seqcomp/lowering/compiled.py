"""The compiled module behind a module: variants, agreement, and what a user can ask."""

from __future__ import annotations

import hashlib
import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqcomp.capture.call import Call, InputDims, signature_of
from seqcomp.capture.facts import makes_cache
from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic, errors_in, raise_for_errors
from seqcomp.lowering import ops
from seqcomp.lowering.binding import bound_call
from seqcomp.lowering.build import Request, build_program, fingerprint
from seqcomp.lowering.consensus import Consensus, internal_failure
from seqcomp.lowering.division import Division
from seqcomp.lowering.hooks import refuse_uncalled, uncalled
from seqcomp.lowering.program import (
    MAX_PROGRAMS,
    Program,
    ProgramCache,
    forget,
    install,
    original_forward,
    original_forwards,
    replace_forward,
    restore_forward,
    uninstall,
)
from seqcomp.lowering.variants import (
    CallSizes,
    Variant,
    describe_call,
    mesh_view,
    variant_of,
)
from seqcomp.plan.resolve import ResolvedPlan
from seqcomp.plan.rules import check_plan
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.random import drawn_seed, keys_of
from seqcomp.runtime.recompute import Recompute

_SLOT = "_seqcomp_compiled"

logger = logging.getLogger("seqcomp")


class CompiledModule:
    """One compiled module: its programs by variant, and the calls that run them."""

    def __init__(
        self,
        module: torch.nn.Module,
        resolved: ResolvedPlan,
        context: RankContext,
        *,
        cache: ProgramCache,
        dump: Path | None = None,
        keep_global: bool = False,
    ):
        self._module = module
        self._resolved = resolved
        self._context = context
        self._mesh = mesh_view(resolved)
        self._consensus = Consensus(context, resolved.checks)
        self._cache = cache
        self._dump = dump
        self._keep_global = keep_global
        self._programs: OrderedDict[tuple[str, Variant], tuple[Program, Callable[..., Any]]] = (
            OrderedDict()
        )
        self._last: tuple[Program, CallSizes] | None = None
        self._lengths: dict[int | None, tuple[Diagnostic, ...]] = {}
        self._signature = signature_of(module.forward)
        self._stateless = makes_cache(module)
        self._where = type(module).__name__
        self._modules = list(module.modules())
        self._reads: dict[str, list[tuple[str, Tensor, int]]] = {}
        self._uncalled: dict[str, torch.nn.Module] = {}
        self._accepted: tuple[str, CallSizes] | None = None  # as found last: it takes sympy
        self._epoch = 0
        self._compared = False
        self._closed = False
        self._division = Division(module, context, resolved, self._mesh.tensor)
        vars(module)[_SLOT] = self
        replace_forward(module, _forward)
        axes = tuple(self._mesh.degrees)
        wanted = [(a,) for a in axes if a in self._mesh.sequence]
        wanted += [self._mesh.sequence] if self._mesh.sequence else []
        context.prepare([*dict.fromkeys([*wanted, *([axes] if axes else [])])])

    # --- what a user can ask -------------------------------------------------------------

    @property
    def plan(self) -> Any:
        return self._resolved.plan

    @property
    def resolved(self) -> ResolvedPlan:
        """The plan with every default filled in."""
        return self._resolved

    @property
    def context(self) -> RankContext:
        """This rank's groups and byte counter."""
        return self._context

    @property
    def programs(self) -> tuple[Program, ...]:
        """The lowered programs, the most recently used last."""
        return tuple(program for program, _ in self._programs.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a compiled module is a plain module: groups and programs are not copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def close(self) -> None:
        """Gives the module its own forwards back and frees the process groups."""
        if self._closed:
            return
        self._closed = True
        uninstall(self._module)
        restore_forward(self._module)
        self._division.restore()
        vars(self._module).pop(_SLOT, None)
        self._programs.clear()
        self._context.close()

    def last_program(self) -> tuple[Program, CallSizes]:
        """The program and the sizes of the last call. Raises PlanError SC309 before the first."""
        if self._last is None:
            raise PlanError(
                [
                    diagnostic(
                        "SC309",
                        message="the module has not been compiled yet",
                        where=self._where,
                        found="no call so far",
                        legal="after the first call, or with example_inputs",
                        help="call the module once, or pass example_inputs to parallelize",
                    )
                ]
            )
        return self._last

    # --- calls ---------------------------------------------------------------------------

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the module on this rank. Raises PlanError alike on all ranks."""
        run, leaves, out_spec = self._ready(args, kwargs)
        results = list(run(self._module, *leaves))
        if self._division.is_sharded and not torch.is_grad_enabled():
            self._division.leave_call()
        return pytree.tree_unflatten(results, out_spec)

    # Ranks talk here, and capture: nothing for a compiler to see.
    @torch.compiler.disable
    def _ready(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], pytree.TreeSpec]:
        """The function of a call, its arguments, and how its results are arranged."""
        try:
            program, run, call = self._find(args, kwargs)
            raise_for_errors(program.unmet)
            if not self._compared:
                self._consensus.on_inputs(self._mesh.batch, call.tensors())
                self._compared = True
        except PlanError:
            self._division.abandon_call()
            raise
        return run, (*call.leaves, *self._dropout_keys(program)), program.out_spec

    def _dropout_keys(self, program: Program) -> tuple[Tensor, ...]:
        """The keys of one call, where it has dropout: of a seed that all ranks share."""
        count = program.capture.dropouts
        if not count:
            return ()
        seed = self._consensus.drawn(drawn_seed)
        return (keys_of(seed, count, self._context.device),)

    def prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Program, Call]:
        """Compiles for a call without running it; its program, and the call as it was bound."""
        program, _, call = self._find(*self._division.example(args, kwargs))
        return program, call

    def _find(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Program, Callable[..., Any], Call]:
        bound: tuple[Call, tuple[InputDims | None, ...], CallSizes, Variant] | None = None
        failure: PlanError | None = None
        modules = list(self._module.modules())
        try:
            bound = self._bind(args, kwargs, modules)
        except PlanError as error:
            failure = error
        self._consensus.on_call(failure, describe_call(bound) if bound else {})
        assert bound is not None
        call, dims, sizes, variant = bound
        self._forget_outdated(modules)
        found = self._lookup(variant, sizes)
        if found is None:
            found = self._compile(call, dims, sizes, variant)
        self._last = (found[0], found[0].sizes(sizes))
        return found[0], found[1], call

    def _bind(
        self, args: Sequence[Any], kwargs: dict[str, Any], modules: Sequence[torch.nn.Module]
    ) -> tuple[Call, tuple[InputDims | None, ...], CallSizes, Variant]:
        call, dims, sizes = bound_call(
            self._signature,
            args,
            kwargs,
            self._resolved,
            where=self._where,
            stateless=self._stateless,
        )
        if sizes.length not in self._lengths:
            problems = check_plan(self._resolved.plan, seq_len=sizes.length)
            self._lengths[sizes.length] = errors_in(problems)
        raise_for_errors(self._lengths[sizes.length])
        refuse_uncalled(self._uncalled)
        return call, dims, sizes, variant_of(modules, call, dims)

    def _forget_outdated(self, modules: list[torch.nn.Module]) -> None:
        """Programs hold for the modules and baked-in buffer values that they were captured with."""
        same = len(modules) == len(self._modules)
        if same and all(map(operator.is_, modules, self._modules)):
            kept = {k: v for k, v in self._programs.items() if self._is_current(v[0])}
            if len(kept) == len(self._programs):
                return
            self._programs = OrderedDict(kept)
        else:
            self._programs.clear()
            self._uncalled.clear()
        self._modules = modules
        self._epoch += 1

    def _is_current(self, program: Program) -> bool:
        return all(
            self._module.get_buffer(name) is tensor and tensor._version == version
            for name, tensor, version in self._reads[program.name]
        )

    def _lookup(
        self, variant: Variant, sizes: CallSizes
    ) -> tuple[Program, Callable[..., Any]] | None:
        for key, (program, run) in self._programs.items():
            if key[1] == variant and self._holds(program, sizes):
                self._programs.move_to_end(key)
                return program, run
        return None

    def _holds(self, program: Program, sizes: CallSizes) -> bool:
        if self._accepted == (program.name, sizes):
            return True
        batch = sizes.batch
        if batch is not None:
            batch *= self._mesh.degree(self._mesh.batch)
        layout = self._resolved.layout_for(program.sizes(sizes).length, program.facts.all_causal)
        if layout != program.layout or not program.capture.accepts(batch, sizes.length):
            return False
        self._accepted = (program.name, sizes)
        return True

    def _compile(
        self,
        call: Call,
        dims: tuple[InputDims | None, ...],
        sizes: CallSizes,
        variant: Variant,
    ) -> tuple[Program, Callable[..., Any]]:
        program: Program | None = None
        failure: PlanError | None = None
        try:
            self._division.refuse_meta(call)
            with original_forwards(self._module, _forward), self._division.whole():
                program = self._cache.get(
                    (variant, sizes, self._resolved.plan, self._epoch),
                    lambda name: build_program(
                        Request(
                            self._module,
                            call,
                            dims,
                            sizes,
                            self._resolved,
                            name,
                            self._dump,
                            self._keep_global,
                            sharded=self._division.is_sharded,
                        )
                    ),
                )
        except PlanError as error:
            failure = error
        except Exception as error:
            failure = internal_failure(error, self._where)
        if program is not None and failure is None:
            failure = self._division.problem(program)
        self._consensus.on_compile(
            failure,
            {"program": fingerprint(program), "weights": self._weights()} if program else {},
        )
        assert program is not None
        self._context.prepare(program.groups())
        self._division.apply(program)
        self._reads[program.name] = [
            (name, self._module.get_buffer(name), self._module.get_buffer(name)._version)
            for name in program.capture.read
        ]
        self._uncalled |= {path: self._module.get_submodule(path) for path in uncalled(program)}
        run = install(program, self._module, self.binding(program))
        self._programs[(program.name, variant)] = (program, run)
        if len(self._programs) > MAX_PROGRAMS:
            oldest, _ = self._programs.popitem(last=False)[1]
            forget(oldest, self._module)
        for finding in program.findings:
            logger.info("%s", finding)
        return program, run

    def binding(self, program: Program) -> ops.RankBinding:
        """What binds a program's operations to this rank."""
        return ops.RankBinding(
            context=self._context,
            sequence=self._mesh.sequence,
            layout=program.layout,
            ring_axis=self._resolved.ring_axis,
            ulysses_axis=self._resolved.ulysses_axis,
            module=self._module,
            recompute=Recompute(self._context.traffic),
        )

    def _weights(self) -> str:
        """A digest of samples of every parameter: equal weights give equal digests."""
        digest = hashlib.sha256()
        if self._division.is_done:
            return ""  # compared when they were whole
        for name, parameter in self._module.named_parameters():
            if parameter.is_meta:
                continue
            flat = parameter.detach().reshape(-1)
            step = max(1, flat.numel() // 256)
            digest.update(name.encode())
            digest.update(str(flat[::step].double().sum().item()).encode())
            digest.update(str(flat[::step].double().abs().sum().item()).encode())
        return digest.hexdigest()[:16]


def _forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    compiled: CompiledModule | None = vars(self).get(_SLOT)
    if compiled is None:
        return original_forward(self)(*args, **kwargs)
    return compiled.call(args, kwargs)


_forward.__name__ = "forward"  # as in program.py


def compiled_of(module: torch.nn.Module) -> CompiledModule | None:
    """The CompiledModule of a module, or None."""
    found: CompiledModule | None = vars(module).get(_SLOT)
    return found
