"""An immutable, ordered, hashable mapping, so that plans are immutable all the way down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

V = TypeVar("V")


class FrozenMap(Mapping[str, V]):
    """A ``Mapping`` that cannot be changed and remembers its order.

    Equality takes the order into account (the order of a mesh decides which ranks are
    neighbours), also against a plain dict.
    """

    __slots__ = ("_data",)
    _data: dict[str, V]

    def __init__(self, items: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        object.__setattr__(self, "_data", dict(items))

    def __getitem__(self, key: str) -> V:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a FrozenMap cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a FrozenMap cannot be changed")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return tuple(self.items()) == tuple(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self._data.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (tuple(self._data.items()),))

    def __copy__(self) -> FrozenMap[V]:
        return self

    def __deepcopy__(self, memo: object) -> FrozenMap[V]:
        return self

    def __repr__(self) -> str:
        return repr(self._data)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        (value_type,) = get_args(source) or (Any,)
        values = handler.generate_schema(value_type)
        entries = core_schema.dict_schema(core_schema.str_schema(strict=True), values)
        return core_schema.chain_schema(
            [
                core_schema.no_info_plain_validator_function(_as_dict),
                entries,
                core_schema.no_info_plain_validator_function(cls),
            ],
            serialization=core_schema.plain_serializer_function_ser_schema(
                dict, return_schema=entries, when_used="always"
            ),
        )


def _as_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, FrozenMap) else value
