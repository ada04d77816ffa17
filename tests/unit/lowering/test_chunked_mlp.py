"""`checkpoint: selective` runs MLPs in chunks of tokens: the same gradients, less at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.lowering import ops
from seqcomp.report.storages import MemoryRow
from seqcomp.runtime import chunked_mlp
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.again import loss_of, trained, with_memory
from tests.fixtures.compare import FP64, compare_grads, reference, value_distance
from tests.fixtures.live import Live
from tests.fixtures.models import Spec, build, inputs

USP = plans.usp(2, 2, "zigzag")
BOTH = plans.with_tensor(plans.ring(2, "zigzag"), 2)
PLANS = [USP, BOTH, plans.with_fsdp(plans.with_data(plans.ring(2), 2))]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[chunked_mlp.Chunks]:
    """Chunks of few tokens; what was run in chunks."""
    seen: list[chunked_mlp.Chunks] = []
    own = chunked_mlp._Chunked.forward

    def forward(ctx: Any, x: Tensor, shard: Any, how: chunked_mlp.Chunks, *rest: Any) -> Tensor:
        seen.append(how)
        return own(ctx, x, shard, how, *rest)

    monkeypatch.setattr(chunked_mlp, "FEWEST", 2)
    monkeypatch.setattr(chunked_mlp._Chunked, "forward", staticmethod(forward))
    return seen


@pytest.mark.parametrize("plan", PLANS, ids=plans.name)
def test_parity(plan: plans.Plan, small: list[chunked_mlp.Chunks]) -> None:
    spec = Spec(bias=True)
    want = reference(lambda: build(spec), inputs(spec))
    for one in trained(with_memory(plan, checkpoint="selective"), spec)["step"]:
        assert value_distance(want.loss, one.loss, FP64) <= 1
        assert compare_grads(want.gradients, one.gradients, FP64)[0] <= 1
    assert min(how.number for how in small) > 1
    # In the second run nothing reads what the MLP of a block gives.
    assert {how.skip for how in small} == {False, True}


class Normed(nn.Module):
    """A norm behind an MLP with a fused gate, low-rank adapters and a scale for each feature."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width, bias=False)
        self.a, self.b = nn.Linear(4 * width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.scale = nn.Parameter(torch.full((4 * width,), 1.5))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        inner = nn.functional.gelu(gate, approximate="tanh") * up * self.scale
        return x + self.norm(self.down(inner) + 0.5 * self.b(self.a(inner)))


class Stack(nn.Module):
    """Two blocks; `frozen` parts of the first learn nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)
        self.layers = nn.ModuleList([Normed(), Normed()])
        self.layers[0].up.requires_grad_(False)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.emb(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


def test_a_result_that_is_read_is_kept(small: list[chunked_mlp.Chunks]) -> None:
    """Also: adapters, a fused gate, frozen weights, and no gradients at all."""

    def step(model: nn.Module, context: Any, local: dict[str, Any]) -> Any:
        with torch.no_grad():
            quiet = loss_of(model, local)
        loss = loss_of(model, local)
        loss.backward()
        (op, *_) = {n.target for n in seqcomp.of(model).programs[-1].flat.nodes if _is_mlp(n)}
        return quiet, loss.detach(), {n: p.grad for n, p in model.named_parameters()}, op.last

    want = reference(Stack, inputs())
    plan = with_memory(plans.ring(2, "zigzag"), checkpoint="selective")
    for quiet, loss, gradients, last in lockstep(Stack, plan, step, inputs=inputs()):
        assert not last
        assert value_distance(want.loss, quiet, FP64) <= 1
        assert value_distance(want.loss, loss, FP64) <= 1
        assert compare_grads(want.gradients, gradients, FP64)[0] <= 1
    assert not any(how.skip for how in small)


def test_a_hook_that_would_not_run() -> None:
    """It is on one rank alone, and refused on all; those on modules that are called run."""
    spec = Spec(layers=1)

    def step(model: nn.Module, context: Any, local: dict[str, Any]) -> Any:
        loss_of(model, local)
        seen: list[str] = []
        around = model.get_submodule("layers.0.mlp")
        around.register_forward_hook(lambda *_: seen.append("mlp"))
        loss_of(model, local)
        hook = None
        if context.rank == 0:
            inner = model.get_submodule("layers.0.mlp.down")
            hook = inner.register_forward_hook(lambda *_: seen.append("down"))
        with pytest.raises(seqcomp.PlanError) as error:
            loss_of(model, local)
        if hook is not None:
            hook.remove()
        loss_of(model, local)
        return seen, str(error.value)

    plan = with_memory(plans.ring(2), checkpoint="selective")
    (ran, refusal), other = lockstep(lambda: build(spec), plan, step, inputs=inputs(spec))
    assert ran == ["mlp", "mlp"]
    assert other == (ran, refusal)
    assert "SC306" in refusal
    assert "layers.0.mlp.down" in refusal


def _is_mlp(node: torch.fx.Node) -> bool:
    return isinstance(node.target, ops.ChunkedMlp)


WIDE = Spec(vocab=32, mlp=256, layers=1)
LENGTH = 512


@pytest.mark.parametrize("plan", [plans.ring(2, "zigzag"), BOTH], ids=plans.name)
def test_what_lives_at_once(plan: plans.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that lives in a step falls by what the report says, to a tenth."""

    def step(model: nn.Module, context: Any, local: dict[str, Any]) -> tuple[int, Any]:
        loss_of(model, local).backward()
        with Live() as live:
            loss_of(model, local).backward()
        return live.peak, seqcomp.of(model).report()

    def of(fewest: int) -> list[tuple[int, Any]]:
        monkeypatch.setattr(chunked_mlp, "FEWEST", fewest)
        chosen = with_memory(plan, checkpoint="selective")
        batch = inputs(WIDE, batch=1, seq=LENGTH)
        return lockstep(lambda: build(WIDE, dtype=torch.float32), chosen, step, inputs=batch)

    whole, chunked = of(LENGTH), of(8)
    for (before, plain), (after, report) in zip(whole, chunked, strict=True):
        row: MemoryRow = next(row for row in report.memory if "chunks of tokens" in row.what)
        assert not any("chunks of tokens" in row.what for row in plain.memory)
        assert row.bytes_kept < row.bytes_without / 8
        saved = row.bytes_without - row.bytes_kept
        assert before - after >= 0.9 * saved, (before, after, row)
