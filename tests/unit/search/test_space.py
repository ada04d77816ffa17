"""The space is what the rules of plans accept, and orders that cost the same stand in it once."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from seqcomp.diagnostics import errors_in
from seqcomp.plan.facts import AttentionFacts, ModelFacts
from seqcomp.plan.load import dump_plan, load_plan
from seqcomp.plan.rules import check_plan
from seqcomp.search.composition import Composition, Degrees
from seqcomp.search.space import (
    Limits,
    Space,
    all_degrees,
    arrangements_of,
    orders_of,
)
from tests.fixtures.pricing import ideal
from tests.unit.search.made_up import CLUSTER, all_compositions

LAYOUTS = ("contiguous", "striped", "zigzag")
HEADS = [(1, 1), (4, 2), (6, 6), (8, 1), (12, 4)]


def facts_of(limits: Limits) -> ModelFacts:
    return ModelFacts(
        tuple(
            AttentionFacts(f"layers.{i}", q, kv, 8, limits.causal)
            for i, (q, kv) in enumerate(limits.heads)
        ),
        hidden=64,
        mlp_width=limits.widths[0],
    )


limits = st.builds(
    Limits,
    heads=st.lists(st.sampled_from(HEADS), min_size=1, max_size=2).map(tuple),
    widths=st.sampled_from([(24,), (96,), (10,)]),
    batch=st.sampled_from([1, 2, 6]),
    length=st.sampled_from([24, 48, 96, 100, 7]),
    causal=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(gpus=st.sampled_from([1, 2, 4, 6, 8, 12, 24]), limits=limits)
def test_the_space_is_what_the_rules_accept(gpus: int, limits: Limits) -> None:
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    legal = set()
    for data, ring, ulysses, tensor in itertools.product(sizes, repeat=4):
        degrees = Degrees(data, ring, ulysses, tensor)
        if degrees.gpus != gpus or limits.batch % data:
            continue
        for layout in LAYOUTS if ring > 1 else LAYOUTS[:1]:
            plan = Composition(degrees, degrees.axes, layout).to_plan()
            if not errors_in(
                check_plan(plan, facts_of(limits), world_size=gpus, seq_len=limits.length)
            ):
                legal.add((degrees, layout))
    found = {
        (degrees, arranged.layout)
        for degrees in all_degrees(gpus, limits)
        for arranged in arrangements_of(degrees, degrees.axes, limits, Space())
    }
    without_use = {(d, x) for d, x in legal if x != "contiguous" and not limits.causal}
    assert found == legal - without_use


@settings(max_examples=10, deadline=None)
@given(gpus=st.sampled_from([1, 4, 6]), limits=limits)
def test_every_composition_is_a_plan_that_its_text_gives_again(gpus: int, limits: Limits) -> None:
    for composition in itertools.islice(
        all_compositions(gpus, limits, Space(), CLUSTER), 0, None, 97
    ):
        plan = composition.to_plan({"logits": "drop"})
        assert load_plan(dump_plan(plan)) == plan
        assert dict(plan.mesh) == composition.mesh


def test_orders_differ_in_what_stays_within_a_node() -> None:
    two = Degrees(ring=4, ulysses=8)
    assert list(orders_of(two, ideal(gpus_per_node=8))) == [
        ("ring", "ulysses"),
        ("ulysses", "ring"),
    ]
    # Where every neighbour is in another node, one order stands for all.
    assert list(orders_of(Degrees(ring=2, ulysses=2), ideal(gpus_per_node=1))) == [
        ("ring", "ulysses")
    ]
    # 16 GPUs of a node hold two of the axes, in either order.
    four = Degrees(4, 4, 4, 4)
    assert len(list(orders_of(four, ideal(gpus_per_node=16)))) == math.comb(4, 2)


def test_one_gpu_is_a_plan_too() -> None:
    (degrees,) = all_degrees(1, Limits(((4, 2),), (8,), 3, 7, True))
    assert Composition(degrees, ()).to_plan() == load_plan("data_1")
