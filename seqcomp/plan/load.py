"""A path, preset name, YAML text, dict or Plan -> Plan, with every error at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from seqcomp.diagnostics import Diagnostic, diagnostic, raise_for_errors
from seqcomp.plan.nearest import nearest
from seqcomp.plan.presets import EXAMPLES, compose, is_preset, nearest_preset
from seqcomp.plan.problems import problem
from seqcomp.plan.reader import MAX_BYTES, Document, describe, read_object, read_text
from seqcomp.plan.rules import check_language
from seqcomp.plan.schema import Plan, Strategies
from seqcomp.plan.source import PlanSource

MAX_SHOWN = 100
_AN_EXAMPLE = (
    "name a preset such as ring_4, or a file of `mesh: {ring: 4}` and `strategies: {ring: {}}`"
)
_MAY_BE_EMPTY = ("strategies", "overrides", "inputs", "outputs", "memory")


@dataclass(frozen=True)
class Reading:
    """What was read: the plan if it is well-formed, and what is wrong with the text.

    ``draft`` is the plan without its ill-formed parts, where that is enough to check the
    other rules; it is only for messages. Where ``sizes_known`` is false, some sizes of its
    mesh were ill-formed and stand at 1.
    """

    plan: Plan | None
    draft: Plan | None
    diagnostics: tuple[Diagnostic, ...]
    sizes_known: bool = True


def load_plan(source: object) -> Plan:
    """Read a plan: path, preset name, YAML text, dict of the plan language, or Plan.

    Raises:
        PlanError: with every error in the text and every contradiction within the plan.
    """
    reading = read_plan(source)
    found = list(reading.diagnostics)
    if reading.draft is not None:
        found += check_language(reading.draft)
    raise_for_errors(found)
    assert reading.plan is not None, "a plan without errors has been built"
    return reading.plan


def dump_plan(plan: Plan) -> str:
    """YAML text that ``load_plan`` turns into an equal plan; defaults are left out."""
    return yaml.safe_dump(plan.to_dict(), sort_keys=False)


def read_plan(source: object) -> Reading:
    """Like ``load_plan`` without raising, and without the rules of ``rules.py``."""
    if isinstance(source, Plan):
        return Reading(source, source, ())
    if isinstance(source, Mapping):
        return _build(read_object(source))
    if isinstance(source, os.PathLike):
        return _file(Path(os.fsdecode(source)), str(os.fsdecode(source)))
    if isinstance(source, str):
        return _string(source)
    legal = ("a path", "a preset name", "YAML text", "a dict", "a Plan")
    return _failed(diagnostic("SC015", where="plan", found=describe(source), legal=legal))


def _string(text: str) -> Reading:
    if is_preset(text):
        data, found = compose(text)
        if data is None:
            return Reading(None, None, found)
        return _build(Document(data, PlanSource(text)))
    if (
        not text.strip()
        or "\n" in text
        or ": " in text
        or text.lstrip()[:1] in ("{", "[")
        or text.endswith(":")
    ):
        return _build(_empty_strategies(read_text(text, "<plan>")))
    return _file(Path(text), text)


def _file(path: Path, name: str) -> Reading:
    shown = name[:200]
    try:
        if not path.exists():
            return _failed(_missing(path, shown))
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(raw) > MAX_BYTES:
            return _failed(diagnostic("SC006", where=shown, legal=f"at most {MAX_BYTES} bytes"))
        found = f"byte {error.start} is not UTF-8"
        return _failed(diagnostic("SC001", where=shown, found=found, legal="UTF-8 text"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return _failed(
            diagnostic(
                "SC001", where=shown, found=reason, legal="a readable file", help=_AN_EXAMPLE
            )
        )
    return _build(_empty_strategies(read_text(text, shown)))


def _missing(path: Path, shown: str) -> Diagnostic:
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        stem = path.stem
        same = f"the preset {stem} says the same as plans/{stem}.yaml" if is_preset(stem) else None
        here = nearest(path.name, [near.name for near in path.parent.glob("*.y*ml")])
        advice = same or (f"did you mean {path.with_name(here)}?" if here else _AN_EXAMPLE)
        legal = "a plan file, or a preset such as usp_4x8"
        return diagnostic("SC001", where=shown, found="no such file", legal=legal, help=advice)
    close = nearest_preset(shown)
    return diagnostic(
        "SC012",
        where=shown or "plan",
        message=f"{shown!r} is neither a preset nor a file",
        found=shown,
        legal=EXAMPLES,
        help=f"did you mean something like {close}?" if close else "give a path to a YAML file",
    )


def _failed(found: Diagnostic) -> Reading:
    return Reading(None, None, (found,))


def _empty_strategies(document: Document) -> Document:
    """In YAML `ring:` with nothing behind it means `ring: {}`, and sections may be empty."""
    data = document.data
    if not isinstance(data, dict):
        return document
    data = {key: item for key, item in data.items() if item is not None or key not in _MAY_BE_EMPTY}
    chosen = data.get("strategies")
    if isinstance(chosen, dict):
        data["strategies"] = {
            key: {} if item is None and key in Strategies.NAMES else item
            for key, item in chosen.items()
        }
    return Document(data, document.source, document.diagnostics)


def _build(document: Document) -> Reading:
    source, found = document.source, list(document.diagnostics)
    if not isinstance(document.data, dict):
        if not found:
            found.append(
                diagnostic(
                    "SC003",
                    where=source.where((), value=True) or "plan",
                    found=describe(document.data),
                    legal="a mapping with the keys mesh and strategies",
                    help="for example `mesh: {ring: 4}` and `strategies: {ring: {}}`",
                )
            )
        return Reading(None, None, tuple(found))
    plan, errors = _validated(document.data, source)
    found += [problem(error, source) for error in errors[:MAX_SHOWN]]
    found = found[:MAX_SHOWN]
    if plan is not None:
        complete = not any(item.severity == "error" for item in found)
        return Reading(plan if complete else None, plan, tuple(found))
    locs = [tuple(error["loc"]) for error in errors]
    draft = None
    if all(_separable(loc) for loc in locs):
        draft, _ = _validated(_without(document.data, locs), source)
    return Reading(None, draft, tuple(found), all(loc[0] != "mesh" for loc in locs))


def _validated(
    data: Mapping[str, Any], source: PlanSource
) -> tuple[Plan | None, list[Mapping[str, Any]]]:
    try:
        plan = Plan.model_validate(data)
    except ValidationError as error:
        return None, list(error.errors(include_url=False))
    plan._source = source
    return plan, []


def _separable(loc: tuple[str | int, ...]) -> bool:
    """Whether the rules still mean something when the value at ``loc`` is left out."""
    if loc[-1] in ("axis", "axes", "[key]"):
        return False
    if loc[0] in ("mesh", "strategies"):
        return len(loc) == (2 if loc[0] == "mesh" else 3)
    return len(loc) > 1 or loc[0] in Plan.model_fields


def _without(data: dict[str, Any], locs: list[tuple[str | int, ...]]) -> dict[str, Any]:
    """A copy of ``data`` that lacks the sections, or options of a strategy, with errors."""
    copy = dict(data)
    for loc in locs:
        if loc[0] == "strategies":
            chosen = copy["strategies"]
            options = {key: item for key, item in chosen[loc[1]].items() if key != loc[2]}
            copy["strategies"] = {**chosen, loc[1]: options}
        elif loc[0] == "mesh":
            copy["mesh"] = {**copy["mesh"], loc[1]: 1}
        else:
            copy.pop(str(loc[0]), None)
    return copy
