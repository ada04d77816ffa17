"""``seqcomp.verify``: a plan beside one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqcomp.lowering.build import output_mode
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import ResolvedPlan, resolve
from seqcomp.plan.schema import Plan
from seqcomp.verify.bounds import Bounds, tolerance_for
from seqcomp.verify.capturing import capture_divergence
from seqcomp.verify.diverging import first_divergence
from seqcomp.verify.gloo import on_processes
from seqcomp.verify.jobs import InputsFn, Observe, TraceValues
from seqcomp.verify.lockstep import lockstep
from seqcomp.verify.observe import (
    ModelFn,
    Observation,
    RankObservation,
    observe_one,
    seeded,
)
from seqcomp.verify.parts import own_cut
from seqcomp.verify.report import Divergence, VerifyReport, worst

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
HALF = (torch.bfloat16, torch.float16)


def verify(
    model_fn: ModelFn,
    plan: Plan | Mapping[str, Any] | str | Path,
    *,
    inputs_fn: InputsFn,
    backend: Literal["lockstep", "gloo"] = "lockstep",
    timeout: float = 300.0,
    progress: Progress = lambda stage, done, total: None,
) -> VerifyReport:
    """Runs forward and backward under `plan` and on one device, and compares everything.

    Loss, outputs and the gradient of every parameter, on every rank. Where they differ, both are
    run again value by value, and the first operation that differs is named with its module.

    model_fn: builds the module, in the mode (train, eval) and dtype to verify; it is called once
        for each rank and once for one device, each time with the same random seed. fp64 proves
        most: fp32 bounds are 1e-5 / 1e-4, half precision is held against fp64.
    inputs_fn: keyword arguments of one call on the global batch.
    backend: "lockstep" runs the ranks as threads of this process, any number of them; "gloo"
        starts a process for each (functions must be importable, and `if __name__ == "__main__":`
        must guard a script's own code).
    timeout: seconds that ranks may take.
    progress: called with (stage, steps done, steps in all).

    Raises PlanError as `parallelize` does; SC024 without any gradient, SC025 for functions that
    cannot be pickled.
    """
    if backend not in ("lockstep", "gloo"):
        raise ValueError(f"backend must be 'lockstep' or 'gloo', not {backend!r}")
    checked = Verification(model_fn, plan, inputs_fn, backend, timeout, progress)
    with torch.random.fork_rng():
        return checked.run()


_WHOLE = "sharded parameters (ranks that are threads hold them whole; --backend gloo shards them)"


class Verification:
    """One comparison; `run` does it."""

    def __init__(
        self,
        model_fn: ModelFn,
        plan: Plan | Mapping[str, Any] | str | Path,
        inputs_fn: InputsFn,
        backend: str,
        timeout: float,
        progress: Progress,
    ):
        self._model_fn = model_fn
        self._inputs_fn = inputs_fn
        self._backend = backend
        self._timeout = timeout
        self._progress = progress
        self._plan = load_plan(plan)
        mesh = " x ".join(f"{axis} {size}" for axis, size in self._plan.mesh.items())
        self._name = self._plan.name or (str(plan) if isinstance(plan, str | Path) else mesh)
        self._done = 0
        self._total = 3 + math.prod(self._plan.mesh.values())

    def run(self) -> VerifyReport:
        model = seeded(self._model_fn)
        paths = [path for path, _ in model.named_modules() if path]
        resolved = resolve(self._plan, module_paths=paths)
        weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        self._step("one device")
        single = observe_one(model, self._inputs_fn(), self._dropped(resolved))
        del model
        ranks = self._on_ranks(resolved, Observe(single.shapes), "ranks", keep_global=False)
        precision = max((r.precision for r in ranks), key=lambda d: torch.finfo(d).eps)
        if ranks[0].rounds_elsewhere:
            weights = precision
        tolerance = tolerance_for(precision, weights or torch.float32)
        truth = self._in_fp64(resolved) if precision in HALF else single
        self._step("comparing")
        bounds = Bounds(truth, single, tolerance)
        compared = [_compare(bounds, rank) for rank in ranks]
        problems = tuple(dict.fromkeys(text for _, texts in compared for text in texts))
        divergence = None
        if problems:
            largest = {torch.float64: 1e-7, torch.float32: 1e-3}.get(precision, 5e-2)
            if tolerance.name.endswith("inside"):
                largest = 1e-4
            divergence = self._first(resolved, single, largest)
        return _report(
            [relative for relative, _ in compared],
            problems,
            divergence,
            plan=self._name,
            ranks=len(ranks),
            backend=self._backend,
            precision=tolerance.name,
            findings=ranks[0].findings,
            not_shown=(_WHOLE,) if resolved.fsdp_axes and self._backend == "lockstep" else (),
        )

    def _first(
        self, resolved: ResolvedPlan, single: Observation, tolerance: float
    ) -> Divergence | None:
        self._step("looking for the first divergence")
        job = TraceValues(single.shapes, self._model_fn, self._inputs_fn)
        # Values are the same with whole parameters, and the global graph can be run on those.
        resolved = replace(resolved, fsdp_axes=())
        ranks = self._on_ranks(resolved, job, "tracing", keep_global=True)
        whole = ranks[0].whole
        assert whole is not None
        found = first_divergence(ranks, whole, tolerance)
        if found is not None and found.phase == "forward":
            return found
        captured = capture_divergence(
            whole, single, partial(seeded, self._model_fn), self._inputs_fn(), tolerance
        )
        return captured or found

    def _on_ranks(
        self, resolved: ResolvedPlan, job: Callable[..., T], stage: str, *, keep_global: bool
    ) -> list[T]:
        def advance() -> None:
            self._step(stage)

        if self._backend == "gloo":
            return on_processes(
                self._model_fn,
                resolved,
                job,
                inputs_fn=self._inputs_fn,
                keep_global=keep_global,
                timeout=self._timeout,
                on_rank=advance,
            )

        def work(*args: Any) -> T:
            result = job(*args)
            advance()
            return result

        return lockstep(
            partial(seeded, self._model_fn),
            self._plan,
            work,
            inputs=self._inputs_fn(),
            timeout=self._timeout,
            keep_global=keep_global,
            prepare=True,
        )

    def _in_fp64(self, resolved: ResolvedPlan) -> Observation:
        inputs = {
            name: pytree.tree_map(_widened, value) for name, value in self._inputs_fn().items()
        }
        return observe_one(seeded(self._model_fn).double(), inputs, self._dropped(resolved))

    @staticmethod
    def _dropped(resolved: ResolvedPlan) -> Callable[[str], bool]:
        return lambda name: output_mode(resolved, name) == "drop"

    def _step(self, stage: str) -> None:
        self._progress(stage, min(self._done, self._total), self._total)
        self._done += 1


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


Relative = dict[str, dict[str, float]]


def _compare(bounds: Bounds, rank: RankObservation) -> tuple[Relative, list[str]]:
    """Relative errors of one rank by kind and name, and what is beyond its bound."""
    seen, truth = rank.seen, bounds.truth
    found: dict[str, dict[str, tuple[float, float]]] = {
        "loss": {"loss": bounds.objective(seen.objective)} if _is_whole(truth) else {},
        "output": {},
        "gradient": {},
    }
    for name in truth.outputs:
        got = seen.outputs.get(name)
        shape = tuple(got.shape) if isinstance(got, Tensor) else ()
        found["output"][name] = bounds.output(name, partial(_share, rank, shape), got)
    for name in truth.gradients:
        cut = rank.cuts.get(name)
        found["gradient"][name] = bounds.gradient(
            name, partial(_own, rank, cut), seen.gradients.get(name)
        )
    problems = [
        f"rank {rank.rank}: {kind} {name}: off by {relative:.2e}, {units:.3g} x what is allowed"
        for kind, entries in found.items()
        for name, (relative, units) in entries.items()
        if not units <= 1
    ]
    relative = {kind: {n: r for n, (r, _) in entries.items()} for kind, entries in found.items()}
    return relative, problems


def _share(rank: RankObservation, shape: tuple[int, ...], whole: Tensor) -> Tensor:
    return rank.share.of(whole, shape)


def _own(rank: RankObservation, cut: Any, whole: Tensor) -> Tensor:
    return own_cut(whole, cut, rank.place)


def _is_whole(truth: Observation) -> bool:
    """Whether the objective is the model's own loss; a projection is a contribution only."""
    return any(isinstance(x, Tensor) and x.dim() == 0 for x in truth.outputs.values())


def _report(
    errors: Sequence[Relative],
    problems: tuple[str, ...],
    divergence: Divergence | None,
    **about: Any,
) -> VerifyReport:
    largest = {
        kind: worst({f"{i} {n}": v for i, rank in enumerate(errors) for n, v in rank[kind].items()})
        for kind in ("loss", "output", "gradient")
    }
    return VerifyReport(
        ok=not problems,
        loss_rel=largest["loss"][1],
        output_rel=largest["output"][1],
        max_grad_rel=largest["gradient"][1],
        worst_parameter=largest["gradient"][0].partition(" ")[2],
        first_divergence=divergence,
        problems=problems,
        **about,
    )
