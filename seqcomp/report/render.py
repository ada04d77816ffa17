"""Tables of a report as plain text. Modules that differ only in an index share a line."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from seqcomp.report.attention import WorkRow
from seqcomp.report.footprint import FootprintRow
from seqcomp.report.rows import CommRow, KernelRow
from seqcomp.report.storages import MemoryRow
from seqcomp.report.text import as_text, count_of, pattern, readable

__all__ = [
    "as_text", "comm_table", "count_of", "footprint_table", "kernel_table", "memory_line",
    "pattern", "readable", "work_table",
]  # fmt: skip


def comm_table(rows: Iterable[CommRow]) -> Table:
    """Sums over layers, forward first."""
    groups: dict[tuple[str, ...], list[CommRow]] = {}
    for row in sorted(rows, key=lambda r: r.phase == "backward"):
        overlap = "yes" if row.overlappable else "no"
        exact = "at most " if row.at_most else ""
        key: tuple[str, ...] = (pattern(row.module), row.kind, row.axis, row.phase, overlap, exact)
        groups.setdefault(key, []).append(row)
    table = Table("module", "collective", "axis", "phase", "can overlap", title="sent by one rank")
    table.add_column("calls", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("layers", justify="right")
    table.add_column("bytes each", justify="right")
    for key, members in groups.items():
        calls, sent = sum(r.count for r in members), sum(r.bytes_sent for r in members)
        *names, exact = key
        layers = {r.module for r in members}
        of_each = {
            sum(r.bytes_sent for r in members if r.module == layer) for layer in layers
        }  # fmt: skip
        each = " to ".join(readable(size) for size in sorted({min(of_each), max(of_each)}))
        table.add_row(
            *names, exact + str(calls), exact + readable(sent), str(len(layers)), exact + each
        )
    return table


def work_table(rows: Iterable[WorkRow]) -> Table:
    """Forward FLOPs of the busiest rank and of the mean, of one layer."""
    groups: dict[tuple[str, ...], int] = {}
    for row in rows:
        most = "at most " if row.at_most else ""
        balance = "depends on data" if row.balance is None else f"{row.balance:.6g}"
        key: tuple[str, ...] = (
            pattern(row.module), row.mask, most + count_of(max(row.flops)),
            most + count_of(row.mean), balance,
        )  # fmt: skip
        groups[key] = groups.get(key, 0) + 1
    table = Table("module", "mask", title="attention work of one rank, one layer, forward")
    for name in ("FLOPs, busiest rank", "FLOPs, mean", "balance max / mean", "layers"):
        table.add_column(name, justify="right")
    for key, count in groups.items():
        table.add_row(*key, str(count))
    return table


def footprint_table(rows: Iterable[FootprintRow]) -> Table:
    """One line for each kind."""
    table = Table("held", title="held by one rank")
    table.add_column("bytes", justify="right")
    table.add_column("from")
    table.add_column("note")
    for row in rows:
        at_least = "at least " if row.at_least else ""
        host = "; in host memory" if row.on_host else ""
        source = "formula" if row.formula else "graph"
        table.add_row(row.what, at_least + readable(row.bytes), source, row.note + host)
    return table


def kernel_table(rows: Iterable[KernelRow]) -> Table:
    groups: dict[tuple[str, ...], int] = {}
    for row in rows:
        key: tuple[str, ...] = (
            pattern(row.module), row.kernel, row.dtype,
            f"{row.heads} / {row.kv_heads} x {row.head_dim}", row.mask, row.layout, row.transport,
        )  # fmt: skip
        groups[key] = groups.get(key, 0) + 1
    table = Table(
        "module", "kernel", "dtype", "heads / KV x dim", "mask", "layout", "K/V travel",
        title="attention",
    )  # fmt: skip
    table.add_column("layers", justify="right")
    for key, count in groups.items():
        table.add_row(*key, str(count))
    return table


def memory_line(row: MemoryRow) -> str:
    """One line for one option of `memory`."""
    at_least = "at least " if row.at_least else ""
    host = ", in host memory" if row.on_host else ""
    return (
        f"{row.what} in {row.where} ({row.count} calls): {readable(row.bytes_kept)} saved for the "
        f"backward{host} instead of {at_least}{readable(row.bytes_without)}"
    )
