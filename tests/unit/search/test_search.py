"""Searches under the real cost model: legal, the best there is, and honest where nothing fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seqcomp.cost.named import load_shape
from seqcomp.cost.run import Run
from seqcomp.cost.shape import ModelShape
from seqcomp.diagnostics import PlanError, errors_in
from seqcomp.hardware.cluster import Cluster
from seqcomp.hardware.load import load_cluster
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.load import dump_plan, load_plan
from seqcomp.plan.rules import check_plan
from seqcomp.search.composition import Composition, Degrees
from seqcomp.search.feasible import changes
from seqcomp.search.pricing import Pricer
from seqcomp.search.search import search
from seqcomp.search.space import Space, orders_of
from tests.fixtures.pricing import SMALL, ideal
from tests.unit.search.made_up import all_compositions

SPACE = Space(loss_chunks=(1, 8))
DROP = FrozenMap({"logits": "drop"})
H100 = load_cluster("h100")


def small(heads: int, kv_heads: int, mask: str = "causal") -> ModelShape:
    return ModelShape.decoder(
        layers=3,
        hidden=64 * heads,
        heads=heads,
        kv_heads=kv_heads,
        vocab=8192,
        mlp_width=192 * heads,
        mask=mask,  # type: ignore[arg-type]
        window=96 if mask == "window" else 0,
    )


def machine(memory: int, gpus_per_node: int) -> Cluster:
    """An H100's speeds in small nodes, with little memory, so that options of memory matter."""
    device = replace(H100.device, memory=memory)
    return replace(H100, device=device, gpus_per_node=gpus_per_node)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    gpus=st.sampled_from([1, 2, 4]),
    model=st.sampled_from([small(4, 2), small(2, 2, "window"), small(6, 1, "full")]),
    memory=st.sampled_from([2**28, 2**30, 2**36]),
    per_node=st.sampled_from([1, 2]),
    batch=st.sampled_from([1, 4]),
    length=st.sampled_from([4096, 12288]),
    mode=st.sampled_from(["train", "prefill"]),
)
def test_nothing_enumerated_is_faster(
    gpus: int, model: ModelShape, memory: int, per_node: int, batch: int, length: int, mode: str
) -> None:
    cluster = machine(memory, per_node)
    run = Run(length, batch, mode=mode)  # type: ignore[arg-type]
    space = SPACE if run.trains else replace(SPACE, checkpoint=("none",), loss_chunks=(1,))
    pricer = Pricer(model, cluster, run, DROP)
    limits = pricer.limits(padding=False)
    bounded = pricer.within(limits, space)
    fitting: dict[object, float] = {}
    for composition in all_compositions(gpus, limits, space, cluster):
        price = pricer.price(composition)
        degrees = composition.degrees
        if price.fits:
            fitting[degrees] = min(fitting.get(degrees, price.step_seconds), price.step_seconds)
            assert bounded.floor(composition) <= price.step_seconds * (1 + 1e-9)
            assert bounded.floor_of_degrees(degrees) <= price.step_seconds * (1 + 1e-9)
    if not fitting:
        with pytest.raises(PlanError, match="SC122"):
            search(model, cluster, run, gpus=gpus, outputs=DROP, space=space)
        return
    found = search(model, cluster, run, gpus=gpus, outputs=DROP, space=space, keep=2)
    assert [i.price.step_seconds for i in found.ranked] == sorted(fitting.values())[:2]
    for item in found.ranked:
        plan = load_plan(dump_plan(item.composition.to_plan(DROP)))
        said = check_plan(plan, model.facts, world_size=gpus, seq_len=length)
        assert not errors_in(said)
        assert item.price.fits


def test_ulysses_stays_in_a_node_and_the_ring_goes_between() -> None:
    found = search(load_shape("llama3-8b"), H100, Run(1 << 18), gpus=32, outputs=DROP)
    mesh = found.plan.mesh
    assert list(mesh) == ["ring", "ulysses"]
    assert mesh["ulysses"] % 8 == 0
    assert found.plan.strategies.ring is not None
    assert found.plan.strategies.ring.layout == "zigzag"
    why = {reason.decision: reason for reason in found.reasons}
    contiguous = next(a for a in why["layout"].instead if a.value == "contiguous")
    assert contiguous.step_seconds > 1.4 * found.best.price.step_seconds
    others = [item.price.step_seconds for item in found.ranked]
    assert others == sorted(others)


def test_reasons_and_the_second_are_told_in_numbers_that_add_up() -> None:
    found = search(load_shape("llama3-8b"), H100, Run(1 << 17), gpus=8, outputs=DROP)
    best = found.best.price
    checkpoint = next(r for r in found.reasons if r.decision == "checkpoint")
    assert checkpoint.chosen == found.plan.memory.checkpoint != "none"
    without = next(a for a in checkpoint.instead if a.value == "none")
    assert not without.fits
    assert without.peak_bytes > best.capacity
    assert found.runner_up is not None
    terms = {term.what: term for term in found.runner_up.terms}
    assert terms["step"].before == best.step_seconds
    for whole, part, values in (
        ("exposed", "waiting for ", "s"), ("sent", "sent over ", "B"), ("peak", "held: ", "B"),
    ):  # fmt: skip
        parts = [t for name, t in terms.items() if name.startswith(part)]
        assert {t.unit for t in parts} == {values}
        assert sum(t.before for t in parts) == pytest.approx(terms[whole].before)
        assert sum(t.after for t in parts) == pytest.approx(terms[whole].after)
    assert {note.code for note in found.notes} >= {"SC421", "SC422"}


def test_close_calls_are_said() -> None:
    found = search(SMALL, ideal(), Run(4096), gpus=4, outputs=DROP)
    first, *others = (item.price.step_seconds for item in found.ranked)
    near = sum(seconds < 1.05 * first for seconds in others)
    assert near > 0
    (note,) = [n for n in found.notes if n.code == "SC423"]
    assert isinstance(note.found, tuple)
    assert len(note.found) == near


def test_what_the_times_leave_out_of_a_model_is_said() -> None:
    """Linears that tensor ranks leave whole count nowhere: whoever prices such a plan is told."""
    model = replace(small(4, 2), by_tokens=("layers.0.attn.q",))
    cluster = machine(2**36, 4)
    found = search(model, cluster, Run(4096), gpus=4, outputs=DROP)
    assert any(item.composition.degrees.tensor > 1 for item in found.ranked)
    (note,) = [n for n in found.notes if n.code == "SC417"]
    assert "layers.0.attn.q" in note.message
    plain = search(small(4, 2), cluster, Run(4096), gpus=4, outputs=DROP)
    assert "SC417" not in {n.code for n in plain.notes}


def test_a_plan_that_nearly_fills_the_memory_is_said() -> None:
    roomy = search(small(4, 2), machine(2**36, 2), Run(4096), gpus=2, outputs=DROP)
    peak = roomy.best.price.peak_bytes
    tight = search(small(4, 2), machine(round(peak / 0.97), 2), Run(4096), gpus=2, outputs=DROP)
    assert tight.best == replace(roomy.best, price=tight.best.price)
    assert "SC424" in {note.code for note in tight.notes} - {note.code for note in roomy.notes}


def test_a_length_that_nothing_divides_is_padded() -> None:
    found = search(small(4, 2), machine(2**36, 2), Run(4099), gpus=4, outputs=DROP)
    assert found.plan.padding == "pad"
    (note,) = [n for n in found.notes if n.code == "SC412"]
    factor = found.best.composition.factor
    assert factor > 1
    assert note.legal == (4099 // factor * factor, (4099 // factor + 1) * factor)
    longer = search(small(4, 2), machine(2**36, 2), Run(4112), gpus=4, outputs=DROP)
    assert longer.plan.padding == "none"
    assert found.best.price.step_seconds <= longer.best.price.step_seconds
    assert not errors_in(check_plan(found.plan, found.pricer.model.facts, seq_len=4099))


def test_where_nothing_fits_the_changes_make_it_fit_and_are_the_nearest() -> None:
    model, cluster = small(4, 2), machine(2**28, 2)
    run = Run(1 << 14, batch=8)
    with pytest.raises(PlanError) as caught:
        search(model, cluster, run, gpus=2, outputs=DROP, space=SPACE)
    (said,) = caught.value.diagnostics
    assert said.code == "SC122"
    pricer = Pricer(model, cluster, run, DROP)
    found = {change.what: change for change in changes(pricer, SPACE, 2)}
    assert set(found) == {"gpus", "seq_len", "batch"}
    gpus, length, batch = (found[what].value for what in ("gpus", "seq_len", "batch"))
    assert all(f"use {w}" in (said.help or "") for w in (f"{gpus} GPUs", f"a length of {length}"))
    for change in found.values():
        assert change.least.bytes <= cluster.device.memory

    def fits(gpus: int, run: Run) -> bool:
        try:
            search(model, cluster, run, gpus=gpus, outputs=DROP, space=SPACE, keep=1)
        except PlanError:
            return False
        return True

    assert fits(gpus, run)
    assert not fits(gpus // 2, run)
    assert fits(2, Run(length, batch=8))
    assert not fits(2, Run(length + 4, batch=8))
    assert fits(2, Run(1 << 14, batch=batch))
    assert batch == 1 or not fits(2, Run(1 << 14, batch=2 * batch))


def test_seventy_billion_do_not_fit_on_one_gpu() -> None:
    with pytest.raises(PlanError, match=r"optimizer state.*\n.*\n.*\n.*use \d+ GPUs"):
        search(load_shape("llama3-70b"), H100, Run(1 << 17), gpus=1, outputs=DROP)


def test_numbers_of_gpus_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(PlanError, match="SC120") as caught:
        search(SMALL, H100, Run(4096), gpus=H100.gpus + 8)
    assert str(H100.gpus) in str(caught.value)


def test_few_of_many_thousands_are_priced() -> None:
    found = search(
        load_shape("gpt-175b"), load_cluster("a100"), Run(2048, 64), gpus=64, outputs=DROP
    )
    assert found.space > 100_000
    assert found.counts.priced < 200


@pytest.mark.parametrize("per_node", [4, 6])
def test_orders_that_are_left_out_cost_what_others_do(per_node: int) -> None:
    cluster = ideal(inter=1e9, gpus_per_node=per_node)
    pricer = Pricer(SMALL, cluster, Run(4096, 2), DROP)
    degrees = Degrees(2, 2, 2, 2)

    def seconds(order: tuple[str, ...]) -> float:
        fsdp = tuple(axis for axis in order if axis in ("data", "ulysses"))
        return pricer.price(Composition(degrees, order, fsdp=fsdp)).step_seconds

    kept = {round(seconds(order), 12) for order in orders_of(degrees, cluster)}
    every = {round(seconds(order), 12) for order in itertools.permutations(degrees.axes)}
    assert kept == every
    assert len(kept) > 1
