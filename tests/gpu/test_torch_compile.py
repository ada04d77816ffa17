"""A step of the demo's model under FSDP on one GPU, its blocks compiled by inductor."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import seqcomp
from seqcomp.capture.blocks import blocks_of
from tests.gpu.test_lockstep import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLAN = {
    "mesh": {"data": 1, "ring": 1, "ulysses": 1},
    "strategies": {"data": {}, "ring": {}, "ulysses": {}, "fsdp": {}},
}
STEPS = 5


@pytest.fixture
def one_rank() -> Iterator[None]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps(model: nn.Module, call: dict[str, Any]) -> tuple[dict[str, Tensor], float, int]:
    """Gradients, median milliseconds of a step, and the bytes that it holds at its peak."""
    times = []
    for _ in range(2 + STEPS):  # the first ones compile
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(**call).loss.backward()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    whole = {
        name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone()
        for name, parameter in model.named_parameters()
        if (g := parameter.grad) is not None
    }
    return whole, statistics.median(times[2:]), peak


@pytest.mark.usefixtures("one_rank")
def test_compiled_blocks_against_eager(
    record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.randint(0, 256, (4, 2048), device="cuda")
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    rows = {"eager": steps(build(), call)}
    model = seqcomp.parallelize(build(), PLAN, example_inputs=call)
    rows["seqcomp"] = steps(model, call)
    for path in blocks_of(model):
        model.get_submodule(path).compile()
    rows["seqcomp, compiled"] = steps(model, call)
    seqcomp.of(model).close()
    for name, (_, milliseconds, peak) in rows.items():
        text = f"{milliseconds:.2f} ms a step, {peak / 2**20:.1f} MiB above what it began with"
        record_property(name, text)
        with capsys.disabled():
            sys.stdout.write(f"\n{name}: {text}\n")
    want = rows["eager"][0]
    for name, (found, _, _) in rows.items():
        assert found.keys() == want.keys()
        worst = max((found[n] - g).abs().max() / g.abs().max() for n, g in want.items())
        assert worst < 1e-3, name
