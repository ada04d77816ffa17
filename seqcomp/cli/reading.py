"""Shows that a model is being read, where somebody looks on."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def reading(model: str | None) -> AbstractContextManager[Any]:
    """A spinner on a terminal; nothing elsewhere. Where nobody asked for more, transformers says
    errors alone: its hints are about settings of models that are run."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if model is None or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"reading {model}")
