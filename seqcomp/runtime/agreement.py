"""Ranks agree before the first collective: on outcomes of compilations, on signatures of calls.

A rank that fails, or calls with other shapes, would leave the others waiting in a collective (or
abort the process: gloo does so on sizes that do not match). Outcomes are exchanged through the
key-value store; per call a hash goes round on the host channel, and only when hashes differ are
the texts exchanged.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.lost import RankLostError


@dataclass(frozen=True)
class Outcome:
    """What one rank reports: `ok`, and a text (a signature, or an error)."""

    rank: int
    ok: bool
    text: str


class Agreement:
    """Exchanges between all ranks of a mesh; every rank makes the same sequence of them."""

    def __init__(self, context: RankContext, timeout_s: float):
        self._context = context
        self._timeout_s = timeout_s

    def exchange(self, ok: bool, text: str) -> list[Outcome] | None:
        """None where every rank is fine and says the same; else everybody's outcome.

        Raises RankLostError when a rank has ended, or does not answer in time.
        """
        if self._context.world_size == 1:
            return None if ok else [Outcome(0, ok, text)]
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        # A number that no other exchange has: the keys of a disagreement are never read twice.
        nonce = secrets.randbits(62)
        bad, high, low, common = self.all_max([int(not ok), digest, -digest, nonce])
        if not bad and high == -low:
            return None
        key = f"agreement/{common}"
        try:
            self._context.store.set(f"{key}/{self._context.rank}", f"{int(ok)}{text}")
            return [self._read(key, rank) for rank in range(self._context.world_size)]
        except RankLostError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise RankLostError(str(error)) from error

    def all_max(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over the ranks. Raises RankLostError as `exchange` does."""
        if self._context.world_size == 1:
            return list(values)
        try:
            return self._context.host.all_max(values, timeout_s=self._timeout_s)
        except RankLostError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise RankLostError(str(error)) from error

    def _read(self, key: str, rank: int) -> Outcome:
        value = self._context.store.get(f"{key}/{rank}", timeout_s=self._timeout_s)
        return Outcome(rank, value[0] == "1", value[1:])
