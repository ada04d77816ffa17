"""torch.compile around the compiled module: the same gradients, whole blocks, one graph for all.

On two ranks, with `aot_eager`: Dynamo and AOTAutograd, without generated code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import seqcomp
from seqcomp.capture.blocks import blocks_of
from seqcomp.runtime.traffic import TrafficRow
from tests.fixtures.compare import compare_grads, field_of, gradients_of
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.pool import Pools

PLANS = ("ring_2", "ulysses_2", "megatron_sp_2")
SPEC = Spec()
LENGTHS = (16, 24, 32)
ASIDE = "torch.compiler.disable()"


@dataclass(frozen=True)
class Seen:
    """Of one plan on one rank; graphs by length, gradients in units of the tolerance."""

    graphs: tuple[int, ...]
    breaks: tuple[str, ...]
    worst: float
    bytes_alike: bool


def _step(call: Any, model: nn.Module, length: int) -> dict[str, Tensor | None]:
    model.zero_grad()
    field_of(call(**inputs(SPEC, seq=length)), "loss").backward()
    return {n: None if g is None else g.clone() for n, g in gradients_of(model).items()}


def _watched(
    call: Any, model: nn.Module, want: list[dict[str, Tensor | None]], eager: set[TrafficRow]
) -> Seen:
    graphs, worst, traffic = [], 0.0, seqcomp.of(model).context.traffic
    counters.clear()
    for length, expected in zip(LENGTHS, want, strict=True):
        before = counters["stats"]["unique_graphs"]
        traffic.reset()
        found = _step(call, model, length)
        graphs.append(counters["stats"]["unique_graphs"] - before)
        worst = max(worst, compare_grads(expected, found)[0])
    breaks = tuple(str(reason) for reason in counters["graph_break"])
    return Seen(tuple(graphs), breaks, worst, set(traffic.rows()) == eager)


def on_rank(rank: int, world: int, plans: tuple[str, ...]) -> list[tuple[Seen, Seen | None]]:
    found = []
    for plan in plans:
        dynamo.reset()
        model = seqcomp.parallelize(build(SPEC), plan)
        traffic, want = seqcomp.of(model).context.traffic, []
        for length in LENGTHS:
            traffic.reset()
            want.append(_step(model, model, length))
        eager = set(traffic.rows())
        blocks = [model.get_submodule(path) for path in blocks_of(model)]
        for block in blocks:
            block.compile(backend="aot_eager")
        by_block = _watched(model, model, want, eager)
        whole = None
        if plan == PLANS[0]:
            for block in blocks:
                block._compiled_call_impl = None
            dynamo.reset()
            whole = _watched(torch.compile(model, backend="aot_eager"), model, want, eager)
        seqcomp.of(model).close()
        found.append((by_block, whole))
    dynamo.reset()
    return found


def test_blocks_are_one_graph_and_gradients_are_those_of_the_uncompiled(pools: Pools) -> None:
    for seen in pools.run(2, on_rank, PLANS, timeout=400):
        for blocks, whole in seen:
            # All layers share a graph; a second length makes one that any length fits.
            assert blocks.graphs == (1, 1, 0)
            assert blocks.breaks == ()
            for run in (blocks, whole):
                if run is not None:
                    assert run.worst <= 1
                    assert run.bytes_alike
            if whole is not None:  # what agrees and captures stands between graphs
                assert whole.graphs[0] >= 1
                assert all(ASIDE in reason for reason in whole.breaks)
