"""Lets torchtitan 0.3.0 run on torch 2.13.0, and on the CPU: it asks for an accelerator when it is
imported."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout


class CpuModule:
    """What torchtitan asks of ``torch.cuda``, answered by ``torch.cpu`` and the machine."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def get_device_name(device: torch.device) -> str:
        """For its table of peak FLOPS, which has no CPUs: the figures that follow mean nothing."""
        return "cpu"

    @staticmethod
    def get_device_properties(device: torch.device) -> SimpleNamespace:
        """The machine's memory in bytes."""
        pages = os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(total_memory=pages * os.sysconf("SC_PAGE_SIZE"))

    @staticmethod
    def current_device() -> int:
        """The one there is."""
        return 0

    @staticmethod
    def memory_stats(device: torch.device) -> dict[str, int]:
        """None is kept for the CPU."""
        return {}

    @staticmethod
    def reset_peak_memory_stats() -> None:
        """Nothing to reset."""

    @staticmethod
    def empty_cache() -> None:
        """Nothing to empty."""


def import_torchtitan() -> None:
    """Imports torchtitan, on the CPU where there is no accelerator. Before any other import of it.

    Its Trainer calls ``torch.distributed.set_timeout`` after the first step, which torch 2.13.0
    has by another name.
    """
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]
    if torch.accelerator.is_available():
        import torchtitan.tools.utils

        return
    module = CpuModule()
    with (
        mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
        mock.patch("torch._utils._get_device_module", return_value=module),
    ):
        import torchtitan.tools.utils  # noqa: F401
