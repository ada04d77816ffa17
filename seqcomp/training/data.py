"""Data for ranks: the same batch within a sequence group, slices of one global batch beside it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from seqcomp.lowering.compiled import compiled_of
from seqcomp.plan.resolve import resolve
from seqcomp.plan.schema import Plan

T = TypeVar("T")
IGNORED = -100


@dataclass(frozen=True)
class Slice:
    """Which of how many slices of the global batch a rank calls the model with."""

    index: int = 0
    count: int = 1


def slice_of(model: nn.Module) -> Slice:
    """The slice of this rank; a module that is not compiled takes the whole batch."""
    compiled = compiled_of(model)
    if compiled is None:
        return Slice()
    context, axes = compiled.context, compiled.resolved.batch_axes
    return _nested(context.sizes, context.coords, axes)


def slice_of_rank(plan: Plan, rank: int) -> Slice:
    """The same before the model is there, for ranks laid out row-major in the plan's mesh.

    Raises PlanError for a plan that is not legal.
    """
    resolved = resolve(plan)
    coords, rest = {}, rank
    for axis, size in reversed(list(resolved.axes.items())):
        rest, coords[axis] = divmod(rest, size)
    assert rest == 0, f"rank {rank} is not in a mesh of {resolved.world_size}"
    return _nested(dict(resolved.axes), coords, resolved.batch_axes)


def _nested(sizes: dict[str, int], coords: dict[str, int], axes: Sequence[str]) -> Slice:
    index = 0
    for axis in axes:
        index = index * sizes[axis] + coords[axis]
    return Slice(index, math.prod(sizes[axis] for axis in axes))


class BatchSampler(Sampler[list[int]]):
    """This rank's sample numbers of every batch of an epoch, for DataLoader's `batch_sampler`.

    The order is a permutation that depends on `seed` and the epoch alone (the given order without
    `shuffle`); batch i is its samples [i * batch, (i + 1) * batch), of which every slice has an
    equal run. Ranks of a sequence group have the same slice. Samples that do not fill a batch are
    left out of the epoch, on all ranks.

    The position moves when `feed` hands out a batch, not when a worker fetches one ahead. It is
    kept in samples, so a job can go on with another number of slices, or another batch.
    """

    def __init__(
        self, dataset: Sized | int, batch: int, part: Slice, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        """dataset: its length is all that counts; batch: samples of all slices together.

        Raises ValueError where the slices do not divide the batch, or no batch can be filled.
        """
        self._samples = dataset if isinstance(dataset, int) else len(dataset)
        if batch % part.count:
            raise ValueError(f"a batch of {batch} cannot be cut into {part.count} equal slices")
        if batch > self._samples:
            raise ValueError(f"{self._samples} samples do not fill a batch of {batch}")
        self._batch, self._part, self._seed, self._shuffle = batch, part, seed, shuffle
        self.epoch = 0
        self._position = 0
        self._taken = self._fed = False

    def __len__(self) -> int:
        """Batches that are left of the epoch."""
        return (self._samples - self._position) // self._batch

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self.epoch)
        size = self._batch // self._part.count
        for start in range(self._position, self._samples - self._batch + 1, self._batch):
            own = start + self._part.index * size
            self._taken = True
            yield order[own : own + size].tolist()

    def feed(self, loader: Iterable[T], epochs: int | None = None) -> Iterator[T]:
        """The loader's batches, epoch after epoch, from where this sampler stands.

        loader: one whose `batch_sampler` this is. epochs: when to stop; None never does.
        """
        self._fed = True
        while epochs is None or self.epoch < epochs:
            for batch in loader:
                self._position += self._batch
                yield batch
            self.epoch, self._position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks.

        Raises RuntimeError where batches were taken past `feed`, which alone counts them.
        """
        if self._taken and not self._fed:
            raise RuntimeError("batches were taken and not counted: loop over sampler.feed(loader)")
        return {"epoch": self.epoch, "position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another sampler stood. Raises ValueError for one of another seed."""
        if state["seed"] != self._seed:
            raise ValueError(f"the order has seed {state['seed']}, not {self._seed}")
        self.epoch, self._position = int(state["epoch"]), int(state["position"])
        self._taken = False

    def _order(self, epoch: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(self._samples)
        # Hashed: seeds and epochs that are small numbers would give sequences that are alike.
        digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randperm(self._samples, generator=generator)


@dataclass(frozen=True)
class Row:
    """One packed row of S tokens: ids, labels and position_ids, each [S] int64."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor


def pack(documents: Iterable[Tensor], length: int, *, filler: int = 0) -> Iterator[Row]:
    """Documents, each [n] of any n >= 1, one after the other into rows of `length` tokens.

    A document that does not fit goes on in the next row as a document of its own. Positions start
    anew with each, which is how models (and their masks) tell documents apart. Labels are not
    shifted: models shift them, so the first token of a document, which would be the target of the
    one before it, is -100. The last row is filled up with `filler` tokens, a document without
    labels.
    """
    ids: list[Tensor] = []
    starts: list[int] = [0]
    room = length
    for document in documents:
        rest = document
        while len(rest):
            piece, rest = rest[:room], rest[room:]
            ids.append(piece)
            starts.append(starts[-1] + len(piece))
            room -= len(piece)
            if room == 0:
                yield _row(ids, starts, length)
                ids, starts, room = [], [0], length
    if ids:
        yield _row([*ids, torch.full((room,), filler)], starts, length)


def _row(pieces: list[Tensor], starts: list[int], length: int) -> Row:
    ids = torch.cat([p.long() for p in pieces])
    first = torch.zeros(length, dtype=torch.long)
    for start in starts:
        if start < length:
            first[start] = start
    positions = torch.arange(length) - first.cummax(0).values
    labels = ids.masked_fill(positions == 0, IGNORED)
    labels[starts[-1] :] = IGNORED  # the filler; nothing in a row that is full
    return Row(ids, labels, positions)


def stack(rows: Sequence[Row]) -> dict[str, Tensor]:
    """A batch of packed rows as keyword arguments, each [B, S]; a DataLoader's `collate_fn`."""
    return {
        name: torch.stack([getattr(row, name) for row in rows])
        for name in ("input_ids", "labels", "position_ids")
    }
