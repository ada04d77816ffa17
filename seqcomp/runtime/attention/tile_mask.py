"""What says which pairs of a tile are seen, and how much: kernels take it in one argument."""

from __future__ import annotations

from torch import Tensor

from seqcomp.runtime.attention.band_mask import BandMask
from seqcomp.runtime.attention.hidden_rows import HiddenRows
from seqcomp.runtime.attention.score_tile import ScoreTile

TileMask = Tensor | BandMask | HiddenRows | ScoreTile
