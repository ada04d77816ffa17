"""Which calls share a program, and that there are never too many of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import seqcomp
from seqcomp.lowering import compiled as compiled_module
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.compare import compare_grads, gradients_of
from tests.fixtures.models import build, inputs

ALONE = {"mesh": {"ring": 1}, "strategies": {"ring": {}}}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every capture."""
    made: list[str] = []
    original = compiled_module.build_program

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(args[0].name)
        return original(*args, **kwargs)

    monkeypatch.setattr(compiled_module, "build_program", counting)
    return made


def test_other_legal_sizes_need_no_capture(captures: list[str]) -> None:
    sizes = [(2, 16), (3, 32), (4, 8), (5, 64), (2, 16)]

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> None:
        for batch, seq in sizes:
            ids = inputs(batch=batch, seq=seq)
            assert model(**ids)["logits"].shape == (batch, seq, 97)
        assert len(seqcomp.of(model).programs) == 1

    lockstep(build, plans.usp(2, 2, "zigzag"), step)
    assert captures == ["p0"], "one capture for all sizes and all ranks"


def test_a_batch_of_one_is_a_class_of_its_own(captures: list[str]) -> None:
    """A dim of size 1 broadcasts, which other sizes do not."""
    model = seqcomp.parallelize(build(), plan=ALONE)
    for batch, seq in ((1, 16), (1, 32), (2, 16), (1, 8), (3, 8)):
        model(**inputs(batch=batch, seq=seq))
    assert len(captures) == 2


CHANGES: list[tuple[str, Callable[[nn.Module], Any]]] = [
    ("train", lambda m: m.train()(**inputs())),
    ("eval", lambda m: m.eval()(**inputs())),
    ("no labels", lambda m: m.eval()(**inputs(with_labels=False))),
]


def test_each_mode_is_captured_once(captures: list[str]) -> None:
    model = seqcomp.parallelize(build(), plan=ALONE)
    for _ in range(2):
        for _, call in CHANGES:
            call(model)
        with torch.no_grad():
            model(**inputs())
        with torch.inference_mode():
            model(**inputs())
    assert len(captures) == len(CHANGES) + 2
    assert len(seqcomp.of(model).programs) == len(CHANGES) + 2


def test_autocast_is_a_mode(captures: list[str]) -> None:
    model = seqcomp.parallelize(build(dtype=torch.float32), plan=ALONE)
    plain = model(**inputs())["logits"]
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(**inputs())["logits"]
    again = model(**inputs())["logits"]
    assert (plain.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(plain, again, rtol=0, atol=0)
    assert len(captures) == 2


def test_programs_are_bounded(captures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "MAX_PROGRAMS", 2)
    model = seqcomp.parallelize(build(), plan=ALONE)
    for _, call in CHANGES:
        call(model)
    programs = seqcomp.of(model).programs
    assert len(programs) == 2
    last = programs[-1]
    CHANGES[-1][1](model)
    assert seqcomp.of(model).programs[-1] is last, "what was used last stays"
    want = build()(**inputs())["loss"]
    torch.testing.assert_close(CHANGES[0][1](model)["loss"], want)


def test_illegal_lengths_need_no_capture(captures: list[str]) -> None:
    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> str:
        with pytest.raises(seqcomp.PlanError) as caught:
            model(**inputs(seq=18))
        return caught.value.diagnostics[0].code

    assert set(lockstep(build, plans.usp(2, 2, "zigzag"), step)) == {"SC206"}
    assert captures == []


def test_layout_auto_follows_the_length(captures: list[str]) -> None:
    """Zigzag where the length allows it, contiguous elsewhere: two programs, both kept."""

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> list[str]:
        kinds = []
        for seq in (8, 10, 8, 10):
            model(**inputs(seq=seq))
            kinds.append(seqcomp.of(model).report().kernels[0].layout)
        return kinds

    found = lockstep(build, plans.ring(2), step)
    assert found[0] == ["zigzag", "contiguous", "zigzag", "contiguous"]
    assert len(captures) == 2


def test_the_first_call_may_be_checkpointed() -> None:
    """The capture is not part of what the caller's hooks see: recomputation saves the same."""
    model, plain = seqcomp.parallelize(build(), plan=ALONE), build()
    for each in (model, plain):
        run = partial(each, **inputs())
        checkpoint(lambda run=run: run()["loss"], use_reentrant=False).backward()
    distance, worst = compare_grads(gradients_of(plain), gradients_of(model))
    assert distance <= 1, worst


def test_the_first_call_may_be_under_hooks_that_read_values() -> None:
    model = seqcomp.parallelize(build(), plan=ALONE)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(), torch.from_numpy):
        model(**inputs())["loss"].backward()
    assert model.emb.weight.grad is not None


def test_a_cache_by_default_is_reported_as_not_made() -> None:
    """transformers models make a cache by their own default; compiled calls do not, and say so."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = seqcomp.parallelize(transformers.LlamaForCausalLM(config), plan=ALONE)
    out = model(input_ids=torch.zeros((1, 8), dtype=torch.long))
    assert out.past_key_values is None
    assert "SC310" in [f.code for f in seqcomp.of(model).report().findings]
