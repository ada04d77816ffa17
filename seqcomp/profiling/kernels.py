"""Matrix products, attention and element-wise operations of one rank while all ranks work."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from seqcomp.profiling.measured import MeasuredKernels
from seqcomp.profiling.sizes import Sizes
from seqcomp.profiling.timing import seconds_of
from seqcomp.runtime.attention.kernels import choose, kernel
from seqcomp.runtime.comm import RankContext

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward."""


def measure_kernels(
    context: RankContext, sizes: Sizes, dtypes: tuple[str, ...], tell: Callable[[str], None]
) -> MeasuredKernels:
    """Collective: all ranks of ``context``, whose only axis is "all", measure at once."""
    dense = {}
    for name in dtypes:
        tell(f"matrix products in {name}")
        dense[name] = tuple((rows, _dense(context, sizes, name, rows)) for rows in sizes.rows)
    tell("attention")
    tiles = [(tile, *_attention(context, sizes, dtypes[0], tile)) for tile in sizes.tiles]
    tell("memory")
    source = torch.ones(sizes.stream // 4, device=context.device)
    target = torch.empty_like(source)
    one = torch.ones(1, device=context.device)

    def seconds(operation: Callable[[], object]) -> float:
        return seconds_of(context, operation, sizes)

    copy = 2 * sizes.stream / seconds(lambda: target.copy_(source))
    stream = 3 * sizes.stream / seconds(lambda: source + target)
    launch = seconds(lambda: one + one)
    tell("work beside a transfer")
    return MeasuredKernels(
        dense,
        tuple((tile, forward) for tile, forward, _ in tiles),
        tuple((tile, backward) for tile, _, backward in tiles),
        max(copy, stream),
        stream,
        launch,
        _contention(context, sizes, dtypes[0]),
        _memory(context),
    )


def _dense(context: RankContext, sizes: Sizes, dtype: str, rows: int) -> float:
    x, weight = _random(context, dtype, rows, sizes.width), _random(context, dtype, sizes.width)

    def step() -> None:
        y = x @ weight.T
        _ = y @ weight, y.T @ x

    flops = 3 * 2 * rows * sizes.width**2
    return flops / seconds_of(context, step, sizes)


def _attention(context: RankContext, sizes: Sizes, dtype: str, tile: int) -> tuple[float, float]:
    heads, d = sizes.heads, sizes.head_dim
    q, k, v, dout = (_random(context, dtype, 1, heads, tile, d) for _ in range(4))
    found = kernel(choose(context.device, q.dtype, d, d))
    scale = d**-0.5
    out, lse = found.forward(q, k, v, causal=True, scale=scale)
    flops = 2 * heads * tile * (tile + 1) // 2 * 2 * d

    def forward() -> object:
        return found.forward(q, k, v, causal=True, scale=scale)

    def backward() -> object:
        return found.backward(dout, q, k, v, out, lse, causal=True, scale=scale)

    return (
        flops / seconds_of(context, forward, sizes),
        BACKWARD * flops / seconds_of(context, backward, sizes),
    )


def _contention(context: RankContext, sizes: Sizes, dtype: str) -> float:
    """A transfer and products that take as long: together against the longer of them.

    0 where the transfer costs nothing, 1 where one waits for the other.
    """
    comm = context.comm(("all",))
    if comm.size == 1:
        return 0.0
    x = _random(context, dtype, sizes.rows[-1], sizes.width)
    weight = _random(context, dtype, sizes.width)
    block = torch.ones(sizes.messages[-1] // 4, device=context.device)
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def seconds(operation: Callable[[], object]) -> float:
        return seconds_of(context, operation, sizes)

    hop = seconds(lambda: comm.start_exchange([block], to=to, source=source).wait())
    # The same on all ranks, as the seconds are.
    times = max(1, round(hop / seconds(lambda: x @ weight)))

    def products() -> None:
        for _ in range(times):
            _ = x @ weight

    def both() -> None:
        pending = comm.start_exchange([block], to=to, source=source)
        products()
        pending.wait()

    work = seconds(products)
    return min(max(0.0, seconds(both) - max(work, hop)) / min(work, hop), 1.0)


def _memory(context: RankContext) -> int:
    """Bytes that one rank may use: of its GPU, or its part of the host's."""
    if context.device.type == "cuda":
        return torch.cuda.mem_get_info(context.device)[1]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // int(os.environ.get("LOCAL_WORLD_SIZE", context.world_size))


def _random(context: RankContext, dtype: str, *shape: int) -> Tensor:
    """One number: a square."""
    shape = shape * 2 if len(shape) == 1 else shape
    return torch.randn(shape, device=context.device).to(DTYPES[dtype])
