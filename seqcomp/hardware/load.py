"""A name of a known cluster, or a file, -> Cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from seqcomp.diagnostics import Diagnostic, PlanError, diagnostic
from seqcomp.hardware.cluster import Cluster
from seqcomp.hardware.schema import ClusterFile
from seqcomp.plan.nearest import nearest

HERE = Path(__file__).parent
PARTS = {"device": "devices", "intra": "links", "inter": "links"}
MAX_BYTES = 1 << 20


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
    if not path.is_file():
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
        data = yaml.safe_load(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        raise PlanError(diagnostic("SC028", where=str(path), found=reason)) from error
    if not isinstance(data, dict):
        legal = "a mapping with device, gpus_per_node, max_nodes, intra and inter"
        found = type(data).__name__
        raise PlanError(diagnostic("SC028", where=str(path), found=found, legal=legal))
    return data


def _problem(error: Any, path: Path) -> Diagnostic:
    place = ".".join(map(str, error["loc"]))
    return diagnostic("SC028", where=f"{path} {place}", message=error["msg"])
