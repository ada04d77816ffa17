"""Dropout on real ranks: each has random numbers of its own, and those of the first count."""

from __future__ import annotations

import torch

import seqcomp
from tests.fixtures import plans
from tests.fixtures.compare import compare_grads, gradients_of, value_distance
from tests.fixtures.dropping import SEED, batch, build, one_device, recompute, seeds
from tests.fixtures.pool import Pools

PLANS = [
    plans.ring(2, "striped"),
    {**plans.megatron(2), "checks": "off"},
    {**plans.ulysses(2), "checks": "compile"},
]


def train(rank: int, world: int) -> list[tuple[float, float, bool]]:
    """For each plan the distances of losses and gradients, and whether each rank drew as often."""
    found = []
    for plan in PLANS:
        batches = [batch(0), batch(1)]
        model = seqcomp.parallelize(build(), plan=plan, example_inputs=batch())
        recompute(model, reentrant=False)
        torch.manual_seed(SEED + rank)
        losses = []
        for given in batches:
            loss = model(**given)["loss"]
            loss.backward()
            losses.append(loss.detach())
        drew = seeds(3, SEED + rank)[2] == seeds_left()
        want_losses, want = one_device(batches)
        loss_distance = max(map(value_distance, want_losses, losses))
        found.append((loss_distance, compare_grads(want, gradients_of(model))[0], drew))
        seqcomp.of(model).close()
    return found


def seeds_left() -> int:
    from seqcomp.runtime.random import drawn_seed

    return drawn_seed()


def quiet(rank: int, world: int) -> bool:
    """A program without dropout leaves the random state alone."""
    model = seqcomp.parallelize(build(0.0), plan=plans.ring(2))
    model(**batch())
    before = torch.get_rng_state()
    model(**batch())["loss"].backward()
    seqcomp.of(model).close()
    return bool(torch.equal(before, torch.get_rng_state()))


def test_the_first_rank_draws_for_all(pools: Pools) -> None:
    for rank in pools.run(2, train):
        for loss, gradient, drew in rank:
            assert loss <= 1
            assert gradient <= 1
            assert drew, "the state of a rank did not move on as that of the first"


def test_nothing_is_drawn_without_dropout(pools: Pools) -> None:
    assert all(pools.run(2, quiet))
