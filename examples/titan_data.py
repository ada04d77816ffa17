"""Text and a tokenizer for torchtitan that need no download: the bytes of Python's own library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

END = 256  # of a document, after the 256 bytes


class ByteTokenizer(BaseTokenizer):
    """One token for a byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = END

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text."""
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        """The text of ids."""
        return bytes(i for i in ids if i < END).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """256 bytes and the end of a document."""
        return END + 1


class LibraryText(BaseDataLoader):
    """Documents packed into rows of `seq_len` tokens; positions start anew with each of them.

    Rank `dp_rank` of `dp_world_size` gets its own rows of every batch, [local_batch_size, seq_len].
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """How much text there is, and whether rows are packed documents or one text each."""

        text_bytes: int = 2**20
        packed: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self._ranks, self._rank = dp_world_size, dp_rank
        self._length, self._rows = seq_len, local_batch_size
        self._packed = config.packed
        self._step = 0
        parts: list[Tensor] = []
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            parts.append(torch.tensor([*tokenizer.encode(text), END], dtype=torch.int32))
            if sum(map(len, parts)) > config.text_bytes:
                break
        self._ids = torch.cat(parts)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = (self._step * self._ranks + self._rank) * self._rows
            self._step += 1
            rows = torch.stack([self._row(first + row) for row in range(self._rows)])
            inputs = rows[:, :-1].contiguous()
            positions = self._positions(inputs)
            yield {"input": inputs, "positions": positions}, rows[:, 1:].contiguous()

    def _row(self, number: int) -> Tensor:
        start = number * self._length % (len(self._ids) - self._length - 1)
        return self._ids[start : start + self._length + 1].long()

    def _positions(self, inputs: Tensor) -> Tensor:
        """[B, S]: counted from the beginning of the row, or of the document."""
        at = torch.arange(inputs.shape[1]).expand_as(inputs)
        if not self._packed:
            return at.contiguous()
        begins = torch.zeros_like(at)
        begins[:, 1:] = (inputs[:, :-1] == END) * at[:, 1:]
        return at - begins.cummax(1).values

    def state_dict(self) -> dict[str, Any]:
        """How many batches were given."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after that many batches."""
        self._step = state_dict.get("step", 0)
