"""What a rank can do with the ranks around it, whatever carries the bytes.

Two carriers implement these interfaces: real process groups (``dist``) and threads of one
process (``threads``). Everything above is written against this file alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from seqcomp.runtime.traffic import Phase, Traffic

Reduction = Literal["sum", "max"]


class Pending(ABC):
    """Tensors on their way; keeps what is being sent alive and untouched until ``wait``."""

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """The received tensors. On an accelerator the current stream waits, not the host."""


class Arrived(Pending):
    """An exchange that needed no transport."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return self._tensors


class Communicator(ABC):
    """A group of ranks, without autograd.

    ``rank`` is the nested index in the group: axes in the order they were asked for, the last
    fastest. Results never alias inputs, inputs need not be contiguous, and a group of one
    communicates nothing. All ranks of the group must make the same calls in the same order.
    """

    def __init__(self, axis: str, size: int, rank: int, traffic: Traffic) -> None:
        self.axis = axis
        self.size = size
        self.rank = rank
        self.traffic = traffic

    def all_gather(self, x: Tensor, *, phase: Phase = "forward", label: str = "") -> Tensor:
        """[...] on each rank -> [P, ...] in rank order."""
        return self.start_all_gather(x, phase=phase, label=label).wait()[0]

    def start_all_gather(self, x: Tensor, *, phase: Phase = "forward", label: str = "") -> Pending:
        """``all_gather`` whose one result comes later; ``x`` must not change before."""
        if self.size == 1:
            return Arrived([x.clone().unsqueeze(0)])
        self.count("all_gather", (self.size - 1) * _nbytes(x), phase, label)
        return self._start_all_gather(x.detach().contiguous())

    def reduce_scatter(self, x: Tensor, *, phase: Phase = "forward", label: str = "") -> Tensor:
        """[P, ...] -> [...]: the sum over ranks of everybody's row for this rank."""
        self._check_rows(x)
        if self.size == 1:
            return x[0].clone()
        self.count("reduce_scatter", _nbytes(x) // self.size * (self.size - 1), phase, label)
        return self._reduce_scatter(x.detach().contiguous())

    def all_reduce(
        self, x: Tensor, op: Reduction = "sum", *, phase: Phase = "forward", label: str = ""
    ) -> Tensor:
        """A new tensor: the sum or the maximum over the ranks, the same on all of them."""
        return self.start_all_reduce(x, op, phase=phase, label=label).wait()[0]

    def start_all_reduce(
        self, x: Tensor, op: Reduction = "sum", *, phase: Phase = "forward", label: str = ""
    ) -> Pending:
        """``all_reduce`` whose one result comes later; ``x`` must not change before."""
        if self.size == 1:
            return Arrived([x.clone()])
        sent = 2 * (self.size - 1) * _nbytes(x) // self.size
        self.count("all_reduce", sent, phase, label)
        return self._start_all_reduce(x.detach().contiguous(), op)

    def all_to_all(self, x: Tensor, *, phase: Phase = "forward", label: str = "") -> Tensor:
        """[P, ...] -> [P, ...]: row j goes to rank j, row i of the result came from rank i."""
        self._check_rows(x)
        if self.size == 1:
            return x.clone()
        self.count("all_to_all", _nbytes(x) // self.size * (self.size - 1), phase, label)
        return self._all_to_all(x.detach().contiguous())

    def start_exchange(
        self,
        sends: Sequence[Tensor],
        *,
        to: int,
        source: int,
        receives: Sequence[Tensor] | None = None,
        phase: Phase = "forward",
        label: str = "",
    ) -> Pending:
        """Post sends to rank ``to`` and receives from ``source``, in one batch.

        receives: contiguous tensors to fill, as many and of such shapes as ``source`` sends; like
        ``sends`` unless given. Both may be empty, but every rank of the group must call. The
        tensors must not change before ``wait``.
        """
        sends = [x.detach().contiguous() for x in sends]
        if self.size == 1:
            return Arrived([x.clone() for x in sends])
        assert to != self.rank != source, "an exchange with oneself"
        if sends:
            self.count("p2p", sum(map(_nbytes, sends)), phase, label)
        if receives is None:
            receives = [torch.empty_like(x) for x in sends]
        return self._start_exchange(sends, list(receives), to, source)

    def exchange_all(
        self,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        *,
        kind: Literal["all_gather", "reduce_scatter", "all_to_all"],
        phase: Phase = "forward",
        label: str = "",
    ) -> None:
        """One tensor to and from every rank, of any sizes, also none; fills ``receives``.

        Item r of each list is to or from rank r, one-dimensional, contiguous and of one dtype;
        this rank's own items are empty. Counted as the ``kind`` of which it is the needed part.
        """
        assert len(sends) == len(receives) == self.size, "an item for each rank"
        assert len(sends[self.rank]) == len(receives[self.rank]) == 0, "a message to oneself"
        self.count(kind, sum(map(_nbytes, sends)), phase, label)
        self._exchange_all([x.detach() for x in sends], list(receives))

    @abstractmethod
    def _start_all_gather(self, x: Tensor) -> Pending: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _start_all_reduce(self, x: Tensor, op: Reduction) -> Pending: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _start_exchange(
        self, sends: list[Tensor], receives: list[Tensor], to: int, source: int
    ) -> Pending: ...

    @abstractmethod
    def _exchange_all(self, sends: list[Tensor], receives: list[Tensor]) -> None: ...

    def count(self, kind: str, sent: int, phase: Phase, label: str) -> None:
        """Add a call of ``kind`` that left ``sent`` bytes of this rank to the counter."""
        self.traffic.add(kind, self.axis, sent, phase, label)

    def _check_rows(self, x: Tensor) -> None:
        assert x.shape[0] == self.size, f"{x.shape[0]} rows for {self.size} ranks"


class HostChannel(ABC):
    """Small integers over all ranks of the mesh, on the host, beside the model's own traffic."""

    @abstractmethod
    def all_max(self, values: Sequence[int], *, timeout_s: float = 300.0) -> list[int]:
        """Element-wise maximum over the ranks; raises RuntimeError when some rank is late."""

    @abstractmethod
    def of_first(self, draw: Callable[[], int], *, timeout_s: float = 300.0) -> int:
        """The number >= 0 that rank 0 draws, on all ranks. A rank with random state of its own
        draws as well, so that states that are equal stay equal. Raises as `all_max`."""


class KeyValueStore(ABC):
    """Strings shared by all ranks."""

    @abstractmethod
    def set(self, key: str, value: str) -> None: ...

    @abstractmethod
    def get(self, key: str, *, timeout_s: float = 300.0) -> str:
        """Waits until the key is set; TimeoutError when it is not set in time."""


def mesh_dim(axes: Sequence[str]) -> str:
    """Name of a joint group of axes, as a dim of a DeviceMesh and in counts of bytes."""
    return "+".join(axes)


class RankContext(ABC):
    """This rank's place in the mesh. ``sizes`` and ``coords`` list the axes outermost first."""

    host: HostChannel
    store: KeyValueStore

    def __init__(
        self, sizes: dict[str, int], coords: dict[str, int], rank: int, device: torch.device
    ) -> None:
        self.sizes = dict(sizes)
        self.coords = dict(coords)
        self.rank = rank
        self.world_size = math.prod(sizes.values())
        self.device = device
        self.traffic = Traffic()

    @abstractmethod
    def comm(self, axes: tuple[str, ...]) -> Communicator:
        """The group of this rank along ``axes``, nested in that order (the last is fastest)."""

    def device_mesh(self, dims: Sequence[tuple[str, ...]]) -> DeviceMesh | None:
        """A DeviceMesh with one dim for each joint group of axes, named as in ``mesh_dim``.

        None without processes. Its dims are outermost first, as are the axes of each.
        """
        return None

    def prepare(self, axes: Sequence[tuple[str, ...]]) -> None:
        """Make these groups now. Collective: every rank of the mesh gives the same list."""
        for names in axes:
            self.comm(tuple(names))

    @abstractmethod
    def close(self) -> None:
        """Release what this context made; calling it again does nothing."""

    def _nested(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """(size, rank) of the joint group."""
        unknown = [name for name in axes if name not in self.sizes]
        assert not unknown, f"no axis {unknown} in {list(self.sizes)}"
        assert len(set(axes)) == len(axes), f"an axis twice in {axes}"
        rank = 0
        for name in axes:
            rank = rank * self.sizes[name] + self.coords[name]
        return math.prod(self.sizes[name] for name in axes), rank


def sum_in_rank_order(rows: Sequence[Tensor]) -> Tensor:
    """A new tensor; half precision is added up in fp32. The same bits wherever it is computed."""
    if len(rows) == 1:
        return rows[0].clone()
    dtype = rows[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = rows[0].to(wide) + rows[1]
    for row in rows[2:]:
        total += row
    return total.to(dtype)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
