"""Model specs: ``hf:LlamaForCausalLM?num_hidden_layers=2``, ``hf:dir/config.json``,
``titan:llama3/8B``, ``python:package.module:factory``, and names of known models (``llama3-8b``).

Models are built on the meta device unless another one is asked for, and without the network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from seqcomp.cost.named import known_models, module_spec
from seqcomp.diagnostics import PlanError, diagnostic
from seqcomp.integrations.torchtitan import build_titan
from seqcomp.plan.nearest import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

FORMS = (
    "hf:<Architecture>[?key=value&...]",
    "hf:path/to/config.json",
    "titan:<model>/<flavor>",
    "python:<module>:<factory>",
)


@dataclass(frozen=True)
class ModelSpec:
    """A parsed spec: what kind of model, its name, and (hf) settings of its config."""

    kind: Literal["hf", "titan", "python"]
    target: str
    options: Mapping[str, Any] = field(default_factory=dict)


def parse_spec(text: str) -> ModelSpec:
    """Parse a model spec, or the name of a known model; imports no model library.

    Raises:
        PlanError: SC020.
    """
    if text in known_models():
        return _known(text)
    kind, _, target = text.partition(":")
    if kind not in ("hf", "titan", "python") or not target:
        raise _bad(text, f"unknown kind of model {kind!r}" if kind else "no kind of model")
    if kind == "titan":
        if not all(target.partition("/")):
            raise _bad(text, "a torchtitan model is written titan:<model>/<flavor>")
        return ModelSpec("titan", target)
    if kind == "python":
        if not all(target.partition(":")):
            raise _bad(text, "a factory is written python:<module>:<factory>")
        return ModelSpec("python", target)
    name, _, query = target.partition("?")
    options: dict[str, Any] = {}
    for pair in query.split("&") if query else ():
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise _bad(text, f"{pair!r} is not key=value")
        if key in options:
            raise _bad(text, f"the key {key!r} is given twice")
        options[key] = _value(unquote(value))
    return ModelSpec("hf", name, options)


def build_model(text: str, device: str = "meta") -> nn.Module:
    """The module that a spec names, with random weights where `device` is not meta.

    A ``python:`` factory that cannot run on meta gives its model on the device of its choice.

    Raises:
        PlanError: SC020 (spec), SC021 (building failed), SC921 (library not there).
    """
    spec = parse_spec(text)
    builders = {"hf": _build_hf, "titan": _build_titan, "python": _build_python}
    try:
        return builders[spec.kind](spec, text, device)
    except PlanError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        legal, fix = _BUILDABLE[spec.kind]
        raise PlanError(
            diagnostic("SC021", where=text, found=reason, legal=legal, help=fix)
        ) from error


_BUILDABLE = {
    "hf": ("settings with which the class can be built", "try the class in Python with them"),
    "titan": ("a flavor that torchtitan can build", "try it in torchtitan"),
    "python": (
        "python:<module>:<factory>, whose factory() returns a torch.nn.Module",
        "call it in the folder of <module>.py, or put that folder on PYTHONPATH",
    ),
}


def _known(name: str) -> ModelSpec:
    spec = module_spec(name)
    if spec is None:
        raise _bad(name, f"of {name} the shape alone is known: it can be priced, not compiled")
    return parse_spec(spec)


def _bad(text: str, message: str) -> PlanError:
    close = None if ":" in text else nearest(text, known_models())
    return PlanError(
        diagnostic(
            "SC020",
            where=text,
            message=message,
            found=text,
            legal=FORMS,
            help=f"did you mean {close}?" if close and close != text else None,
        )
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        words = {"True": True, "False": False, "None": None}
        return words.get(text, text)


def _build_hf(spec: ModelSpec, text: str, device: str) -> nn.Module:
    if find_spec("transformers") is None:
        raise PlanError(
            diagnostic(
                "SC921",
                where=text,
                message="transformers is not installed",
                help="pip install 'seqcomp[transformers]'",
            )
        )
    import torch

    settings: dict[str, Any] = {}
    if _is_file(spec):
        architecture, settings = _hf_config_file(spec, text)
    else:
        architecture = _hf_class(spec.target, text)
    # Made once to know its settings, then anew: some are derived from others.
    config_class = architecture.config_class
    _check_settings(config_class(**settings), spec.options, text)
    with torch.device(device):
        return architecture(config_class(**_with_options(settings, spec.options)))


def _check_settings(config: Any, options: Mapping[str, Any], text: str) -> None:
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    for key in options:
        if key not in known and not hasattr(config, key):
            close = nearest(key, sorted(known))
            raise PlanError(
                diagnostic(
                    "SC020",
                    where=text,
                    message=f"{type(config).__name__} has no setting {key!r}",
                    found=key,
                    legal=tuple(sorted(known)),
                    help=f"did you mean {close}?" if close else None,
                )
            )


def _with_options(settings: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Stored settings with changes; a list with one entry per layer follows their number."""
    merged = {**settings, **options}
    types, layers = merged.get("layer_types"), options.get("num_hidden_layers")
    if isinstance(types, list) and isinstance(layers, int) and "layer_types" not in options:
        if layers <= len(types):
            merged["layer_types"] = types[:layers]
        else:
            del merged["layer_types"]
    return merged


def _is_file(spec: ModelSpec) -> bool:
    return spec.target.endswith(".json") or "/" in spec.target


def _hf_class(name: str, text: str) -> Any:
    import transformers

    found = getattr(transformers, name, None)
    if not isinstance(found, type) or getattr(found, "config_class", None) is None:
        models = [item for item in dir(transformers) if "For" in item or item.endswith("Model")]
        close = nearest(name, models)
        raise PlanError(
            diagnostic(
                "SC020",
                where=text,
                message=f"transformers has no model class {name!r}",
                found=name,
                help=f"did you mean {close}?" if close else "for example LlamaForCausalLM",
            )
        )
    return found


def _hf_config_file(spec: ModelSpec, text: str) -> tuple[Any, dict[str, Any]]:
    path = Path(spec.target)
    if path.is_dir():
        path /= "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        names, kind = data["architectures"], data["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PlanError(
            diagnostic(
                "SC020",
                where=text,
                message=f"{path} is not a readable config with architectures and model_type",
                found=reason[:300],
                legal="the config.json of a model of transformers",
                help="give the path of a config.json that is there, or name a class with its "
                "settings: hf:LlamaForCausalLM?num_hidden_layers=2",
            )
        ) from error
    architecture = _hf_class(names[0], text)
    if architecture.config_class.model_type != kind:
        raise _bad(text, f"{names[0]} is not a model of the type {kind!r}")
    return architecture, {key: value for key, value in data.items() if key != "model_type"}


def _build_titan(spec: ModelSpec, text: str, device: str) -> nn.Module:
    return build_titan(spec.target, text, device)


def _build_python(spec: ModelSpec, text: str, device: str) -> nn.Module:
    import torch

    module_name, _, factory_name = spec.target.partition(":")
    with _working_directory_importable():
        factory: Any = import_module(module_name)
        for part in factory_name.split("."):
            factory = getattr(factory, part)
        try:
            with torch.device(device):
                model = factory()
        except (RuntimeError, NotImplementedError):
            # Some factories read values while they build, which meta tensors do not have.
            model = factory()
    if not isinstance(model, torch.nn.Module):
        found = type(model).__name__
        legal, fix = _BUILDABLE["python"]
        raise PlanError(diagnostic("SC021", where=text, found=found, legal=legal, help=fix))
    return model


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
