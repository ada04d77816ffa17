"""The ranking against every composition of small clusters, under hand-made costs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from seqcomp.search.rank import rank
from seqcomp.search.space import Limits, Space
from tests.unit.search.made_up import CLUSTER, HandMade

SPACE = Space(loss_chunks=(1, 8))
LIMITS = Limits(heads=((4, 2),), widths=(24,), batch=2, length=96, causal=True)


@settings(max_examples=12, deadline=None)
@given(
    gpus=st.sampled_from([1, 2, 4, 6]),
    capacity=st.sampled_from([0.5, 0.8, 1.2, 3.0]),
    slack=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 99),
)
def test_it_agrees_with_brute_force(gpus: int, capacity: float, slack: float, seed: int) -> None:
    pricing = HandMade(LIMITS, SPACE, capacity, seed, slack)
    best = {}
    for composition, seconds in pricing.everything(gpus):
        best[composition.degrees] = min(seconds, best.get(composition.degrees, seconds))
    found = rank(gpus, LIMITS, SPACE, pricing, CLUSTER, keep=3).ranked
    assert [item.price.step_seconds for item in found] == sorted(best.values())[:3]
    assert all(pricing.fits(item.composition) for item in found)
    assert all(best[i.composition.degrees] == i.price.step_seconds for i in found)


def test_bounds_spare_most_of_the_prices() -> None:
    pricing = HandMade(LIMITS, SPACE, capacity=3.0)
    whole = len(pricing.everything(6))
    pricing.asked.clear()
    ranking = rank(6, LIMITS, SPACE, pricing, CLUSTER, keep=1)
    assert len(pricing.asked) == ranking.counts.priced
    assert ranking.counts.priced < whole / 10


def test_nothing_fits_gives_nothing() -> None:
    pricing = HandMade(LIMITS, SPACE, capacity=0.0)
    assert rank(4, LIMITS, SPACE, pricing, CLUSTER).ranked == ()
