"""The only place that makes process groups.

Groups are cached by the partition of the ranks they belong to, counted, shared by all contexts
that need the same partition, and destroyed when the last of them closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from seqcomp.runtime.comm import Communicator, RankContext, mesh_dim
from seqcomp.runtime.host import GlooHost, LonelyHost, PrefixedStore
from seqcomp.runtime.lost import Census
from seqcomp.runtime.process_comm import ProcessCommunicator
from seqcomp.runtime.traffic import Traffic

__all__ = ["Communicator", "RankContext", "Traffic", "group_count", "process_context"]

Partition = tuple[tuple[int, ...], ...]
"""Disjoint sets of global ranks, each sorted, that together cover a mesh."""

_Key = tuple[Partition, str, str]


@dataclass
class _Entry:
    group: dist.ProcessGroup
    world: dist.ProcessGroup
    users: int = 0
    pinned: bool = False


# Keyed by (partition, backend, purpose). A whole partition, not one's own ranks: creating groups is
# collective, so whether it happens must be decided alike on every rank.
_groups: dict[_Key, _Entry] = {}


def group_count() -> int:
    """How many process groups seqcomp has made and not destroyed."""
    _forget_dead_groups()
    return len(_groups)


def process_context(
    sizes: dict[str, int], mesh: DeviceMesh | None = None, device: torch.device | None = None
) -> RankContext:
    """The context of this process in a mesh of ``sizes`` (axis -> size, outermost first).

    Ranks are laid out row-major, or as in ``mesh``, whose axes must then be those of ``sizes`` in
    the same order and whose groups are used for single axes. ``device`` defaults to the CPU for
    gloo and to the current accelerator otherwise. Needs an initialised default group.
    """
    return ProcessContext(sizes, mesh, device)


class ProcessContext(RankContext):
    """See ``process_context``."""

    def __init__(
        self, sizes: dict[str, int], mesh: DeviceMesh | None, device: torch.device | None
    ) -> None:
        assert dist.is_initialized(), "torch.distributed is not initialised"
        rank = dist.get_rank()
        shape = tuple(sizes.values())
        if mesh is None:
            grid = torch.arange(dist.get_world_size()).reshape(shape)
        else:
            assert tuple(mesh.mesh.shape) == shape, f"mesh {mesh.mesh.shape} is not {shape}"
            grid = mesh.mesh.cpu()
        place = (grid == rank).nonzero()
        assert len(place) == 1, f"rank {rank} is not in the mesh"
        if device is None:
            device = _default_device()
        super().__init__(sizes, dict(zip(sizes, place[0].tolist(), strict=True)), rank, device)
        self._grid = grid
        self._mesh = mesh
        self._comms: dict[tuple[str, ...], ProcessCommunicator] = {}
        self._used: list[_Key] = []
        self._closed = False
        store = dist.distributed_c10d._get_default_store()
        self.census = Census(store, rank, grid.flatten().tolist())
        alone = self.world_size == 1
        self.host = LonelyHost() if alone else GlooHost(self._host_group(), self.census)
        self.store = PrefixedStore(self.census)

    def comm(self, axes: tuple[str, ...]) -> Communicator:
        if axes not in self._comms:
            assert not self._closed, "the context is closed"
            self._comms[axes] = self._make(axes)
        return self._comms[axes]

    def device_mesh(self, dims: Sequence[tuple[str, ...]]) -> DeviceMesh | None:
        names = list(self.sizes)
        rest = [name for name in names if not any(name in dim for dim in dims)]
        order = [names.index(name) for name in (*rest, *(name for dim in dims for name in dim))]
        shape = [self._nested(dim)[0] for dim in dims]
        grids = self._grid.permute(order).reshape(-1, *shape)
        (mine,) = [grid for grid in grids if (grid == self.rank).any()]
        groups = [
            self._mesh_group(dim) or self._dim_group(grids, index) for index, dim in enumerate(dims)
        ]
        for group in groups:
            _pin(group)
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],
            self.device.type,
            mesh=mine if len(groups) > 1 else None,
            mesh_dim_names=tuple(map(mesh_dim, dims)),
        )

    def _dim_group(self, grids: Tensor, index: int) -> dist.ProcessGroup:
        """The groups along one dim of equal grids of ranks [n, ...]."""
        rows = grids.movedim(index + 1, -1).reshape(-1, grids.shape[index + 1]).tolist()
        assert all(row == sorted(row) for row in rows), "a mesh whose ranks are not in order"
        return self._group(tuple(sorted(tuple(row) for row in rows)))

    def side_group(self, purpose: str) -> dist.ProcessGroup:
        """A gloo group of all ranks of the mesh for a thread of its own. Collective.

        The same for each ``purpose``, and freed with the context.
        """
        everyone: Partition = (tuple(sorted(self._grid.flatten().tolist())),)
        return self._group(everyone, "gloo", purpose)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._comms.clear()
        for key in self._used:
            _release(key)
        self._used.clear()

    def _make(self, axes: tuple[str, ...]) -> ProcessCommunicator:
        size, rank = self._nested(axes)
        name = mesh_dim(axes)
        if size == 1:
            return ProcessCommunicator(name, [self.rank], rank, self.traffic, None, self.census)
        nested = self._nested_ranks(axes)
        mine = next(ranks for ranks in nested if self.rank in ranks)
        group = self._mesh_group(axes)
        if group is None:
            group = self._group(tuple(sorted(tuple(sorted(ranks)) for ranks in nested)))
        return ProcessCommunicator(name, mine, rank, self.traffic, group, self.census)

    def _nested_ranks(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Global ranks of every group along ``axes``, each in nested order."""
        names = list(self.sizes)
        rest = [name for name in names if name not in axes]
        order = [names.index(name) for name in (*rest, *axes)]
        size = self._nested(axes)[0]
        return self._grid.permute(order).reshape(-1, size).tolist()

    def _mesh_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        wide = [name for name in axes if self.sizes[name] > 1]
        if self._mesh is None or len(wide) != 1:
            return None
        return self._mesh.get_group(list(self.sizes).index(wide[0]))

    def _group(
        self, partition: Partition, backend: str = "", purpose: str = ""
    ) -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None
        if not backend and partition == (tuple(range(dist.get_world_size())),):
            return world
        key = (partition, backend, purpose)
        group = _acquire(key, world, self.rank, covers_world=self._grid.numel() == world.size())
        self._used.append(key)
        return group

    def _host_group(self) -> dist.ProcessGroup:
        everyone: Partition = (tuple(sorted(self._grid.flatten().tolist())),)
        hosted = "gloo" in dist.get_backend() or "cpu:gloo" in dist.get_backend_config()
        return self._group(everyone, "" if hosted else "gloo")


def _default_device() -> torch.device:
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _acquire(
    key: _Key, world: dist.ProcessGroup, rank: int, *, covers_world: bool
) -> dist.ProcessGroup:
    _forget_dead_groups()
    entry = _groups.get(key)
    if entry is None:
        partition, backend, _ = key
        mine = None
        for ranks in partition:
            # Ranks outside the mesh do not take part, so the members must meet alone there.
            if not covers_world and rank not in ranks:
                continue
            group = dist.new_group(
                list(ranks), backend=backend or None, use_local_synchronization=not covers_world
            )
            mine = group if rank in ranks else mine
        assert mine is not None
        entry = _groups[key] = _Entry(mine, world)
    entry.users += 1
    return entry.group


def _pin(group: dist.ProcessGroup) -> None:
    """Keeps a group for good: DTensor caches specs by equal meshes, whatever their groups."""
    for entry in _groups.values():
        if entry.group is group and not entry.pinned:
            entry.pinned = True
            entry.users += 1


def _release(key: _Key) -> None:
    _forget_dead_groups()
    entry = _groups.get(key)
    if entry is None:
        return
    entry.users -= 1
    if entry.users == 0:
        del _groups[key]
        dist.destroy_process_group(entry.group)


def _forget_dead_groups() -> None:
    """Drop groups of a default group that is gone: torch destroyed them with it."""
    world = dist.group.WORLD if dist.is_initialized() else None
    for key in [key for key, entry in _groups.items() if entry.world is not world]:
        del _groups[key]
