"""Turns what ranks report into one error that all of them raise."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic, raise_for_errors
from seqcomp.lowering.same_inputs import compare_inputs
from seqcomp.runtime.agreement import Agreement, Outcome
from seqcomp.runtime.comm import RankContext
from seqcomp.runtime.lost import RankLostError

Checks = Literal["call", "compile", "off"]

_TIMEOUT_S = 300.0


class Consensus:
    """The exchanges of one compiled module. With `checks: off` every rank is on its own."""

    def __init__(self, context: RankContext, checks: Checks):
        self._context = context
        self._agreement = Agreement(context, _TIMEOUT_S)
        self._checks = checks

    def on_call(self, failure: PlanError | None, signature: Mapping[str, str]) -> None:
        """Before each call. Raises the same PlanError on all ranks where one fails or differs."""
        self._exchange(failure, signature, active=self._checks == "call")

    def on_compile(self, failure: PlanError | None, facts: Mapping[str, str]) -> None:
        """After each compilation, before the program first runs."""
        self._exchange(failure, facts, active=self._checks != "off")

    def drawn(self, draw: Callable[[], int]) -> int:
        """What rank 0 draws, on all ranks, whatever is checked: masks of dropout must be alike.

        Raises PlanError SC505 where a rank is missing.
        """
        with _surfacing():
            return self._context.host.of_first(draw, timeout_s=_TIMEOUT_S)

    def on_inputs(self, batch: tuple[str, ...], inputs: Mapping[str, Tensor]) -> None:
        """Before the first step, unless checks are off: `inputs` within each sequence group."""
        if self._checks == "off":
            return
        with _surfacing():
            found = compare_inputs(self._context, self._agreement, batch, inputs)
        raise_for_errors(found)

    def _exchange(
        self, failure: PlanError | None, facts: Mapping[str, str], *, active: bool
    ) -> None:
        if not active:
            if failure is not None:
                raise failure
            return
        text = _dump(failure) if failure is not None else json.dumps(dict(facts))
        with _surfacing():
            outcomes = self._agreement.exchange(failure is None, text)
        if outcomes is None:
            return
        joint = _joint_error(outcomes)
        if failure is not None and str(failure) == str(joint):
            raise failure  # the same on all ranks: it is shown once, from where it arose
        raise joint from failure


def agree(context: RankContext, failure: PlanError | None, facts: Mapping[str, str]) -> None:
    """One exchange outside of any compiled module."""
    Consensus(context, "compile").on_compile(failure, facts)


def _dump(error: PlanError) -> str:
    return json.dumps([d.to_json() for d in error.diagnostics])


def _joint_error(outcomes: list[Outcome]) -> PlanError:
    failed = [o for o in outcomes if not o.ok]
    if not failed:
        return PlanError(_differences(outcomes))
    groups: dict[str, list[int]] = {}
    for outcome in failed:
        groups.setdefault(outcome.text, []).append(outcome.rank)
    diagnostics = [
        Diagnostic(**{k: _frozen(v) for k, v in item.items()})
        for text in groups
        for item in json.loads(text)
    ]
    if len(failed) < len(outcomes) or len(groups) > 1:
        listed = "; ".join(
            f"ranks {ranks}: {json.loads(t)[0]['code']}" for t, ranks in groups.items()
        )
        fine = [o.rank for o in outcomes if o.ok]
        diagnostics.append(
            diagnostic(
                "SC505",
                where=f"ranks {[o.rank for o in failed]}",
                found=listed,
                legal=f"ranks {fine} had no error" if fine else "the same outcome on all ranks",
                help="remove the cause on the ranks named; no collective was started",
            )
        )
    return PlanError(diagnostics)


def _frozen(value: object) -> object:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def _differences(outcomes: list[Outcome]) -> list[Diagnostic]:
    facts = [json.loads(o.text) for o in outcomes]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    found = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            values.setdefault(fact.get(name, "not passed"), []).append(rank)
        if len(values) == 1:
            continue
        code = "SC506" if name == "weights" else "SC504"
        found.append(
            diagnostic(
                code,
                where=name,
                found="; ".join(f"{v} on ranks {r}" for v, r in values.items()),
                legal="the same on all ranks",
                help=_HELP.get(name, f"pass the same {name} on every rank of a sequence group "
                               "(batches of the same shape on every data rank)"),
            )
        )  # fmt: skip
    precise = [d for d in found if d.where != "modes"]
    return precise or found


_HELP = {
    "weights": "seed every rank alike, or load or broadcast the weights before parallelize",
    "program": "build the same model with the same configuration on every rank, and start all with "
    "PYTHONHASHSEED=0 where its code goes through a set of names (transformers' ModernBERT does)",
    "plan": "give every rank the same plan",
    "world": "give every rank the same mesh",
    "training": "call train() or eval() on all ranks",
    "grad mode": "use the same grad mode on all ranks",
    "modes": "use the same train()/eval(), grad and autocast modes on all ranks",
}


@contextlib.contextmanager
def _surfacing() -> Iterator[None]:
    """A rank that has ended is no mistake of the caller's; one that is late may be."""
    try:
        yield
    except RankLostError as error:
        if error.rank is not None:
            raise
        raise PlanError([_lost(error)]) from error


def _lost(error: RankLostError) -> Diagnostic:
    return diagnostic(
        "SC505",
        message="some ranks did not take part",
        where="the ranks of the mesh",
        found=str(error),
        legal=f"every rank makes the same calls within {_TIMEOUT_S:g} s",
        help="look at the output of the other ranks: one has probably ended or is stuck",
    )


def internal_failure(error: Exception, where: str) -> PlanError:
    """An exception of our own as an error that all ranks can raise."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).partition("\n")[0]
    failure = PlanError(
        [
            diagnostic(
                "SC312",
                where=where,
                found=f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})",
                legal="",
                help="this is a fault of seqcomp: please report it with the model",
            )
        ]
    )
    failure.__cause__ = error
    return failure
