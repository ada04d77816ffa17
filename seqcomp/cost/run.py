"""What is run under a plan: sizes, dtype and whether it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seqcomp.diagnostics import PlanError, diagnostic

Mode = Literal["train", "prefill"]
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
MOST = 1 << 40
"""Tokens and sequences beyond this are a slip; their squares still are exact enough as floats."""


@dataclass(frozen=True, slots=True)
class Run:
    """``seq_len``: full length in tokens. ``batch``: sequences on each data rank.

    ``dtype``: of weights and activations. ``mode``: "train" is forward, backward and AdamW;
    "prefill" a forward that keeps keys and values and gives the logits of the last token.

    Raises:
        PlanError: SC010 for counts below 1 or beyond `MOST` and unknown dtypes and modes.
    """

    seq_len: int
    batch: int = 1
    dtype: str = "bf16"
    mode: Mode = "train"

    def __post_init__(self) -> None:
        wrong = [
            diagnostic("SC010", where=name, found=value, legal=f"a whole number from 1 to {MOST}")
            for name, value in (("seq_len", self.seq_len), ("batch", self.batch))
            if not 1 <= value <= MOST
        ]
        for name, value, legal in (
            ("dtype", self.dtype, tuple(ELEMENT_BYTES)),
            ("mode", self.mode, ("train", "prefill")),
        ):
            if value not in legal:
                message = f"unknown {name}"
                wrong.append(
                    diagnostic("SC010", where=name, message=message, found=value, legal=legal)
                )
        if wrong:
            raise PlanError(wrong)

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return self.mode == "train"
