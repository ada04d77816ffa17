"""What a lowered graph calls besides ATen, as data; `bind` turns it into a function of one rank.

A program is lowered once and is the same for every rank: only these operations know ranks, and
only once bound. Each counts its bytes under the module path in `label`.
"""

from __future__ import annotations

from seqcomp.lowering.ops.along import RunningSum, TokensAt, Windowed
from seqcomp.lowering.ops.base import (
    Op,
    Place,
    RankBinding,
)
from seqcomp.lowering.ops.compute import (
    Attention,
    ColumnLinear,
    Constant,
    MaskTiling,
    OwnHeads,
    Remember,
    TokenLocal,
    VocabularyEmbedding,
    VocabularyLoss,
)
from seqcomp.lowering.ops.dropout import Dealt, Dropout, DropPairs
from seqcomp.lowering.ops.loss import ChunkedLoss, Step
from seqcomp.lowering.ops.mlp import ChunkedMlp
from seqcomp.lowering.ops.moves import (
    AllReduce,
    AllToAll,
    FillBucket,
    Gather,
    HidePadding,
    LocalPart,
    OpenBucket,
    OwnCotangent,
    PaddedLength,
    PadPart,
    Part,
    ReduceScatter,
    ScaleCotangent,
    Shard,
    SumGradient,
)
from seqcomp.lowering.ops.opaque import Traceable

__all__ = [
    "AllReduce",
    "AllToAll",
    "Attention",
    "ChunkedLoss",
    "ChunkedMlp",
    "ColumnLinear",
    "Constant",
    "Dealt",
    "DropPairs",
    "Dropout",
    "FillBucket",
    "Gather",
    "HidePadding",
    "LocalPart",
    "MaskTiling",
    "Op",
    "OpenBucket",
    "OwnCotangent",
    "OwnHeads",
    "PadPart",
    "PaddedLength",
    "Part",
    "Place",
    "RankBinding",
    "ReduceScatter",
    "Remember",
    "RunningSum",
    "ScaleCotangent",
    "Shard",
    "Step",
    "SumGradient",
    "TokenLocal",
    "TokensAt",
    "Traceable",
    "VocabularyEmbedding",
    "VocabularyLoss",
    "Windowed",
]
