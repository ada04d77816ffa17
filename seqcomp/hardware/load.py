"""A name of a known cluster, or a file, -> Cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.hardware.cluster import Cluster
from seqcomp.hardware.schema import ClusterFile
from seqcomp.plan.nearest import nearest
from seqcomp.plan.reader import describe, read_text

HERE = Path(__file__).parent
PARTS = {"device": "devices", "intra": "links", "inter": "links"}
MAX_BYTES = 1 << 20
_LEGAL = "a mapping with name, device, gpus_per_node, max_nodes, intra and inter"
_MAKE_ONE = "`seqcomp bench --save here.yaml` writes one; seqcomp/hardware/clusters has more"


def known_clusters() -> tuple[str, ...]:
    """Names that `load_cluster` knows, sorted."""
    return _names("clusters")


def load_cluster(source: str | Path) -> Cluster:
    """A known cluster by name, or one from a YAML file of the same format.

    Raises:
        PlanError: SC027 for a name that is neither, SC028 for a file that is no cluster.
    """
    text = str(source)
    known = known_clusters()
    path = HERE / "clusters" / f"{text}.yaml" if text in known else Path(source)
    if not _is_file(path):
        close = nearest(text, known)
        raise PlanError(
            diagnostic(
                "SC027",
                where="cluster",
                message=f"{text[:200]!r} is neither a known cluster nor a file",
                found=text[:200],
                legal=known,
                help=f"did you mean {close}?" if close else "give a known name, or a YAML file",
            )
        )
    data = _read(path)
    for key, folder in PARTS.items():
        if isinstance(data.get(key), str):
            data[key] = _part(folder, data[key], path, key)
    try:
        return ClusterFile.model_validate(data).build()
    except ValidationError as error:
        raise PlanError([_problem(item, path) for item in error.errors()[:20]]) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # longer than names of files may be
        return False


def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (HERE / folder).glob("*.yaml")))


def _part(folder: str, name: str, path: Path, key: str) -> dict[str, Any]:
    known = _names(folder)
    if name not in known:
        close = nearest(name, known)
        raise PlanError(
            diagnostic(
                "SC028",
                where=f"{path} {key}",
                message=f"there is no {key} called {name[:200]!r}",
                found=name[:200],
                legal=known,
                help=f"did you mean {close}?" if close else f"write the {key} out",
            )
        )
    return _read(HERE / folder / f"{name}.yaml")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        document = read_text(raw.decode("utf-8"), str(path))
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        raise PlanError(
            diagnostic("SC028", where=str(path), found=reason, legal=_LEGAL, help=_MAKE_ONE)
        ) from error
    if document.diagnostics:
        raise PlanError([replace(item, code="SC028") for item in document.diagnostics])
    data = document.data
    if not isinstance(data, dict):
        found = type(data).__name__
        raise PlanError(
            diagnostic("SC028", where=str(path), found=found, legal=_LEGAL, help=_MAKE_ONE)
        )
    return data


def _problem(error: Any, path: Path) -> Diagnostic:
    place = ".".join(map(str, error["loc"]))
    kind, value = error["type"], error.get("input")
    found = describe(value) if kind not in ("missing", "extra_forbidden") else place
    return diagnostic(
        "SC028",
        where=f"{path} {place}",
        message=error["msg"],
        found=f"no {place}" if kind == "missing" else found,
        legal=_LEGAL if len(error["loc"]) == 1 else None,
        help=_MAKE_ONE if len(error["loc"]) == 1 else None,
    )
