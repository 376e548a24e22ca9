"""What a host lacks is named with the place and the cure."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.launcher import host_requirements as requirements


def test_a_usual_host_has_all(tmp_path: Path) -> None:
    requirements.check_shared_memory(tmp_path)
    requirements.check_shared_memory(tmp_path / "missing")  # as on macOS
    requirements.check_loopback()
    assert not list(tmp_path.iterdir())


def test_shared_memory_that_cannot_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(requirements.os, "open", refuse)
    with pytest.raises(ConfigError, match=r"Read-only file system.*remount,rw") as raised:
        requirements.check_shared_memory(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_loopback_interface_that_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ConfigError, match="ip link set lo up"):
        requirements.check_loopback()
