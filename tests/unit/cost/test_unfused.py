"""Attention without a fused kernel: passes over scores as operations make them, masks as torch
keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqcomp.capture.recognise import attention
from seqcomp.cost.memory import memory_rows
from seqcomp.cost.run import Run
from seqcomp.cost.shape import Block, ModelShape
from seqcomp.cost.unfused import Written, written
from seqcomp.hardware.cluster import Cluster
from seqcomp.integrations.explain import explain
from seqcomp.plan.load import load_plan
from seqcomp.runtime.attention import math_kernel
from tests.fixtures.pricing import SMALL, held, ideal, masked, planned, priced

N = 96
VIEWS = {"view", "expand", "unsqueeze", "transpose", "permute", "slice", "detach", "alias", "t",
         "_unsafe_view", "squeeze"}  # fmt: skip


class Passes(TorchDispatchMode):
    """How often numbers of a pair are read or written."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[1] not in VIEWS:
            for x in tree_leaves((args, out)):
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    self.count += x.numel() // N**2
        return out


def with_scores(scores: int, value_dim: int = 0) -> ModelShape:
    block = replace(SMALL.blocks[0], scores=scores, value_dim=value_dim)
    return replace(SMALL, blocks=(block,))


def block_of(model: ModelShape) -> Block:
    return model.blocks[0]


@pytest.mark.parametrize(("cap", "model"), [(30.0, with_scores(2)), (0.0, with_scores(0, 32))])
def test_tiles_pass_over_scores_as_the_math_kernel_does(cap: float, model: ModelShape) -> None:
    q, k, v = (torch.randn(1, 1, N, 8) for _ in range(3))
    how: dict[str, Any] = {"causal": True, "scale": 0.3, "softcap": cap}
    with Passes() as forward:
        out, lse = math_kernel.forward(q, k, v, **how)
    with Passes() as backward:
        math_kernel.backward(out, q, k, v, out, lse, **how)
    for name in ("ring_4", "ulysses_4"):
        found = written(planned(name, model), block_of(model), Run(4096))
        assert found == Written(forward.count, backward.count, wide=True)
    assert (
        written(planned("data_2", with_scores(0, 32)), block_of(with_scores(0, 32)), Run(1)) is None
    )
    assert written(planned("ring_4", with_scores(1)), block_of(with_scores(1)), Run(4096)) is None


@pytest.mark.parametrize(("cap", "scores"), [(30.0, 2), (0.0, 1)], ids=["softcap", "sinks"])
def test_whole_attention_passes_as_it_is_written(cap: float, scores: int) -> None:
    q, k, v = (torch.randn(1, 1, N, 8, requires_grad=True) for _ in range(3))
    sinks = None if cap else torch.zeros(1)
    with Passes() as forward:
        out = attention(q, k, v, None, True, 0.3, cap, sinks)
    with Passes() as backward:
        out.backward(torch.ones_like(out))
    found = written(planned("data_2", with_scores(scores)), block_of(with_scores(scores)), Run(1))
    assert found is not None
    assert not found.wide
    assert found.forward == forward.count
    assert found.backward == backward.count


def streaming(bandwidth: float) -> Cluster:
    """Products and links for nothing."""
    cluster = ideal(1e30, 1e30)
    return replace(cluster, device=replace(cluster.device, bandwidth=bandwidth))


def attending(name: str, model: ModelShape, cluster: Cluster, **run: Any) -> float:
    """Seconds of a layer's attention, forward."""
    found = priced(name, model, cluster, mode="prefill", **run)
    return sum(e.end - e.start for e in found.timeline if e.what.startswith("attention"))


def test_a_softcap_takes_what_its_scores_take() -> None:
    """Of the squares that a zigzag rank of 4 computes: its own whole, half of each other."""
    chunk, heads = 1024, 8
    squares = chunk**2 + 3 * chunk**2 / 2
    merges = attending("ring_4", SMALL, streaming(1e9))
    found = attending("ring_4", with_scores(2), streaming(1e9)) - merges
    assert found == pytest.approx(21 * 4 * heads * squares / 1e9, rel=1e-3)
    whole = attending("data_2", with_scores(2), streaming(1e9))
    assert whole == pytest.approx(14 * 2 * heads * 4096**2 / 1e9, rel=1e-9)


WINDOW = masked(SMALL, "window", 100)


def test_a_window_without_tiles_computes_all_pairs() -> None:
    near = sum(min(i + 1, 100) for i in range(4096))
    for name, ranks, pairs in (("data_2", 1, 4096**2), ("megatron_sp_4", 4, 4096**2),
                               ("ulysses_4", 4, near)):  # fmt: skip
        seconds = attending(name, WINDOW, ideal(1e12, 1e30))
        assert seconds * 1e12 == pytest.approx(2 * 2 * 512 * pairs / ranks)
        codes = [f.code for f in priced(name, WINDOW).findings]
        assert ("SC425" in codes) == (pairs == 4096**2)
    slow = attending("data_2", WINDOW, streaming(1e9))
    assert slow == pytest.approx(2 * 8 * 4096**2 / 1e9), "each head reads the mask"


@pytest.mark.parametrize(
    ("plan", "scores", "runs_again"),
    [("data_2", 0, False), ("data_2", 1, True), ("ring_2", 1, False)],
)
def test_only_what_kernels_give_is_kept(plan: str, scores: int, runs_again: bool) -> None:
    """Under selective checkpoints all other attention runs a second time, as under block."""
    selective, block = (
        priced({**load_plan(plan).to_dict(), "memory": {"checkpoint": kind}}, with_scores(scores))
        for kind in ("selective", "block")
    )
    assert (selective.flops["hw"] == block.flops["hw"]) == runs_again
    assert (selective.compute_seconds == pytest.approx(block.compute_seconds)) == runs_again


def test_masks_of_windows_are_held_as_torch_keeps_them() -> None:
    """Storages that autograd keeps of a model of transformers, with and without its window."""
    transformers = pytest.importorskip("transformers")
    length, batch, layers = 128, 2, 2

    def made(window: int | None) -> torch.nn.Module:
        config = transformers.MistralConfig(
            hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, vocab_size=64,
            num_key_value_heads=4, intermediate_size=48, sliding_window=window,
        )  # fmt: skip
        return transformers.MistralForCausalLM(config).to(torch.bfloat16)

    def masks(window: int | None) -> int:
        model = made(window)
        kept: dict[int, int] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            if x.shape[-2:] == (length, length):
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        ids = torch.zeros((batch, length), dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model(input_ids=ids, use_cache=False)  # held, or its storages are used again
        del out
        return sum(kept.values())

    assert masks(None) == 0
    window = masked(ModelShape.decoder(layers=layers, hidden=32, heads=4, vocab=64, mlp_width=48),
                    "window", 16)  # fmt: skip
    run, plan = Run(length, batch), planned("data_2", window, length)
    plain = masked(window, "causal")
    ours, without = (
        {r.what: r.bytes for r in memory_rows(plan, m, run)}["saved activations"]
        for m in (window, plain)
    )
    assert ours - without == masks(16) == layers * batch * length**2 * 2
    assert held(priced("data_2", window, seq_len=length, batch=batch))["masks of attention"] == (
        batch * length**2
    )
    assert "masks of attention" not in held(priced("ulysses_4", WINDOW))

    def explained(window: int | None, *, meta: bool = False) -> int:
        model = made(window).to("meta") if meta else made(window)
        report = explain(model, "data_2", seq_len=length, batch=batch)
        return next(r.bytes for r in report.footprint if r.what == "saved activations")

    assert explained(16) == explained(16, meta=True) == explained(None) + masks(16)
