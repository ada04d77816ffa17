"""A training step on an accelerator: no tensor of the host meets one of the device, and the host
never waits for a value.

The device is torch's "meta", which every machine has: what is made without a device is on the host
and shows, what asks for a value fails, and kernels are those of CUDA, by their shapes. Numbers are
what tests/gpu looks at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import seqcomp
from seqcomp.lowering import compiled
from seqcomp.lowering.build import fingerprint
from seqcomp.runtime.attention import kernels
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import dropping, plans
from tests.fixtures.again import loss_of, with_memory
from tests.fixtures.models import Spec, build, inputs

DEVICE, HOST = torch.device("meta"), torch.device("cpu")
SPEC = Spec(vocab=96, layers=1, mixer="conv", tied=True, bias=True)
GATHERED = {"mesh": {"ring": 2}, "strategies": {"ring": {"transport": "allgather"}}}


class Devices(TorchDispatchMode):
    """Operations whose operands are on several devices. Numbers of no dims may be anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        kinds = {x.device.type for x in leaves if isinstance(x, Tensor) and x.dim()}
        self.seen |= kinds
        if len(kinds) > 1:
            self.mixed.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """meta has no autocast, and none of the kernels is its own."""
    enabled, dtype, cast = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast
    on_meta = DEVICE.type

    def is_enabled(*device: str) -> bool:
        return device != (on_meta,) and enabled(*device)

    def dtype_of(device: str) -> torch.dtype:
        return torch.bfloat16 if device == on_meta else dtype(device)

    def autocast(device: str, *rest: Any, **how: Any) -> Any:
        return contextlib.nullcontext() if device == on_meta else cast(device, *rest, **how)

    def choose(device: torch.device, kind: torch.dtype, head_dim: int, value_dim: int) -> str:
        return "cuda_flash" if kind == torch.bfloat16 else "cuda_efficient"

    monkeypatch.setattr(torch, "is_autocast_enabled", is_enabled)
    monkeypatch.setattr(torch, "get_autocast_dtype", dtype_of)
    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(kernels, "choose", choose)


def mixed(plan: plans.Plan, make: Callable[[], nn.Module], batch: dict[str, Tensor]) -> set[str]:
    """Operations of a step and of an evaluation that mixed devices, on any rank."""

    def on_rank(model: nn.Module, context: Any, local: dict[str, Any]) -> list[str]:
        loss_of(model, local)
        with Devices() as found:
            loss_of(model, local).backward()
            with torch.no_grad():
                loss_of(model, local)
        assert "meta" in found.seen
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert {g.device for g in gradients if g is not None} == {DEVICE}
        assert None not in gradients
        return found.mixed

    ranks = lockstep(
        lambda: make().to(DEVICE),
        {**plan, "checks": "off"},  # sums of the first step's inputs are values
        on_rank,
        inputs={name: x.to(DEVICE) for name, x in batch.items()},
        device=DEVICE,
    )
    return {name for rank in ranks for name in rank}


CASES: dict[str, tuple[plans.Plan, Callable[[], nn.Module], dict[str, Tensor]]] = {
    "usp": (
        with_memory(plans.usp(2, 2), checkpoint="selective", loss_chunks=2),
        lambda: build(SPEC, dtype=torch.bfloat16), inputs(SPEC),
    ),
    "ring and tensor": (
        with_memory(plans.with_tensor(plans.ring(2, "zigzag"), 2), checkpoint="block"),
        lambda: build(SPEC, dtype=torch.float32), inputs(SPEC),
    ),
    "dropout": (
        plans.padded(plans.with_data(GATHERED, 2)), lambda: dropping.build().float(),
        dropping.batch(length=13),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_stays_on_its_device(name: str) -> None:
    plan, make, batch = CASES[name]
    assert mixed(plan, make, batch) == set()


def test_control_keys_left_on_the_host_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled.keys_of
    monkeypatch.setattr(compiled, "keys_of", lambda seed, count, _: made(seed, count, HOST))
    with pytest.raises((RuntimeError, AssertionError), match="device"):
        assert not mixed(*CASES["dropout"]), "operands on the host and on the device"


def test_programs_of_ranks_with_a_device_each_are_the_same() -> None:
    """Devices are baked into what was captured; a rank of four has cuda:3."""

    def on_rank(model: nn.Module, context: Any, local: dict[str, Any]) -> set[str]:
        program, _ = seqcomp.of(model).prepare((), local)

        def on(device: str) -> str:
            put = repr(torch.device(device))
            texts = [piece.code.replace("device(type='cpu')", put) for piece in program.pieces]
            assert any(put in text for text in texts)
            pieces = [replace(p, code=t) for p, t in zip(program.pieces, texts, strict=True)]
            return fingerprint(replace(program, pieces=tuple(pieces)))

        assert on("cuda:0") != on("cpu")
        return {on("cuda:0"), on("cuda:3")}

    for found in lockstep(lambda: build(SPEC), plans.ring(2), on_rank, inputs=inputs(SPEC)):
        assert len(found) == 1
