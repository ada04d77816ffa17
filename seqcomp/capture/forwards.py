"""Other forwards in a module's place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def standing_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile calls of this module run `forward`."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
