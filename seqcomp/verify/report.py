"""What the verifier found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Divergence:
    """The first operation whose result differs from that of one device.

    phase: capture (the captured graph is not the module), forward, or backward (the gradient with
    respect to the operation's result; the operation nearest to the loss comes first).
    expected, found: the first values that differ, of this rank's part.
    """

    phase: Literal["capture", "forward", "backward"]
    module: str
    node: str
    op: str
    rank: int
    relative: float
    index: tuple[int, ...]
    expected: tuple[float, ...]
    found: tuple[float, ...]

    def __str__(self) -> str:
        what = "gradient of " if self.phase == "backward" else ""
        values = ", ".join(f"{x:.6g}" for x in self.found)
        right = ", ".join(f"{x:.6g}" for x in self.expected)
        return (
            f"{self.phase}: {what}{self.module or '<root>'}: {self.op} ({self.node}) on rank "
            f"{self.rank} is off by {self.relative:.2e} of its size, from {list(self.index)} on: "
            f"found [{values}], one device has [{right}]"
        )


@dataclass(frozen=True)
class VerifyReport:
    """A compiled model beside one device, on the same global batch, over all ranks.

    loss_rel: |loss - loss of one device| / |loss of one device|, the worst rank; the loss is the
    sum of the scalar outputs, else a random projection of all floating outputs.
    output_rel: the worst output, in max norm. max_grad_rel: the worst parameter, in the 2-norm
    relative to its own gradient; worst_parameter names the one that is furthest beyond (or nearest
    to) its bound. half_precision: errors are held against fp64, up to 1.5 x those of one device.
    not_shown: parts of the plan that this run says nothing about.
    """

    ok: bool
    loss_rel: float
    output_rel: float
    max_grad_rel: float
    worst_parameter: str
    first_divergence: Divergence | None
    plan: str
    ranks: int
    backend: str
    precision: str
    problems: tuple[str, ...]
    findings: tuple[str, ...]
    not_shown: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data: `json.dumps` takes it."""
        return asdict(self)

    def __str__(self) -> str:
        state = "equal to one device" if self.ok else "NOT equal to one device"
        lines = [
            f"{self.plan}: {state} ({self.ranks} ranks, {self.backend}, {self.precision})",
            f"  loss       {self.loss_rel:.2e}",
            f"  outputs    {self.output_rel:.2e}",
            f"  gradients  {self.max_grad_rel:.2e}"
            + (f"  ({self.worst_parameter})" if self.worst_parameter else ""),
            *(f"  {text}" for text in self.problems),
            *(f"  not shown: {text}" for text in self.not_shown),
        ]
        if self.first_divergence is not None:
            lines.append(f"  first divergence: {self.first_divergence}")
        elif not self.ok:
            lines.append("  no single operation stands out: see the parameters above")
        return "\n".join(lines)


def worst(values: Mapping[str, float]) -> tuple[str, float]:
    """The largest entry; ("", 0.0) for none. NaN counts as the largest."""
    name, largest = "", 0.0
    for key, value in values.items():
        if not value <= largest:
            name, largest = key, value
    return name, largest
