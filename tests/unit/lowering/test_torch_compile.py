"""torch.compile around a compiled module: the same gradients, and blocks in one piece.

Ranks are threads, of which the first compiles: what it sends must fit what the other sends, which
runs as it did. `aot_eager`: Dynamo and AOTAutograd, without generated code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from seqcomp.lowering.ops import mlp
from seqcomp.runtime import chunked_mlp
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import dropping, experts, plans
from tests.fixtures.again import with_memory
from tests.fixtures.biased import biased
from tests.fixtures.masked import STRUCTURED, build_masked, masked_inputs
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.traced import ASIDE, Counted, Seen, counted, traced

SPEC, ONE = Spec(vocab=96), Spec(vocab=96, layers=1)
MASKS = {name: STRUCTURED[name] for name in ("documents", "causal_and_padding")}
ROUTED = {**plans.ring(2), "overrides": [{"match": "layers.1.mlp", "token_local": True}]}


@dataclass(frozen=True)
class Case:
    plan: plans.Plan
    make: Callable[[], nn.Module] = lambda: build(SPEC)
    batches: tuple[dict[str, Any], ...] = (inputs(SPEC),)


def run(case: Case, *, everywhere: bool = False, **how: Any) -> tuple[list[Seen], Counted]:
    with counted() as found:
        seen = lockstep(
            case.make,
            case.plan,
            lambda model, context, _: traced(
                model, context, found, case.batches, compiles=everywhere or context.rank == 0, **how
            ),
            timeout=240,
        )
    return seen, found


def exact(seen: list[Seen], found: Counted) -> bool:
    return max(rank.worst for rank in seen) <= 1 and found.waiting() == 0


@pytest.mark.parametrize(
    "plan",
    [
        with_memory(plans.ring(2), checkpoint="block", loss_chunks=2),
        with_memory(plans.ulysses(2), checkpoint="selective"),
    ],
    ids=["ring, block", "ulysses, selective"],
)
def test_blocks_are_one_graph_for_any_length(plan: plans.Plan) -> None:
    lengths = tuple(inputs(SPEC, seq=length) for length in (16, 24, 32))
    seen, found = run(Case(plan, batches=lengths))
    assert exact(seen, found)
    assert found.breaks == ()
    assert found.graphs == 2  # both layers share one; a second length makes one for all
    assert seen[0].bytes_alike
    again = plan.get("memory", {}).get("checkpoint")
    if again == "block":  # nothing in a block waits for its backward: all of it is made again
        assert seen[0].tapes == (0, 0, 0)
    else:
        assert min(seen[0].tapes) >= SPEC.layers


@pytest.mark.parametrize("checkpoint", ["selective", "block"])
def test_a_tensor_axis(checkpoint: str) -> None:
    """What a region that runs again gathers is gathered once more than uncompiled."""
    plan = with_memory(plans.megatron(2), checkpoint=checkpoint, loss_chunks=2)
    seen, found = run(Case(plan), everywhere=True)
    assert exact(seen, found)
    assert found.breaks == ()
    assert found.graphs == 2  # one a rank
    assert not any(rank.bytes_alike for rank in seen)


@pytest.mark.parametrize("plan", [plans.ring(2), plans.megatron(2)], ids=plans.name)
def test_mlps_in_chunks(plan: plans.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_mlp, "FEWEST", 2)
    chunks: list[int] = []
    run_in_chunks = mlp.chunked

    def chunked(how: chunked_mlp.Chunks, *args: Any) -> Any:
        chunks.append(how.number)
        return run_in_chunks(how, *args)

    monkeypatch.setattr(mlp, "chunked", chunked)
    seen, found = run(Case(with_memory(plan, checkpoint="selective")), everywhere=True)
    assert exact(seen, found)
    assert found.breaks == ()
    assert min(chunks) > 1


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (Case(plans.ring(2), dropping.build, (dropping.batch(),)), 1),
        (Case(plans.ring(2), lambda: build(Spec(vocab=96, mixer="conv"))), 2),
        (Case(with_memory(plans.ring(2), checkpoint="block"), biased), 1),
        (Case(plans.ring(2), build_masked(MASKS, stacked=True), (masked_inputs(),)), 2),
        (Case(ROUTED, experts.routed), 2),
    ],
    ids=["dropout", "convolution", "learned bias", "masks of data", "experts"],
)
def test_no_part_of_a_block_breaks_its_graph(case: Case, kinds: int) -> None:
    seen, found = run(case)
    assert exact(seen, found)
    assert found.breaks == ()
    assert found.graphs == kinds
    assert seen[0].bytes_alike


def test_half_precision() -> None:
    case = Case(plans.ring(2), lambda: build(ONE, dtype=torch.float32))
    seen, found = run(case, around=lambda: torch.autocast("cpu", torch.bfloat16))
    assert seen[0].worst == 0  # bit by bit: nothing is rounded otherwise
    assert found.breaks == ()


def test_the_whole_model() -> None:
    """What agrees, captures and sums gradients stands between graphs, the rest is in them."""
    plan = with_memory(plans.ring(2), loss_chunks=2)
    seen, found = run(Case(plan, lambda: build(ONE)), whole=True)
    assert exact(seen, found)
    assert found.graphs >= 1
    assert all(ASIDE in reason for reason in found.breaks)
    assert seen[0].bytes_alike


def test_inductor() -> None:
    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"inductor needs a C++ compiler: {error}")
    seen, found = run(Case(plans.ring(2), lambda: build(ONE)), backend="inductor")
    assert exact(seen, found)
    assert found.breaks == ()
    assert found.graphs == 1
