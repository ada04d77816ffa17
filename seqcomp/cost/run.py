"""What is run under a plan: sizes, dtype and whether it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.layout.documents import Documents
from seqcomp.layout.masks import Mask

Mode = Literal["train", "prefill"]
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
MOST = 1 << 40
"""Tokens and sequences beyond this are a slip; their squares still are exact enough as floats."""


@dataclass(frozen=True, slots=True)
class Run:
    """``seq_len``: full length in tokens. ``batch``: sequences on each data rank.

    ``dtype``: of weights and, but for mixed precision, activations. ``mode``: "train" is forward,
    backward and AdamW; "prefill" a forward that keeps keys and values and gives the logits of the
    last token.
    ``documents``: lengths of those that every sequence packs, one behind the other; attention stays
    within each. None: a sequence is one.

    Raises:
        PlanError: SC010 for counts below 1 or beyond `MOST`, unknown dtypes and modes, and
            documents that do not add up to the length.
    """

    seq_len: int
    batch: int = 1
    dtype: str = "bf16"
    mode: Mode = "train"
    documents: Documents | Sequence[int] | None = None

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
        if self.documents is not None and not isinstance(self.documents, Documents):
            packed = Documents(tuple(self.documents))
            object.__setattr__(self, "documents", packed)
            wrong += self._misfit(shortest=min(packed.lengths, default=0))
        else:
            wrong += self._misfit()
        if wrong:
            raise PlanError(wrong)

    def _misfit(self, shortest: int = 1) -> list[Diagnostic]:
        packed = self.packed
        if packed is None or (packed.length == self.seq_len and shortest >= 1):
            return []
        return [
            diagnostic(
                "SC010",
                where="documents",
                message=f"the documents have {packed.length} tokens, the sequence {self.seq_len}",
                found=str(packed)[:200],
                legal=f"lengths of 1 or more that add up to {self.seq_len}",
                help=_filled(packed, self.seq_len),
            )
        ]

    @property
    def packed(self) -> Documents | None:
        """``documents`` with what is known of them."""
        assert self.documents is None or isinstance(self.documents, Documents)
        return self.documents

    def mask(self, rule: Mask) -> Mask:
        """What attention sees under a rule on positions."""
        return rule if self.packed is None else self.packed.under(rule)

    def with_length(self, seq_len: int) -> Run:
        """The same of another length; the last documents are shorter, fewer, or one is longer."""
        if seq_len == self.seq_len:
            return self
        packed = self.packed and self.packed.of_length(seq_len)
        return replace(self, seq_len=seq_len, documents=packed)

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return self.mode == "train"


def _filled(packed: Documents, length: int) -> str | None:
    left = length - packed.length
    if not left or min(packed.lengths, default=0) < 1:
        return None
    fit = f"{packed},{left}" if left > 0 else str(packed.of_length(length))
    return fit if len(fit) < 100 else None
