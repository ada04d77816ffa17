"""The plan language as pydantic models: frozen, strict, nothing unknown accepted.

This file states what can be written; what must fit together is in ``rules.py``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from seqcomp.plan.frozenmap import FrozenMap
from seqcomp.plan.source import NOWHERE, PlanSource

Gradients = Literal["sum", "mean"]
LayoutChoice = Literal["auto", "contiguous", "striped", "zigzag"]
Transport = Literal["p2p", "allgather"]
OutputMode = Literal["full", "sharded", "drop"]
Padding = Literal["none", "pad"]
Checks = Literal["call", "compile", "off"]

_AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MATCH = re.compile(r"(\*\*|[\w*]+)(\.(\*\*|[\w*]+))*")
MAX_AXES = 16
_LARGEST = 2**62  # beyond any cluster or sequence, and still a C integer


def _axis_name(value: Any) -> Any:
    if isinstance(value, str) and not _AXIS_NAME.fullmatch(value):
        raise PydanticCustomError("axis_name", "an axis name is an identifier such as ring")
    return value


def _match(value: Any) -> Any:
    if isinstance(value, str) and not _MATCH.fullmatch(value):
        raise PydanticCustomError("match_pattern", "a module path, e.g. model.layers.*.self_attn")
    return value


def _sequence(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _empty_if_none(value: Any) -> Any:
    return {} if value is None else value


def _off_if_false(value: Any) -> Any:
    # YAML 1.1 readers turn a bare `off` into false before the plan is seen.
    return "off" if value is False else value


Size = Annotated[int, Field(strict=True, ge=1, le=_LARGEST)]
Dim = Annotated[int, Field(strict=True, ge=-64, le=63)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
AxisName = Annotated[Text, BeforeValidator(_axis_name)]
T = TypeVar("T")
Section = Annotated[T, BeforeValidator(_empty_if_none)]
"""A mapping that may be left empty (`memory:` and nothing more), which means all defaults."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class DataStrategy(_Model):
    """Data parallelism: ranks along ``axis`` hold different slices of the batch."""

    axis: AxisName = "data"
    gradients: Gradients = "sum"


class FsdpStrategy(_Model):
    """Parameters sharded over ``axes`` (None: every data, ring and ulysses axis of the mesh)."""

    axes: (
        Annotated[tuple[AxisName, ...], Field(min_length=1), BeforeValidator(_sequence)] | None
    ) = None
    reshard: Flag = True
    mixed_precision: Literal["none", "bf16", "fp16"] = "none"
    offload: Literal["none", "cpu"] = "none"


class RingStrategy(_Model):
    """Ring attention. ``layout: auto`` is zigzag where causality and length allow it."""

    axis: AxisName = "ring"
    layout: LayoutChoice = "auto"
    transport: Transport = "p2p"


class UlyssesStrategy(_Model):
    """All-to-all between sequence and heads at attention."""

    axis: AxisName = "ulysses"
    pad_heads: Flag = False


class MegatronSpStrategy(_Model):
    """Tensor parallelism with sequence-sharded norms and residuals."""

    axis: AxisName = "tensor"


class Strategies(_Model):
    """The strategies of a plan; None where a strategy is not used."""

    NAMES: ClassVar[tuple[str, ...]] = ("data", "fsdp", "ring", "ulysses", "megatron_sp")

    data: DataStrategy | None = None
    fsdp: FsdpStrategy | None = None
    ring: RingStrategy | None = None
    ulysses: UlyssesStrategy | None = None
    megatron_sp: MegatronSpStrategy | None = None


class RingOverride(_Model):
    """What an override may change about the ring; the layout is one for the whole model."""

    transport: Transport


class Override(_Model):
    """A change for the modules that ``match`` names; later overrides win."""

    match: Annotated[Text, BeforeValidator(_match)]
    ring: RingOverride | None = None
    token_local: Flag = False
    gather: Flag = False


class InputSpec(_Model):
    """Dimensions of an input: batch and sequence dim (None: it has none), full length."""

    batch: Dim | None = None
    seq: Dim | None = None
    length: Size | None = None


class Memory(_Model):
    """What is given up for memory."""

    checkpoint: Literal["none", "block", "selective"] = "none"
    loss_chunks: Size = 1
    offload: Literal["none", "cpu"] = "none"


class Plan(_Model):
    """A whole plan: immutable, hashable, equal to every plan that says the same.

    Build one with ``load_plan``, which collects all errors and knows their lines;
    constructing it directly raises pydantic's ``ValidationError``.
    """

    name: Text = ""
    mesh: Annotated[FrozenMap[Size], Field(min_length=1, max_length=MAX_AXES)]
    strategies: Section[Strategies] = Strategies()
    overrides: Annotated[tuple[Override, ...], BeforeValidator(_sequence)] = ()
    inputs: FrozenMap[Section[InputSpec]] = FrozenMap()
    outputs: FrozenMap[OutputMode] = FrozenMap()
    padding: Padding = "none"
    memory: Section[Memory] = Memory()
    checks: Annotated[Checks, BeforeValidator(_off_if_false)] = "call"

    _source: PlanSource = PrivateAttr(default=NOWHERE)

    def where(self, *path: str | int) -> str:
        """Place of a key for diagnostics: ``file:line:column path``, or only the path."""
        return self._source.where(path)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars; ``load_plan`` of it gives an equal plan."""
        return self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
