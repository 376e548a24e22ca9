"""Fixtures for tests of the watchdog."""

from __future__ import annotations

import pytest

from support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
