"""A clock that a test advances."""

from __future__ import annotations

import time

import pytest


class Clock:
    """A monotonic clock that stands still until `pass_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
