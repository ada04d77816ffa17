"""A measured cluster as tables; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from seqcomp.report.text import as_text


def profile_text(document: dict[str, Any]) -> str:
    """Of the data of a cluster file: rates of links, and of kernels by size."""
    return as_text([document["name"], _kernels(document["device"]), _links(document)])


def _kernels(device: dict[str, Any]) -> Table:
    kernels = device["kernels"]
    peaks = {name: number["value"] for name, number in device["peak_tflops"].items()}
    main = next(iter(peaks))
    table = Table("kernel", "size", "rate", title=f"one rank: {device['name']}")
    for name, peak in peaks.items():
        table.add_row(f"peak, {name}", "", f"{1e3 * peak:,.4g} GFLOP/s")
    for name in ("dense", "attention_forward", "attention_backward"):
        for size, share in kernels[name]["points"]:
            what = f"{name.replace('_', ' ')}, {main}"
            table.add_row(what, f"{size:,}", f"{1e3 * peaks[main] * share:,.4g} GFLOP/s")
    table.add_row("memory", "", f"{device['memory_gb_s']['value']:,.4g} GB/s")
    table.add_row("smallest operation", "", f"{kernels['launch_us']['value']:,.4g} us")
    table.add_row("slowed by a transfer", "", f"{kernels['contention']['value']:.0%} of its time")
    return table


def _links(document: dict[str, Any]) -> Table:
    table = Table("link", "collective", "ranks", "latency", "bandwidth of a rank")
    spans = ("intra", "inter") if document["max_nodes"] > 1 else ("intra",)
    for span in spans:
        for row in _rates(document[span]):
            table.add_row(*row)
    return table


def _rates(link: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for kind, own in link.get("rates", {}).items():
        for point in own["points"]:
            late, fast = f"{point['latency_us']:,.4g} us", f"{point['gb_s']:,.4g} GB/s"
            yield link["name"], kind, str(point["ranks"]), late, fast
