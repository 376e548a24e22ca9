"""The device of tests that are marked `gpu`.

They run where there is a GPU, and are skipped elsewhere. With LOCKSTEP_GPU_TESTS=cpu they run on
the CPU instead, so that whoever changes them without a GPU sees that they themselves are right;
what only a GPU has is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

__all__ = ["DEVICE", "ON_GPU", "can_run", "id_of", "no_waiting", "only_on_gpu"]

ON_GPU = torch.cuda.is_available() and os.environ.get("LOCKSTEP_GPU_TESTS") != "cpu"
DEVICE = "cuda" if ON_GPU else "cpu"

only_on_gpu = pytest.mark.skipif(not ON_GPU, reason="the CPU has nothing like it")


def can_run() -> bool:
    """Return whether tests marked `gpu` run here."""
    return ON_GPU or os.environ.get("LOCKSTEP_GPU_TESTS") == "cpu"


def id_of(options: Any) -> str | None:
    """Return the id of a test for these options, the same in each process; None for other
    parameters.
    """
    if not isinstance(options, dict):
        return None
    return (
        ",".join(name if callable(value) else f"{name}={value}" for name, value in options.items())
        or "plain"
    )


@contextmanager
def no_waiting(at_once: bool = True) -> Iterator[Callable[[bool], None]]:
    """Raise an error for whatever waits for the GPU.

    Args:
        at_once: whether it begins so; the function that is yielded says so later.
    """

    def forbid(waiting: bool) -> None:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("error" if waiting else "default")

    forbid(at_once)
    try:
        yield forbid
    finally:
        forbid(False)
