"""Messages that have been posted to a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from seqcomp.runtime.comm import Pending


class Posted(Pending):
    """Works of c10d; ``finish`` makes the results, ``naming`` is what waiting happens in."""

    def __init__(
        self,
        works: list[dist.Work],
        sends: list[Tensor],
        finish: Callable[[], list[Tensor]],
        naming: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._works = works
        self._sends = sends
        self._finish = finish
        self._naming = naming

    def wait(self) -> list[Tensor]:
        with self._naming():
            wait_all(self._works)
        self._sends = []
        return self._finish()


def wait_all(works: Iterable[dist.Work]) -> None:
    """Waits for each in turn."""
    for work in works:
        work.wait()
