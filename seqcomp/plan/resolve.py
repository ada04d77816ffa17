"""Plan -> ResolvedPlan: everything explicit; nothing downstream reads YAML or defaults."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from seqcomp.diagnostics import Diagnostic, raise_for_errors
from seqcomp.layout.sequence import Layout, SequenceLayout
from seqcomp.plan.axes import fsdp_axes_of
from seqcomp.plan.facts import ModelFacts
from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.legality import length_factor
from seqcomp.plan.match import covers, matches
from seqcomp.plan.rules import check_plan
from seqcomp.plan.schema import (
    Checks,
    Gradients,
    InputSpec,
    LayoutChoice,
    OutputMode,
    Plan,
    Transport,
)


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """A legal plan with every default filled in.

    ``axes`` are all mesh axes and sizes, outermost first. ``sequence_axes`` are those that
    split the sequence, in nesting order (ring, ulysses, tensor) whatever the mesh order;
    ``batch_axes`` those whose ranks hold different slices of the batch.
    """

    plan: Plan
    axes: FrozenMap[int]
    data_axis: str | None
    ring_axis: str | None
    ulysses_axis: str | None
    tensor_axis: str | None
    fsdp_axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    sequence_axes: tuple[str, ...]
    layout_kind: LayoutChoice
    transport: Transport
    gradients: Gradients
    findings: tuple[Diagnostic, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole mesh."""
        return math.prod(self.axes.values())

    @property
    def checks(self) -> Checks:
        """When ranks compare what they were given."""
        return self.plan.checks

    def size(self, axis: str | None) -> int:
        """Size of an axis; 1 for None."""
        return 1 if axis is None else self.axes[axis]

    @property
    def data_size(self) -> int:
        """Degree of the data axis."""
        return self.size(self.data_axis)

    @property
    def ring_size(self) -> int:
        """Degree of ring attention."""
        return self.size(self.ring_axis)

    @property
    def ulysses_size(self) -> int:
        """Degree of ulysses."""
        return self.size(self.ulysses_axis)

    @property
    def tensor_size(self) -> int:
        """Degree of megatron_sp."""
        return self.size(self.tensor_axis)

    @property
    def inner_size(self) -> int:
        """Ranks among which a ring rank's tokens are cut evenly: ulysses * tensor."""
        return self.ulysses_size * self.tensor_size

    @property
    def sequence_size(self) -> int:
        """Ranks among which the sequence is cut: ring * ulysses * tensor."""
        return self.ring_size * self.inner_size

    def layout_for(self, length: int | None, all_causal: bool) -> SequenceLayout:
        """The layout for a full length in tokens (None: one that allows zigzag).

        ``auto`` is zigzag where every attention is causal and the length allows it, else
        contiguous. With one ring rank every layout is the contiguous one.
        """
        return SequenceLayout(
            kind=self._kind_for(length, all_causal), ring=self.ring_size, inner=self.inner_size
        )

    def _kind_for(self, length: int | None, all_causal: bool) -> Layout:
        if self.ring_size == 1:
            return "contiguous"
        if self.layout_kind != "auto":
            return self.layout_kind
        factor = length_factor("zigzag", self.ring_size, self.inner_size)
        fits = self.plan.padding == "pad" or (length or 0) % factor == 0
        return "zigzag" if all_causal and fits else "contiguous"

    def transport_for(self, module_path: str) -> Transport:
        """How K/V travel for the attention at (or inside) ``module_path``; the last match wins."""
        transport = self.transport
        for override in self.plan.overrides:
            if override.ring is not None and covers(override.match, module_path):
                transport = override.ring.transport
        return transport

    def is_gathered(self, module_path: str) -> bool:
        """Whether the module at (or around) ``module_path`` runs on the gathered sequence."""
        return any(o.gather and covers(o.match, module_path) for o in self.plan.overrides)

    def is_token_local(self, module_path: str) -> bool:
        """Whether the module at ``module_path`` itself runs as one unit on the local tokens."""
        return any(o.token_local and matches(o.match, module_path) for o in self.plan.overrides)

    def input_spec(self, name: str) -> InputSpec | None:
        """What the plan says about an input; None where it is to be inferred."""
        return self.plan.inputs.get(name)

    def output_mode(self, name: str) -> OutputMode:
        """How an output that carries the sequence is returned."""
        return self.plan.outputs.get(name, "full")


def resolve(
    plan: Plan,
    facts: ModelFacts | None = None,
    *,
    world_size: int | None = None,
    seq_len: int | None = None,
    module_paths: Iterable[str] | None = None,
) -> ResolvedPlan:
    """Check the plan against all that is known and make everything explicit.

    ``module_paths`` are the model's submodule paths (as of ``named_modules``) and decide
    whether overrides match. Warnings and notes end in ``findings``.

    Raises:
        PlanError: with every error found.
    """
    found = check_plan(
        plan, facts, world_size=world_size, seq_len=seq_len, module_paths=module_paths
    )
    raise_for_errors(found)
    strategies = plan.strategies
    ring, ulysses, tensor = strategies.ring, strategies.ulysses, strategies.megatron_sp
    data_axis = strategies.data.axis if strategies.data else None
    sequence_axes = tuple(item.axis for item in (ring, ulysses, tensor) if item is not None)
    fsdp_axes = fsdp_axes_of(plan)
    return ResolvedPlan(
        plan=plan,
        axes=FrozenMap(plan.mesh),
        data_axis=data_axis,
        ring_axis=ring.axis if ring else None,
        ulysses_axis=ulysses.axis if ulysses else None,
        tensor_axis=tensor.axis if tensor else None,
        fsdp_axes=fsdp_axes,
        batch_axes=tuple(
            axis
            for axis in plan.mesh
            if axis == data_axis or (axis in fsdp_axes and axis not in sequence_axes)
        ),
        sequence_axes=sequence_axes,
        layout_kind=ring.layout if ring else "contiguous",
        transport=ring.transport if ring else "p2p",
        gradients=strategies.data.gradients if strategies.data else "sum",
        findings=tuple(item for item in found if item.severity != "error"),
    )
