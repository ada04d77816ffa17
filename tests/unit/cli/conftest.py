"""The command line, run in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from seqcomp.cli import main


class Result(NamedTuple):
    """Exit code, and what was printed to stdout and to stderr."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`run(*words)` of one command."""

    def call(*words: str) -> Result:
        with pytest.raises(SystemExit) as caught:
            main(words)
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Result(caught.value.code, out, err)

    return call
