"""Case 23: ranks that call differently all get the same error; lengths may change between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqcomp.diagnostics import PlanError
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.models import M0, build, inputs
from tests.fixtures.parity import Call, Case, check_parity, check_refused
from tests.fixtures.pool import Pools

PLANS = (plans.ring(4, "contiguous"), plans.ulysses(4))


def call_differently(rank: int, world: int, plan: Any, how: str, after_a_good_call: bool) -> Any:
    """(codes, text) of the error of this rank; then one good call, which must still work."""
    import seqcomp

    model = seqcomp.parallelize(build(), plan=plan)
    if after_a_good_call:
        model(**inputs())["loss"].backward()
    batch: dict[str, Any] = inputs(seq=12) if how == "length" and rank == 3 else inputs()
    if how == "batch" and rank == 1:
        batch = inputs(batch=1)
    if how == "none" and rank == 0:
        del batch["labels"]
    if how == "mode" and rank == 2:
        model.eval()
    if how == "missing" and rank == 2:
        del batch["input_ids"]
    try:
        model(**batch)
    except seqcomp.PlanError as error:
        seen = tuple(d.code for d in error.diagnostics), str(error)
    else:
        seen = (), "no error"
    model.train()
    model(**inputs())["loss"].backward()
    seqcomp.of(model).close()
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("after_a_good_call", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("length", ("input_ids", "16", "12")),
        ("batch", ("input_ids", "2", "1")),
        ("none", ("labels",)),
        ("mode", ()),
        ("missing", ("input_ids",)),
    ],
)
def test_ranks_that_call_differently(
    pools: Pools, plan: plans.Plan, how: str, words: tuple[str, ...], after_a_good_call: bool
) -> None:
    seen = pools.run(4, call_differently, plan, how, after_a_good_call)
    assert seen == [seen[0]] * 4
    codes, text = seen[0]
    assert codes, text
    for word in words:
        assert word in text


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_a_shard_where_the_plan_insists_on_the_full_length(pools: Pools, plan: plans.Plan) -> None:
    insisting = {**plan, "inputs": {"input_ids": {"batch": 0, "seq": 1, "length": 16}}}
    check_parity(pools, Case(insisting))
    check_refused(pools, Case(insisting, M0, (Call({"seq": 4}),)), "input_ids", "16", "4")


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_lengths_and_batches_that_change_on_all_ranks(pools: Pools, plan: plans.Plan) -> None:
    calls = tuple(Call({"seq": s}) for s in (16, 24, 8, 16))
    calls += (Call({"batch": 2}), Call({"batch": 1}))
    check_parity(pools, Case(plan, M0, calls))


class InAnyOrder(nn.Module):
    """Goes through its parts in another order on every rank, as a set of names may."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 8)
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "b", "c", "d")})

    def forward(self, input_ids: Tensor) -> Tensor:
        names, first = list(self.parts), dist.get_rank()
        x = self.embed(input_ids)
        return torch.stack([self.parts[n](x).tanh() for n in names[first:] + names[:first]]).sum(0)


def in_any_order(spec: Any) -> nn.Module:
    torch.manual_seed(0)
    return InAnyOrder()


def ids_alone(spec: Any) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(32).view(2, 16)}


@pytest.mark.distributed
def test_programs_in_another_order_are_refused_and_say_what_to_set(pools: Pools) -> None:
    case = Case(PLANS[0], build=in_any_order, make_inputs=ids_alone)
    assert check_refused(pools, case, "program", "PYTHONHASHSEED=0") == ("SC504",)


def other_tokens(plan: Any, *, checks: str = "call") -> list[tuple[tuple[str, ...], str]]:
    """What each rank says when rank 3 has another token; then all have the same, which works."""

    def step(model: nn.Module, context: RankContext, _: dict[str, Any]) -> Any:
        batch = inputs()
        if context.rank == 3:
            batch["input_ids"][1, 5] += 1
        seen: tuple[tuple[str, ...], str] = (), ""
        try:
            model(**batch)
        except PlanError as error:
            seen = tuple(d.code for d in error.diagnostics), str(error)
        model(**inputs())["loss"].backward()
        return seen

    return lockstep(build, {**plan, "checks": checks}, step)


def test_other_tokens_on_one_rank_are_found_in_the_first_step() -> None:
    for plan in PLANS:
        seen = other_tokens(plan)
        assert seen == [seen[0]] * 4
        codes, text = seen[0]
        assert codes == ("SC504",)
        assert "input_ids" in text
        assert "ranks [0, 1, 2]" in text
        assert "ranks [3]" in text
        assert "labels" not in text
    # Ranks 2 and 3 are a group of their own here, and slices of the batch may differ.
    codes, text = other_tokens(plans.with_data(plans.ulysses(2), 2))[0]
    assert codes == ("SC504",)
    assert "ranks [2]" in text
    assert "[0" not in text
    # The control: nothing else sees it.
    assert other_tokens(PLANS[0], checks="off") == [((), "")] * 4
