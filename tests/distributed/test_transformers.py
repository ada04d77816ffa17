"""Unmodified models of transformers, built from tiny configurations, labels inside, in fp64.

They cast logits and norms to fp32, so tolerances are those of fp32 sums; see FP64_WITH_FP32_INSIDE.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.fixtures import faults, plans
from tests.fixtures.compare import FP64_WITH_FP32_INSIDE, Reference, distance, reference
from tests.fixtures.models import default_dtype, initialise
from tests.fixtures.parity import Call, Case, check_parity, check_refused
from tests.fixtures.pool import Pools

pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
FAMILIES = ("Llama", "Qwen2", "Qwen3")
PLANS = (plans.ring(2, "zigzag"), plans.ulysses(2), plans.usp(2, 2, "zigzag"))


def build(family: str) -> nn.Module:
    """A tiny model of the family; Qwen2 is tied and has biases, Qwen3 norms q and k."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **COMMON, tie_word_embeddings=family == "Qwen2"
    )
    with default_dtype(torch.float64):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    initialise(model, seed=0)
    return model


def make_inputs(
    family: str, *, batch: int = 2, seq: int = 16, labels: bool = True, cache: bool | None = None
) -> dict[str, Any]:
    """Labels are the ids with a masked prompt of another length in each row."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(97, (batch, seq), generator=generator)
    out: dict[str, Any] = {"input_ids": ids}
    if labels:
        out["labels"] = ids.clone()
        for row in range(batch):
            out["labels"][row, : 3 * (row + 1)] = -100
    if cache is not None:
        out["use_cache"] = cache
    return out


def case(family: str, plan: plans.Plan, *calls: Call) -> Case:
    return Case(plan, family, calls, build, make_inputs, FP64_WITH_FP32_INSIDE)


@pytest.mark.parametrize("family", FAMILIES)
def test_control_a_lost_target_per_shard_is_seen(family: str) -> None:
    right = reference(lambda: build(family), make_inputs(family))
    batch = make_inputs(family)
    batch["labels"][:, 8] = -100  # the target that crosses from rank 0 to rank 1
    wrong = reference(lambda: build(family), batch)
    assert distance(right, wrong, FP64_WITH_FP32_INSIDE) > faults.CLEARLY_WRONG
    assert isinstance(right, Reference)


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "plan"), list(zip(FAMILIES, PLANS, strict=True)), ids=FAMILIES)
def test_family(pools: Pools, family: str, plan: plans.Plan) -> None:
    calls = (Call({"seq": 16}), Call({"batch": 1, "seq": 32}), Call({"labels": False}, "no_grad"))
    check_parity(pools, case(family, plan, *calls))


@pytest.mark.distributed
def test_data_axis(pools: Pools) -> None:
    plan = plans.with_data(plans.ring(2, "zigzag"), 2)
    check_parity(pools, case("Llama", plan, Call({"batch": 4})))


@pytest.mark.distributed
def test_a_cache_asked_for_is_refused(pools: Pools) -> None:
    plan = plans.ring(2, "zigzag")
    codes = check_refused(pools, case("Llama", plan, Call({"cache": True})), "use_cache")
    assert codes == ("SC305",)
    check_parity(pools, case("Llama", plan, Call({"cache": False})))


def output_type(rank: int, world: int) -> tuple[str, list[str]]:
    import seqcomp

    model = seqcomp.parallelize(build("Llama"), plan=plans.ring(2))
    out = model(**make_inputs("Llama"))
    seqcomp.of(model).close()
    return type(out).__name__, list(out.keys())


@pytest.mark.distributed
def test_outputs_keep_their_type(pools: Pools) -> None:
    name, keys = pools.run(2, output_type)[0]
    assert name == "CausalLMOutputWithPast"
    assert keys[:2] == ["loss", "logits"]
