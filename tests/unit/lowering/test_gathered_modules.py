"""`overrides: [{match: ..., gather: true}]`: a module runs on the whole sequence, exactly."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import seqcomp
from seqcomp.lowering import ops
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.models import Spec, build, inputs

PLANS = [
    plans.ring(2, "zigzag"),
    plans.usp(2, 2, "striped"),
    plans.megatron(2),
    plans.with_data(plans.with_tensor(plans.ring(2, "contiguous"), 2), 2),
]
MATCHES = ["layers.0.mlp", "layers.*.attn", "layers.1", "layers.0.attn.q", "head"]
CONV = Spec(mixer="conv")


def gathering(plan: plans.Plan, match: str) -> dict[str, Any]:
    return {**plan, "overrides": [{"match": match, "gather": True}]}


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
@pytest.mark.parametrize("match", MATCHES)
def test_exact(plan: plans.Plan, match: str) -> None:
    report = seqcomp.verify(build, gathering(plan, match), inputs_fn=lambda: inputs(batch=4))
    assert report.ok, str(report)
    assert any("SC401" in text and "whole sequence" in text for text in report.findings)


def test_only_that_module_is_whole() -> None:
    """Shapes at the linears: whole inside the module, shards everywhere else."""
    seen: dict[str, tuple[int, ...]] = {}

    def step(model: nn.Module, context, local) -> None:
        if context.rank == 0:
            for path in ("layers.0.mlp.gate", "layers.1.mlp.gate", "layers.0.attn.o"):

                def keep(module, args, out, path=path):
                    seen[path] = tuple(out.shape[:2])

                model.get_submodule(path).register_forward_hook(keep)
        model(**local)

    plan = gathering(plans.ring(2), "layers.0.mlp")
    lockstep(build, plan, step, inputs=inputs())
    assert seen == {
        "layers.0.mlp.gate": (2, 16), "layers.1.mlp.gate": (2, 8), "layers.0.attn.o": (2, 8)
    }  # fmt: skip


def test_attention_inside_runs_whole() -> None:
    def step(model: nn.Module, context, local) -> list[str]:
        model(**local)
        program = seqcomp.of(model).programs[-1]
        return [n.target.label for n in program.flat.nodes if isinstance(n.target, ops.Attention)]

    plan = gathering(plans.ring(2), "layers.1.attn")
    assert lockstep(build, plan, step, inputs=inputs())[0] == ["layers.0.attn"]


def test_mixers_are_exact() -> None:
    plan = gathering(plans.usp(2, 2), "layers.0")
    report = seqcomp.verify(lambda: build(CONV), plan, inputs_fn=lambda: inputs(CONV))
    assert report.ok, str(report)
