"""Operations that compute, each on this rank's part."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqcomp.capture.units import Unit
from seqcomp.layout.masks import Mask
from seqcomp.layout.sequence import SequenceLayout
from seqcomp.lowering.ops.base import Op, RankBinding
from seqcomp.runtime import tensor_parallel
from seqcomp.runtime.attention import AttentionPlan, Transport, attention
from seqcomp.runtime.attention.pair_dropout import PairDropout
from seqcomp.runtime.attention.pair_mask import PairMask
from seqcomp.runtime.attention.tiling import DataTiling, StaticTiling, Tiling
from seqcomp.runtime.tokens import Tokens
from seqcomp.runtime.units import counted_together, run_whole


@dataclass(frozen=True)
class Attention(Op):
    """Attention over sharded tokens: Ulysses inside, ring outside.

    A fourth operand is the tiling of a mask that depends on data (`mask` is None), a fifth the
    sinks of its heads, a sixth the length of a padded sequence, a seventh the dropout of pairs.
    `whole`: every rank has all tokens, and nothing is exchanged.
    """

    mask: Mask | None
    scale: float
    transport: Transport
    label: str
    softcap: float = 0.0
    lse: bool = False
    whole: bool = False
    __name__ = "attention"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        def comm(axis: str | None) -> Any:
            shared = axis in rank.sequence and not self.whole
            return rank.context.comm((axis,)) if shared else None

        ring, ulysses = comm(rank.ring_axis), comm(rank.ulysses_axis)
        layout = SequenceLayout("contiguous") if self.whole else rank.layout
        plan = AttentionPlan(self.mask, layout, self.transport, self.scale, self.softcap, self.lse)
        parts = layout.ring * (ulysses.size if ulysses else 1)

        @functools.lru_cache(maxsize=4)
        def rule_on(
            dealt: int, device: torch.device, real: int | None, dtype: torch.dtype
        ) -> StaticTiling:
            assert self.mask is not None, "neither a mask nor a tiling"
            return StaticTiling(self.mask, layout, dealt, device, real, dtype)

        def sharded_attention(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            tiling: Tiling | None = None,
            sinks: Tensor | None = None,
            length: int | None = None,
            dropout: PairDropout | None = None,
        ) -> Tensor:
            if tiling is None:
                tiling = rule_on(q.shape[2] * parts, q.device, length, q.dtype)
            return attention(
                q, k, v, plan, tiling, sinks, dropout=dropout,
                ring=ring, ulysses=ulysses, length=length, label=self.label,
                keep=rank.recompute.keep,
            )  # fmt: skip

        return sharded_attention


@dataclass(frozen=True)
class MaskTiling(Op):
    """The tiles of a mask from its inputs; `dims` says what their dims are in [B, H, q, k].

    `whole`: every rank has all tokens; otherwise they are shared out, and `padded` first.
    """

    mask: PairMask
    dims: tuple[tuple[int, ...], ...]
    whole: bool = False
    padded: bool = False
    __name__ = "mask_tiling"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        device = rank.context.device
        layout = SequenceLayout("contiguous") if self.whole else rank.layout

        def mask_tiling(length: int, *inputs: Tensor) -> DataTiling:
            leaves = [_framed(x, dims) for x, dims in zip(inputs, self.dims, strict=True)]
            dealt = layout.padded(length) if self.padded else length
            return DataTiling(self.mask, leaves, layout, dealt, device, length)

        return mask_tiling


def _framed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """[B, H, q, k] from a tensor that has some of these dims."""
    x = x.permute(sorted(range(len(dims)), key=dims.__getitem__))
    places = {max(dim, 0) for dim in dims}  # a table's rows stand where the batch does
    for dim in range(4):
        if dim not in places:
            x = x.unsqueeze(dim)
    return x


@dataclass(frozen=True)
class Remember(Op):
    """Shard -> the promise to gather it again in backward, for `uses` linears."""

    dim: int
    axes: tuple[str, ...]
    uses: int
    label: str = ""
    __name__ = "remember"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm, layout = rank.context.comm(self.axes), rank.layout_over(self.axes)

        def remember(x: Tensor, length: int | None = None) -> tensor_parallel.Regathered:
            tokens = Tokens(x, self.dim, comm, layout, self.label, local=True, length=length)
            return rank.recompute.promise(lambda: tensor_parallel.Regathered(tokens, self.uses))

        return remember

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class ColumnLinear(Op):
    """Column-parallel linear of a gathered value; saves the shard it was gathered from."""

    __name__ = "column_linear"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        return tensor_parallel.column_linear


@dataclass(frozen=True)
class VocabularyEmbedding(Op):
    """Embedding rows cut over axes; the result is partial."""

    axes: tuple[str, ...]
    padding_idx: int
    words: int
    __name__ = "vocabulary_embedding"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda weight, index: tensor_parallel.vocabulary_embedding(
            weight, index, self.padding_idx, self.words, comm
        )

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class VocabularyLoss(Op):
    """Cross-entropy of logits whose classes are cut over axes."""

    axes: tuple[str, ...]
    classes: int
    words: int
    ignore_index: int
    reduce: bool
    label: str
    __name__ = "vocabulary_loss"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda logits, target: tensor_parallel.vocabulary_cross_entropy(
            logits,
            target,
            comm,
            classes=self.classes,
            words=self.words,
            ignore_index=self.ignore_index,
            reduce=self.reduce,
            label=self.label,
        )

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True)
class OwnHeads(Op):
    """The one KV head that this rank's query heads use."""

    axes: tuple[str, ...]
    heads: int
    __name__ = "own_heads"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        comm = rank.context.comm(self.axes)
        return lambda x: tensor_parallel.own_heads(x, self.heads, comm)

    def axes_used(self) -> tuple[str, ...]:
        return self.axes


@dataclass(frozen=True, eq=False)
class TokenLocal(Op):
    """A module's own code on this rank's tokens; `axes` divide each dim of each result.

    What it counts of its tokens is added up over `shared`, the axes that share tokens out.
    """

    unit: Unit
    axes: tuple[tuple[tuple[str, ...], ...], ...]
    shared: tuple[str, ...] = ()
    __name__ = "token_local"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        module, sizes = rank.module, rank.context.sizes

        comm = rank.context.comm(self.axes_used()) if self.axes_used() else None

        def token_local(inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
            held = [module.get_buffer(f"{self.unit.path}.{name}") for name, _ in self.unit.counters]
            with counted_together(held, comm, self.unit.path):
                results = run_whole(functools.partial(self.unit.run, module), inputs, parameters)
            wanted = self.shapes([x.shape for x in inputs], sizes)
            if [tuple(x.shape) for x in results] != wanted:
                found = [tuple(x.shape) for x in results]
                raise RuntimeError(
                    f"{self.unit.path} made {found} of a rank's tokens, not {wanted}: "
                    "it does not treat each token alone"
                )
            return results

        return token_local

    def axes_used(self) -> tuple[str, ...]:
        return self.shared if self.unit.counters else ()

    @property
    def label(self) -> str:
        """What counts the bytes of the counts."""
        return self.unit.path

    def shapes(
        self, inputs: Sequence[Sequence[int]], degrees: Mapping[str, int]
    ) -> list[tuple[int, ...]]:
        """Local shapes of the results for local shapes of the inputs."""
        return [
            tuple(
                size.value // math.prod(degrees[a] for a in axes)
                if size.source is None
                else size.of(inputs)
                for size, axes in zip(sizes, cut, strict=True)
            )
            for sizes, cut in zip(self.unit.outputs, self.axes, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Constant(Op):
    """A tensor that the capture lifted out of the code."""

    value: Tensor
    __name__ = "constant"

    def bind(self, rank: RankBinding) -> Callable[..., Any]:
        value = self.value.to(rank.context.device)
        return lambda: value
