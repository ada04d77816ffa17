"""One cell of the support table: an architecture under a plan, decided by running it."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

import seqcomp
from seqcomp.diagnostics import Diagnostic, PlanError
from tests.fixtures import plans
from tests.fixtures.flex import unfused
from tests.zoo.entry import Entry, built
from tests.zoo.others import BY_HAND, ENCODER_DECODERS, TITAN, VISION_SPEECH
from tests.zoo.text import DECODERS, ENCODERS, MIXTURES, RECURRENT

ZOO: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        *DECODERS, *MIXTURES, *ENCODERS, *ENCODER_DECODERS, *VISION_SPEECH, *RECURRENT, *TITAN,
        *BY_HAND,
    )
}  # fmt: skip
PLANS: Mapping[str, plans.Plan] = {
    "ring, contiguous": plans.ring(2, "contiguous"),
    "ring, zigzag": plans.ring(2, "zigzag"),
    "Ulysses": plans.ulysses(2),
    "USP": plans.usp(2, 2),
    "Megatron-SP": plans.megatron(2),
    "ring x Megatron-SP": plans.with_tensor(plans.ring(2), 2),
}
Cell = tuple[str, str]
EXACT, GATHERED, WHOLE = "exact", "exact, SC401", "exact, SC402"
BOTH = "exact, SC401, SC402"
_REPEATED = re.compile(r"SC402.*?found: (.*?) on whole tokens", re.DOTALL)


def decide(cell: Cell) -> str:
    """'exact', 'SCnnn' for what is refused.

    'exact, SC401' where a gather was necessary, 'exact, SC402' where every rank of an axis runs
    an attention whole, 'exact, SC401, SC402' for both.

    Everything else is a fault, told in one line: a wrong result, a crash, a refusal that does not
    say where and what to do.
    """
    name, plan = cell
    entry = ZOO[name]
    given: dict[str, Any] = dict(PLANS[plan])
    if entry.inputs is not None:
        given["inputs"] = entry.inputs
    if entry.overrides:
        given["overrides"] = list(entry.overrides)
    try:
        with unfused():  # what one device compares with
            report = seqcomp.verify(partial(built, entry), given, inputs_fn=entry.call)
    except PlanError as error:
        return _refusal(error.diagnostics)
    except Exception as error:
        return f"crash: {type(error).__name__}: {error}"
    if not report.ok:
        return f"wrong: {report}"
    gathers = any("SC401" in finding.partition(":")[0] for finding in report.findings)
    whole = any(map(_runs_attention_whole, report.findings))
    return {(True, True): BOTH, (True, False): GATHERED, (False, True): WHOLE}.get(
        (gathers, whole), EXACT
    )


def _runs_attention_whole(finding: str) -> bool:
    found = _REPEATED.search(finding)
    return found is not None and "attention" in found[1].split(", ")


def _refusal(diagnostics: Sequence[Diagnostic]) -> str:
    errors = [d for d in diagnostics if d.severity == "error"]
    for d in errors:
        if d.code == "SC312" or not d.help or not (d.where or d.found):
            return f"fault: {d}"
    return " ".join(sorted({d.code for d in errors}))


def decide_all(cells: Sequence[Cell], workers: int = 2) -> Iterator[tuple[Cell, str]]:
    """The cells and what they are, as they come, from processes of one thread each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield from zip(cells, pool.map(decide, cells), strict=True)
