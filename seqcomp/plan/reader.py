"""YAML text or Python objects -> plain dicts, lists and scalars with positions.

Safe by construction: no tags, anchors or aliases, limited size and depth, each key once;
bare words are text unless they are true, false, null or a decimal number, so `off`, `no`
and `12:30` mean what they say. Nothing here raises for what a user may write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import yaml

from seqcomp.diagnostics import Diagnostic, diagnostic
from seqcomp.plan.source import Path, PlanSource, Position

MAX_BYTES = 128 * 1024
MAX_DEPTH = 16
MAX_NODES = 50_000

_WORDS: Mapping[str, bool | None] = MappingProxyType(
    dict.fromkeys(("", "~", "null", "Null", "NULL"))
    | dict.fromkeys(("true", "True", "TRUE"), True)
    | dict.fromkeys(("false", "False", "FALSE"), False)
)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,30})")
_FLOAT = re.compile(r"[-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """Plain data (None where there is none), where it was written, and what is wrong."""

    data: Any
    source: PlanSource
    diagnostics: tuple[Diagnostic, ...] = ()


def read_text(text: str, name: str) -> Document:
    """Read YAML text; ``name`` is shown before line and column."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        found = f"{size} bytes"
        return _refused(name, "SC006", found=found, legal=f"at most {MAX_BYTES} bytes")
    try:
        node = _Loader(text).get_single_node()
    except _RefusedError as error:
        where = _place(name, error.mark)
        return _refused(name, error.code, where=where, found=error.found, legal=error.legal)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.problem, error.context) if part)
        return _refused(
            name, "SC002", where=_place(name, mark), found=problem, help=_repair(problem)
        )
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{name}:{before.count(chr(10)) + 1}:{error.position - before.rfind(chr(10))}"
        return _refused(name, "SC002", where=where, found=f"the character {error.character!r}")
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML converts some escapes and directives without checking their range.
        return _refused(name, "SC002", where=name, found=str(error)[:200])
    if node is None:
        return Document(None, PlanSource(name))
    reader = _Nodes(name)
    data = reader.value(node, ())
    return Document(data, PlanSource(name, reader.keys, reader.values), tuple(reader.found))


def _repair(problem: str) -> str:
    if "\\t" in problem:
        return "indent with spaces: YAML takes no tabs"
    return "close every bracket and quote before this place, one `key: value` a line"


def read_object(data: object) -> Document:
    """Copy nested mappings, lists and tuples to plain ones; refuse cycles and huge ones."""
    copier = _Objects()
    copy = copier.value(data, (), 0)
    return Document(copy, PlanSource(), tuple(copier.found))


def _refused(name: str, code: str, *, where: str = "", **details: Any) -> Document:
    return Document(None, PlanSource(name), (diagnostic(code, where=where or name, **details),))


def _place(name: str, mark: yaml.Mark | None) -> str:
    return name if mark is None else f"{name}:{mark.line + 1}:{mark.column + 1}"


class _RefusedError(Exception):
    def __init__(self, code: str, mark: yaml.Mark, found: str, legal: str) -> None:
        super().__init__(found)
        self.code, self.mark, self.found, self.legal = code, mark, found, legal


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses, while composing, what could expand or construct."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        mark, plain = event.start_mark, "values written out"
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise _RefusedError("SC005", mark, f"{sign}{event.anchor}", plain)
        if event.tag is not None:
            raise _RefusedError("SC005", mark, f"the tag {event.tag}", plain)
        if self.depth >= MAX_DEPTH:
            legal = f"at most {MAX_DEPTH} levels"
            raise _RefusedError("SC006", mark, f"more than {MAX_DEPTH} levels", legal)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


@dataclass
class _Nodes:
    """Turns composed nodes into data; depth is limited by the loader."""

    name: str
    keys: dict[Path, Position] = field(default_factory=dict)
    values: dict[Path, Position] = field(default_factory=dict)
    found: list[Diagnostic] = field(default_factory=list)

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.values[path] = _position(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            where = _place(self.name, key_node.start_mark)
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                found = describe(key) if isinstance(key_node, yaml.ScalarNode) else "a collection"
                self.found.append(_bad_key(where, found))
                continue
            here = (*path, key)
            if key in data:
                line, column = self.keys[here]
                self.found.append(
                    diagnostic(
                        "SC004",
                        where=f"{where} {key}",
                        message=f"the key {key!r} is given twice",
                        found=f"first given at line {line}, column {column}",
                        help="keep one of them",
                    )
                )
                continue
            self.keys[here] = _position(key_node)
            data[key] = self.value(value_node, here)
        return data

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if _SURROGATE.search(text):
            where = _place(self.name, node.start_mark)
            self.found.append(diagnostic("SC002", where=where, found="half a surrogate pair"))
            return _SURROGATE.sub("?", text)
        return _plain_scalar(text) if node.style is None else text


def _position(node: yaml.Node) -> Position:
    return (node.start_mark.line + 1, node.start_mark.column + 1)


def _plain_scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _bad_key(where: str, found: str) -> Diagnostic:
    return diagnostic(
        "SC008", where=where, message="a key is text", found=found, legal="text",
        help="write the key as a plain word",
    )  # fmt: skip


@dataclass
class _Objects:
    nodes: int = 0
    found: list[Diagnostic] = field(default_factory=list)

    def value(self, data: object, path: Path, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            if not any(item.code == "SC006" for item in self.found):
                legal = f"at most {MAX_DEPTH} levels and {MAX_NODES} values"
                where = PlanSource().where(path[:3])
                self.found.append(diagnostic("SC006", where=where, legal=legal))
            return None
        if isinstance(data, str):
            return _SURROGATE.sub("?", data)
        if isinstance(data, list | tuple):
            return [self.value(item, (*path, i), depth + 1) for i, item in enumerate(data)]
        if isinstance(data, Mapping):
            copy = {}
            for key, item in data.items():
                if isinstance(key, str):
                    clean = _SURROGATE.sub("?", key)
                    copy[clean] = self.value(item, (*path, clean), depth + 1)
                else:
                    self.found.append(_bad_key(PlanSource().where(path), describe(key)))
                if self.nodes > MAX_NODES:
                    break
            return copy
        return data


def describe(value: object) -> str:
    """A value of any type in a few words: ``text '4'``, ``a list``, ``an object of type set``."""
    if isinstance(value, str):
        return f"text {value[:80]!r}"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"the number {value}" if abs(value) < 10**40 else "a very large number"
    if isinstance(value, float):
        return f"the number {value}"
    if isinstance(value, Mapping):
        return "a mapping"
    return (
        "a list" if isinstance(value, list | tuple) else f"an object of type {type(value).__name__}"
    )
