"""`memory` of a plan: the same results with less kept, or a refusal that says what to change.

Checkpointed blocks alone are case 20.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import seqcomp
from seqcomp.diagnostics import PlanError
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.again import loss_of, trained, with_memory, worked
from tests.fixtures.compare import FP64, compare_grads, reference, value_distance
from tests.fixtures.live import Live
from tests.fixtures.models import M0, Spec, build, inputs

RING, USP = plans.ring(2, "zigzag"), plans.usp(2, 2, "zigzag")
MEGATRON, BOTH = plans.megatron(2), plans.with_tensor(RING, 2)
CAPPED = Spec(tied=True, head_bias=True, softcap=3.0)
BEFORE_CLASSES = Spec(transposed=True, labels="shifted", loss="sum")

CASES = [
    (USP, {"checkpoint": "block"}, M0, {}),
    (USP, {"checkpoint": "selective", "loss_chunks": 3}, M0, {}),
    (BOTH, {"checkpoint": "block", "loss_chunks": 2}, M0, {}),
    (BOTH, {"checkpoint": "selective", "loss_chunks": 100}, M0, {"ignore_rows": (1,)}),
    (MEGATRON, {"loss_chunks": 3}, CAPPED, {"valid": (3, 9)}),
    (plans.ulysses(2), {"loss_chunks": 2}, BEFORE_CLASSES, {}),
    (plans.padded(RING), {"checkpoint": "selective", "loss_chunks": 3}, CAPPED, {"seq": 13}),
    (plans.with_data(RING, 2), {"loss_chunks": 3}, Spec(loss="divisor"), {"valid": (3, 4)}),
]


@pytest.mark.parametrize(
    ("plan", "memory", "spec", "given"),
    CASES,
    ids=[f"{plans.name(p)}-{'-'.join(map(str, m.values()))}" for p, m, *_ in CASES],
)
def test_parity(
    plan: plans.Plan, memory: dict[str, Any], spec: Spec, given: dict[str, Any]
) -> None:
    want = reference(lambda: build(spec), inputs(spec, **given))
    for one in trained(with_memory(plan, **memory), spec, **given)["step"]:
        assert value_distance(want.loss, one.loss, FP64) <= 1
        assert compare_grads(want.gradients, one.gradients, FP64)[0] <= 1


class _Rows(TorchDispatchMode):
    """The most rows of `words` numbers in a new tensor."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.most = words, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() and out.shape[-1] == self.words:
            self.most = max(self.most, out.numel() // self.words)
        return out


def most_rows(memory: dict[str, Any]) -> int:
    """Rows of logits that a rank of a ring of 2 has at once; 2 x 80 tokens are its own."""

    def on_rank(model: nn.Module, context: Any, local: dict[str, Any]) -> int:
        loss_of(model, local)
        with _Rows(M0.vocab) as rows:
            loss_of(model, local).backward()
        return rows.most

    plan = with_memory(RING, **memory)
    return max(lockstep(build, plan, on_rank, inputs=inputs(seq=160)))


def test_logits_are_never_whole() -> None:
    assert most_rows({}) == 160
    assert most_rows({"loss_chunks": 4}) == 40


def test_what_is_kept_does_not_grow_with_the_vocabulary() -> None:
    kept = [
        worked(with_memory(RING, loss_chunks=4), Spec(vocab=vocab))[0][0].saved_bytes
        for vocab in (96, 384)
    ]
    assert kept[0] == kept[1]


def refusal(plan: plans.Plan, make: Any = build, batch: Any = None, grad: bool = True) -> str:
    """The text of the error with which a call is refused, on every rank; '' where it is not."""

    def on_rank(model: nn.Module, context: Any, local: dict[str, Any]) -> str:
        try:
            with torch.set_grad_enabled(grad):
                model(**local)
        except PlanError as error:
            return str(error)
        return ""

    first, *others = lockstep(make, plan, on_rank, inputs=inputs() if batch is None else batch)
    assert all(other == first for other in others)
    return first


def test_chunks_need_logits_that_nothing_else_needs() -> None:
    plan = {**RING, "memory": {"loss_chunks": 2}}
    text = refusal(plan)
    assert "SC118" in text
    assert "outputs: {logits: drop}" in text


def test_chunks_need_a_loss() -> None:
    plan = with_memory(RING, loss_chunks=2)
    alone = inputs(with_labels=False)
    text = refusal(plan, batch=alone)
    assert "SC118" in text
    assert "labels" in text
    assert not refusal(plan, batch=alone, grad=False)


def test_chunks_need_a_head() -> None:
    """The slice of activations along the sequence has no form in labels here."""
    text = refusal(with_memory(RING, loss_chunks=2), lambda: build(Spec(transposed=True)))
    assert "SC118" in text
    assert "between the head and the loss" in text


class Flat(nn.Module):
    """No list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.emb(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


class Taken(nn.Module):
    """The parts of a block are called, the block is not."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)
        part = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        self.layers = nn.ModuleList([nn.ModuleList([part])])

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.emb(input_ids)
        for layer in self.layers:
            for part in layer:  # type: ignore[union-attr]
                x = x + part["down"](part["up"](x).relu())
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


def seeded(kind: type[nn.Module]) -> Any:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    return make


def test_a_model_without_blocks() -> None:
    text = refusal(with_memory(RING, checkpoint="block"), seeded(Flat))
    assert "SC116" in text
    assert "nn.ModuleList" in text


def test_what_is_not_done_is_a_finding() -> None:
    def codes(model: nn.Module, context: Any, local: dict[str, Any]) -> set[str]:
        model(**local)["loss"].backward()
        return {finding.code for finding in seqcomp.of(model).report().findings}

    plan = with_memory(RING, checkpoint="block", offload="cpu")
    found = lockstep(seeded(Taken), plan, codes, inputs=inputs())[0]
    assert {"SC415", "SC416"} <= found
    assert "SC415" not in lockstep(build, plan, codes, inputs=inputs())[0]


def test_the_peak_does_not_grow_with_the_vocabulary() -> None:
    """But by what the weights of embedding and head need: gradients, their sums, and copies."""
    hidden, seq, narrow, wide = 16, 512, 96, 1536
    small, large = (
        _peak(Spec(hidden=hidden, vocab=vocab, layers=1), seq, loss_chunks=64)
        for vocab in (narrow, wide)
    )
    more = wide - narrow
    assert large - small <= 9 * more * hidden * 8
    # The logits of a rank's tokens alone would be more.
    assert more * seq // 2 * 8 > 1.5 * (large - small)


def _peak(spec: Spec, seq: int, **memory: Any) -> int:
    """The most that lives of what a step makes on a rank of a ring of 2, in bytes."""

    def step(model: nn.Module, context: Any, local: dict[str, Any]) -> int:
        loss_of(model, local).backward()
        model.zero_grad()
        with Live() as live:
            loss_of(model, local).backward()
        return live.peak

    plan = with_memory(RING, **memory)
    return max(lockstep(lambda: build(spec), plan, step, inputs=inputs(spec, batch=1, seq=seq)))
