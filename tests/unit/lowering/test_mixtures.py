"""torchtitan's mixtures of experts: run as they are, and what they count is the global count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.families import needs_torchtitan
from tests.fixtures.lockstep import counted, reported

pytestmark = needs_torchtitan

BATCH, LENGTH, WIDTH, EXPERTS, CHOSEN = 4, 16, 32, 8, 3


class Mixture(nn.Module):
    """One attention and one of torchtitan's mixtures."""

    def __init__(self, *, forced: bool = False) -> None:
        super().__init__()
        from torchtitan.models.common import moe
        from torchtitan.models.common.linear import Linear
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

        config = moe.MoE.Config(
            num_experts=EXPERTS,
            routed_experts=moe.RoutedExperts.Config(
                inner_experts=moe.GroupedExperts.Config(
                    dim=WIDTH, hidden_dim=WIDTH, num_experts=EXPERTS
                ),
                token_dispatcher=LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=CHOSEN),
            ),
            router=moe.TokenChoiceTopKRouter.Config(
                num_experts=EXPERTS,
                gate=Linear.Config(in_features=WIDTH, out_features=EXPERTS),
                top_k=CHOSEN,
                _debug_force_load_balance=forced,
            ),
        )
        self.embed, self.qkv = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.moe = config.build()
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        """ids [B, S] -> loss []."""
        x = self.embed(input_ids)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(x + self.moe(x))
        return F.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


def made(**more: Any) -> nn.Module:
    model = Mixture(**more).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    model.moe.expert_bias_E.copy_(torch.linspace(-0.02, 0.02, EXPERTS))
    return model


def batch(length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(50, (BATCH, length), generator=generator)}


def steps(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """What is counted by two calls in training and one in evaluation."""
    for _ in range(2):
        model(**given).backward()
    model.eval()(**given)
    return model.moe.tokens_per_expert_E.clone()


@pytest.mark.parametrize(
    "plan",
    [
        plans.usp(2, 2, "zigzag"),
        plans.with_tensor(plans.ring(2), 2),
        plans.with_data(plans.ulysses(2), 2),
        plans.with_data(plans.megatron(2), 2),
    ],
    ids=plans.name,
)
def test_every_rank_has_the_count_of_all_tokens(plan: plans.Plan) -> None:
    want = steps(made(), batch())
    assert want.sum() == 2 * BATCH * LENGTH * CHOSEN
    assert len(set(want.tolist())) > 2

    def step(model: nn.Module, context: RankContext, local: dict[str, Tensor]) -> Any:
        model(**local)
        model.moe.tokens_per_expert_E.zero_()
        context.traffic.reset()
        model(**local).backward()
        sent, report = counted(context), seqcomp.of(model).report()
        model.moe.tokens_per_expert_E.zero_()
        return steps(model, local), sent == reported(report), [f.code for f in report.findings]

    for found, told, codes in lockstep(made, plan, step, inputs=batch()):
        torch.testing.assert_close(found, want, rtol=0, atol=0)
        assert told
        assert "SC409" in codes
        assert "SC401" not in codes


def test_what_a_checkpoint_runs_again_is_counted_once() -> None:
    want = made()
    want(**batch())

    def step(model: nn.Module, context: RankContext, local: dict[str, Tensor]) -> Tensor:
        model(**local)
        model.moe.tokens_per_expert_E.zero_()
        seen = []
        model.moe.router.register_forward_hook(lambda *_: seen.append(1))
        checkpoint(model, local["input_ids"], use_reentrant=False).backward()
        assert len(seen) == 2
        return model.moe.tokens_per_expert_E

    for found in lockstep(made, plans.ring(2), step, inputs=batch()):
        torch.testing.assert_close(found, want.moe.tokens_per_expert_E, rtol=0, atol=0)


def test_training_is_that_of_one_device() -> None:
    report = seqcomp.verify(made, plans.with_data(plans.ring(2), 2), inputs_fn=batch)
    assert report.ok, str(report)


def forced() -> nn.Module:
    return made(forced=True)


def divided() -> nn.Module:
    model = made()
    model.moe.routed_experts.token_dispatcher.ep_mesh = object()
    return model


@pytest.mark.parametrize(
    ("make", "words"), [(forced, "_debug_force_load_balance"), (divided, "ep_mesh")]
)
def test_what_looks_at_other_tokens_is_refused(make: Any, words: str) -> None:
    with pytest.raises(PlanError, match=rf"(?s)SC313 at moe.*fix: .*{words}"):
        lockstep(make, plans.ring(2), lambda model, *_: model(**batch()))


def test_padding_would_be_counted() -> None:
    plan = plans.padded(plans.ring(2))
    with pytest.raises(PlanError, match=r"(?s)SC307 at moe.*tokens_per_expert_E.*fix: .*padding"):
        lockstep(made, plan, lambda model, *_: model(**batch(15)))
    losses = lockstep(made, plan, lambda model, *_: model.eval()(**batch(15)))
    torch.testing.assert_close(losses[0], made().eval()(**batch(15)))
