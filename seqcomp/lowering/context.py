"""What the passes share, and how they are run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from seqcomp.capture.export import Capture
from seqcomp.capture.recognise import AttentionInfo
from seqcomp.diagnostics import Diagnostic
from seqcomp.placement.assign import Placement
from seqcomp.placement.rule import MeshView
from seqcomp.placement.spec import Spec

logger = logging.getLogger("seqcomp")


@dataclass(frozen=True)
class Traced:
    """A value of the local graph: a part of the value `source` of the global graph.

    `moved` names the redistribution that made it; None where it is the operation's own result.
    """

    source: str
    spec: Spec
    moved: str | None = None


@dataclass
class LoweringContext:
    """Input and running state of the passes; `graph` goes from one to the next."""

    capture: Capture
    mesh: MeshView
    attentions: tuple[AttentionInfo, ...]
    transports: Mapping[str, str]  # module path of an attention -> transport
    output_modes: tuple[str, ...]  # per output leaf: full | sharded | drop
    grad: bool
    fsdp_units: tuple[str, ...] | None = None  # modules that FSDP gathers as one; None without fsdp
    mean_over: tuple[str, ...] = ()  # axes over which contributions to gradients are averaged
    placement: Placement | None = None
    findings: list[Diagnostic] = field(default_factory=list)
    dump: Path | None = None
    keep_global: bool = False
    is_gathered: Callable[[str], bool] = lambda path: False  # modules on the whole sequence
    loss_chunks: int = 1
    mlps_of: tuple[str, ...] = ()  # the modules whose MLPs run in chunks of tokens
    unmet: list[Diagnostic] = field(default_factory=list)  # what refuses a call, not an example
    kept: torch.fx.Graph | None = None
    traced: dict[torch.fx.Node, Traced] = field(default_factory=dict)
    tilings: dict[Any, torch.fx.Node] = field(default_factory=dict)

    def replaced(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        """`new` has taken the place of `old` in the local graph."""
        if old in self.traced:
            self.traced[new] = self.traced.pop(old)


Graph = torch.fx.Graph


@dataclass(frozen=True)
class Pass:
    """A step (graph, context) -> graph with its contract: what must have run, what it gives."""

    name: str
    run: Callable[[Graph, LoweringContext], Graph]
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()


def check_schedule(passes: Sequence[Pass]) -> None:
    """Our own invariant: every pass finds what it requires."""
    have: set[str] = set()
    for step in passes:
        missing = [need for need in step.requires if need not in have]
        assert not missing, f"pass {step.name} needs {missing}; before it ran {sorted(have)}"
        have.update(step.provides)


def run_passes(graph: Graph, context: LoweringContext, passes: Sequence[Pass]) -> Graph:
    """Runs the schedule; each pass is logged and, where asked for, dumped."""
    check_schedule(passes)
    for number, step in enumerate(passes):
        start = time.perf_counter()
        graph = step.run(graph, context)
        graph.eliminate_dead_code()
        graph.lint()
        logger.debug(
            "pass %02d %s: %d nodes, %.3f s",
            number,
            step.name,
            len(graph.nodes),
            time.perf_counter() - start,
        )
        if context.dump is not None:
            context.dump.mkdir(parents=True, exist_ok=True)
            text = "\n".join(filter(None, (n.format_node() for n in graph.nodes)))
            (context.dump / f"{number:02d}_{step.name}.txt").write_text(text + "\n")
    return graph
