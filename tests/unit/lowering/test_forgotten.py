"""What a process keeps of the models that it has compiled."""

from __future__ import annotations

from typing import Any

import pytest

import seqcomp
from seqcomp.capture.export import Capture
from seqcomp.lowering import build as build_module
from tests.fixtures.models import build, inputs


def test_a_capture_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the ShapeEnv of each export for good: what hangs on it must not grow."""
    captures: list[Capture] = []
    original = build_module.export_call

    def kept(*args: Any, **kwargs: Any) -> Capture:
        captures.append(original(*args, **kwargs))
        return captures[-1]

    monkeypatch.setattr(build_module, "export_call", kept)
    model = seqcomp.parallelize(build(), plan={"mesh": {"ring": 1}, "strategies": {"ring": {}}})
    model(**inputs())["loss"].backward()
    for capture in captures:
        assert capture.fake_mode.shape_env is not None
        assert not capture.fake_mode.shape_env.fake_tensor_cache
    assert len(captures) == 1
