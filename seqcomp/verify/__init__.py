"""Does a compiled module compute what the original computes? Ranks in one process, or real ones.

`seqcomp.verify` names both this package and the public function, whichever is imported first:
the package can be called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _VerifyPackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("seqcomp.verify.run").verify(*args, **kwargs)


sys.modules[__name__].__class__ = _VerifyPackage
