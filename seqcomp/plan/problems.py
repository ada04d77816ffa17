"""pydantic's errors -> diagnostics: where, what was found, what is allowed, what was meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.plan.nearest import nearest
from seqcomp.plan.reader import describe
from seqcomp.plan.schema import Plan
from seqcomp.plan.source import Path, PlanSource

_KINDS = MappingProxyType(
    {
        "int_type": "a whole number",
        "string_type": "text",
        "bool_type": "true or false",
        "tuple_type": "a list",
        "dict_type": "a mapping",
        "model_type": "a mapping",
    }
)
_ELSEWHERE = MappingProxyType(
    {
        "layout": "the layout is one for the whole model: set it in strategies.ring",
        "cp": "context parallelism is called ring here",
        "context_parallel": "context parallelism is called ring here",
        "tp": "tensor and sequence parallelism is called megatron_sp here",
        "tensor_parallel": "tensor and sequence parallelism is called megatron_sp here",
        "tensor": "the strategy on the tensor axis is called megatron_sp",
        "dp": "data parallelism is called data here",
        "usp": "usp is ring and ulysses together: name both",
    }
)


def problem(error: Mapping[str, Any], source: PlanSource) -> Diagnostic:
    """The diagnostic for one entry of ``ValidationError.errors()``."""
    kind: str = error["type"]
    path: Path = tuple(error["loc"])
    value = error.get("input")
    if kind == "extra_forbidden":
        return _unknown_key(path, source)
    if kind == "missing":
        key = str(path[-1])
        return diagnostic(
            "SC011", where=source.where(path), message=f"the key {key!r} is missing",
            legal=_allowed_keys(path[:-1]), help=_example(key),
        )  # fmt: skip
    where = source.where(path, value=True)
    if kind == "literal_error":
        return _not_allowed(where, path, value, error)
    if kind in ("greater_than_equal", "less_than_equal"):
        limit = error["ctx"].get("ge", error["ctx"].get("le"))
        legal = f"{'at least' if kind.startswith('greater') else 'at most'} {limit}"
        return diagnostic(
            "SC010", where=where, message=f"{path[-1]} is out of range", found=_number(value),
            legal=legal, help=f"write a number of {legal}",
        )  # fmt: skip
    if kind == "too_short":
        return diagnostic(
            "SC011", where=where, message=f"{path[-1]} is empty", found="nothing in it",
            legal="at least one entry", help=_example(str(path[-1])),
        )  # fmt: skip
    if kind == "too_long":
        legal = f"at most {error['ctx']['max_length']} entries"
        return diagnostic("SC006", where=where, message=f"{path[-1]} is too long", legal=legal)
    if kind in ("axis_name", "match_pattern") or path[-1:] == ("[key]",):
        found = value if isinstance(value, str) else describe(value)
        return diagnostic("SC014", where=where, found=found[:200], legal=error["msg"])
    legal = _KINDS.get(kind, re.sub("^Input should be ", "", error["msg"]))
    quotes = "; put it in quotes" if kind == "string_type" and value is not None else ""
    return diagnostic(
        "SC008", where=where, message=f"{_name(path)} has a wrong type",
        found=describe(value), legal=legal, help=f"write {legal}{quotes}",
    )  # fmt: skip


def _unknown_key(path: Path, source: PlanSource) -> Diagnostic:
    key, around = str(path[-1]), path[:-1]
    allowed = _allowed_keys(around)
    close = nearest(key, allowed)
    place = f" in {_name(around)}" if around else ""
    return diagnostic(
        "SC007",
        where=source.where(path),
        message=f"unknown key {key[:200]!r}{place}",
        found=key[:200],
        legal=allowed,
        help=f"did you mean {close}?" if close else _ELSEWHERE.get(key, "remove it"),
    )


def _not_allowed(where: str, path: Path, value: Any, error: Mapping[str, Any]) -> Diagnostic:
    allowed = tuple(re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    close = nearest(value, allowed) if isinstance(value, str) else None
    return diagnostic(
        "SC009",
        where=where,
        message=f"{_name(path)} cannot be {describe(value)}",
        found=value[:200] if isinstance(value, str) else describe(value),
        legal=allowed,
        help=f"did you mean {close}?" if close else f"write one of {', '.join(allowed)}",
    )


def _name(path: Path) -> str:
    return PlanSource().where(path) or "the plan"


def _number(value: Any) -> Any:
    return value if isinstance(value, int) and abs(value) < 10**40 else describe(value)


def _example(key: str) -> str:
    examples = {"mesh": "for example `mesh: {ring: 4}`", "axes": "for example `axes: [data]`"}
    return examples.get(key, f"add {key}")


def _allowed_keys(path: Path) -> tuple[str, ...]:
    """The keys of the model at a path of the language; () where keys are free."""
    current: Any = Plan
    for part in path:
        if isinstance(part, int):
            continue
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(part)
            if field is None:
                return ()
            current = _inner(field.annotation)
        else:
            current = _inner(get_args(current)[0]) if get_args(current) else None
    if isinstance(current, type) and issubclass(current, BaseModel):
        return tuple(current.model_fields)
    return ()


def _inner(annotation: Any) -> Any:
    """The model, or FrozenMap of something, within Annotated, Optional and tuple."""
    origin = get_origin(annotation)
    if origin is Annotated or origin is tuple:
        return _inner(get_args(annotation)[0])
    if origin is Union or type(annotation).__name__ == "UnionType":
        kept = [item for item in get_args(annotation) if item is not type(None)]
        return _inner(kept[0])
    return annotation
