"""Sockets are made where their paths fit, however long TMPDIR is."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from lockstep.system import socket_folders
from lockstep.system.job_folders import temporary_job_folder


def test_a_usual_folder_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert socket_folders.short_base() is None


def test_in_place_of_a_long_one_a_socket_fits_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    with temporary_job_folder() as folder, socket.socket(socket.AF_UNIX) as end:
        end.bind(f"{folder}/membership")
    assert not Path(folder).exists()


def test_without_another_place_the_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    monkeypatch.setattr(socket_folders, "_ELSEWHERE", (str(tmp_path / "none"),))
    with pytest.raises(OSError, match=r"TMPDIR is too long; export TMPDIR=/tmp"):
        socket_folders.short_base()
