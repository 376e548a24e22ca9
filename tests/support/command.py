"""The command, run in the process of the tests, whose fork server has PyTorch loaded after its
first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest

from lockstep.cli import main

__all__ = ["Ended", "Here", "command_here"]


class Ended(NamedTuple):
    """How a command has ended."""

    returncode: int
    stdout: str
    stderr: str


Here = Callable[..., Ended]
"""Words of the command line, without "lockstep" → how it ended."""


def command_here(capfd: pytest.CaptureFixture[str]) -> Here:
    """For tests in which the workers matter: no process of the command, nor a fork server, has to
    start first.
    """

    def run(*words: object) -> Ended:
        with mock.patch.dict(os.environ):  # the command sets variables for its fork server
            os.environ.pop("OMP_NUM_THREADS", None)
            capfd.readouterr()
            code = main([str(word) for word in words])
            return Ended(code, *capfd.readouterr())

    return run
