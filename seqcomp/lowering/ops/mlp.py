"""An MLP that is computed some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from seqcomp.lowering.ops.base import Op, RankBinding
from seqcomp.runtime.chunked_mlp import Body, Chunks, chunked, number_of
from seqcomp.runtime.recompute import keep_nothing
from seqcomp.runtime.tensor_parallel import Regathered, column_linear


@dataclass(frozen=True, eq=False)
class ChunkedMlp(Op):
    """`body` of x, in chunks of tokens where there are enough of them for that.

    Operands: x, of a gathered x its shard and the promise to gather it again (as `ColumnLinear`),
    the parameters of the body. `chunks`: how many make what a chunk holds inside as large as x.
    `uses`: linears of x that the promise counts. `last`: what follows in the block saves nothing
    that is made of the result. `inside`: modules that are not called because of it.
    """

    chunks: int
    uses: int
    last: bool
    inside: tuple[str, ...]
    code: str
    body: Body = field(repr=False)
    __name__ = "chunked_mlp"

    def whole(
        self, x: Tensor, shard: Tensor | None, again: Regathered | None, *parameters: Tensor
    ) -> Tensor:
        """All tokens at once."""
        if shard is None or again is None:
            return self.body(linear, x, *parameters)

        def of_gathered(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return column_linear(x, shard, weight, bias, again)

        return self.body(of_gathered, x, *parameters)

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        recompute = rank.recompute

        def run(
            x: Tensor, shard: Tensor | None, again: Regathered | None, *parameters: Tensor
        ) -> Tensor:
            number = number_of(x, self.chunks)
            if number == 1:
                return self.whole(x, shard, again, *parameters)
            keep = keep_nothing if self.last else recompute.keep
            skip = self.last and recompute.is_again
            how = Chunks(self.body, number, self.uses, skip, keep)
            return chunked(how, x, shard, again, parameters)

        return run
