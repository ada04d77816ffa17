"""Case 18, the model's part: mixed precision is no worse than on one process."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.fixtures import plans
from tests.fixtures.compare import gradients_of
from tests.fixtures.models import Spec, build, inputs
from tests.fixtures.pool import Pools

# Under autocast q and k come out of fp32 norms and v out of a bf16 linear. With bf16 parameters
# that mix is an error of the model itself, on one device too.
AUTOCAST = Spec(qk_norm=True)
NARROW = Spec()
WORSE_AT_MOST = 1.5
PLANS = (plans.ring(2, "zigzag"), plans.ulysses(2), plans.ring(4, "zigzag"))


def run(
    model: torch.nn.Module, spec: Spec, *, autocast: bool
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """(logits, all gradients in one fp64 vector, dtypes of logits and gradients)."""
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        out = model(**inputs(spec, seq=64))
    out["loss"].backward()
    gradients = gradients_of(model)
    flat = torch.cat([g.double().flatten() for g in gradients.values() if g is not None])
    dtypes = [
        str(out["logits"].dtype),
        *(str(g.dtype) for g in gradients.values() if g is not None),
    ]
    return out["logits"].detach().double(), flat, dtypes


def errors(rank: int, world: int, plan: Any, autocast: bool) -> dict[str, Any]:
    """Relative errors against fp64 of one process and of the compiled model."""
    import seqcomp

    dtype, spec = (torch.float32, AUTOCAST) if autocast else (torch.bfloat16, NARROW)
    one = build(spec, dtype=dtype)
    exact = build(spec)
    with torch.no_grad():
        for target, source in zip(exact.parameters(), one.parameters(), strict=True):
            target.copy_(source)  # the same rounded weights
    want = run(exact, spec, autocast=False)
    single = run(one, spec, autocast=autocast)
    model = seqcomp.parallelize(build(spec, dtype=dtype), plan=plan)
    ours = run(model, spec, autocast=autocast)
    seqcomp.of(model).close()
    return {
        "single": [relative(want[i], single[i]) for i in range(2)],
        "ours": [relative(want[i], ours[i]) for i in range(2)],
        "dtypes": (single[2], ours[2]),
    }


def relative(want: torch.Tensor, got: torch.Tensor) -> float:
    return float((want - got).norm() / want.norm())


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16"])
def test_no_worse_than_one_process(pools: Pools, autocast: bool, plan: plans.Plan) -> None:
    ranks = pools.run(
        plan["mesh"].get("ring", 1) * plan["mesh"].get("ulysses", 1), errors, plan, autocast
    )
    for result in ranks:
        assert result["dtypes"][0] == result["dtypes"][1]
        for single, ours in zip(result["single"], result["ours"], strict=True):
            assert 1e-4 < single < 0.3, "the run is not in bf16, or bf16 says nothing here"
            assert ours <= WORSE_AT_MOST * single
