"""Case 21: micro-batches with 3, 13 and 0 valid labels add up to the mean over 16 tokens.

Then clipping with torch's own function and one AdamW step, next to one process that sees all
tokens at once. Weighting each micro-batch alike is the fault that people met.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import seqcomp
from tests.fixtures import plans
from tests.fixtures.compare import FP64, compare_grads, gradients_of, whole
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.pool import Pools

SPEC = Spec(vocab=96, labels="shifted", loss="divisor")
COUNTS = (3, 13, 0)
MESH = plans.with_tensor(plans.ring(2, "zigzag"), 2)
USP = plans.usp(2, 2, "zigzag")


def micro_batches() -> list[dict[str, Tensor]]:
    """One row of 16 tokens each; the divisor is the number of valid labels of all three."""
    found = []
    for seed, count in enumerate(COUNTS):
        batch = inputs(SPEC, batch=1, seq=16, seed=seed)
        batch["labels"][:, count:] = -100
        batch["divisor"] = torch.tensor(float(sum(COUNTS)), dtype=torch.float64)
        found.append(batch)
    assert [int((b["labels"] != -100).sum()) for b in found] == list(COUNTS)
    return found


def together() -> dict[str, Tensor]:
    parts = micro_batches()
    batch = {name: torch.cat([p[name] for p in parts]) for name in ("input_ids", "labels")}
    return {**batch, "divisor": parts[0]["divisor"]}


def finish(model: nn.Module) -> float:
    """Clips to a tenth of the norm and takes a step; the norm before."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    limit = 0.1 * float(whole(norm))
    seen = nn.utils.clip_grad_norm_(model.parameters(), limit)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    return float(whole(seen))


def alone() -> tuple[dict[str, Tensor | None], dict[str, Tensor], float]:
    model = build(SPEC)
    model(**together())["loss"].backward()
    gradients = gradients_of(model)
    norm = finish(model)
    return gradients, {name: p.detach() for name, p in model.named_parameters()}, norm


def test_each_micro_batch_alike_is_far_away() -> None:
    """The positive control: means of micro-batches, averaged over those that have labels."""
    want, _, _ = alone()
    model = build(SPEC)
    for batch in micro_batches()[:2]:
        count = (batch["labels"] != -100).sum()
        loss = model(**batch)["loss"] * batch["divisor"] / count
        (loss / 2).backward()
    assert compare_grads(want, gradients_of(model), FP64)[0] > 100


def on_rank(rank: int, world: int, plan: plans.Plan, sync: str) -> None:
    want, weights, norm = alone()
    model = seqcomp.parallelize(build(SPEC), plan=plan, example_inputs=micro_batches()[0])
    for index, batch in enumerate(micro_batches()):
        if sync == "last":
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(index == len(COUNTS) - 1)
        model(**batch)["loss"].backward()
    distance, worst = compare_grads(want, gradients_of(model), FP64)
    assert distance <= 1, worst
    assert finish(model) == pytest.approx(norm, rel=1e-9)
    for name, parameter in model.named_parameters():
        got = whole(parameter.detach())
        torch.testing.assert_close(got, weights[name], rtol=1e-8, atol=1e-9, msg=name)
    seqcomp.of(model).close()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "sync"),
    [
        (MESH, "each"),
        (plans.with_fsdp(MESH), "each"),
        (plans.with_fsdp(MESH), "last"),
        (plans.with_fsdp(USP), "last"),
    ],
    ids=lambda x: plans.name(x) if isinstance(x, dict) else x,
)
def test_accumulated_clipped_step(pools: Pools, plan: plans.Plan, sync: str) -> None:
    pools.run(math.prod(plan["mesh"].values()), on_rank, plan, sync)
