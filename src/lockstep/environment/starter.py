"""Finds the process that has started this machine's ranks of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .launchers import find_launcher

__all__ = ["starter"]


def starter(variables: Mapping[str, str]) -> str:
    """The process that started this machine's ranks, in a form that no other process will ever have.

    It is the nearest ancestor without this rank's own variables: between it and the rank there may be shells.
    """
    launcher = find_launcher(variables)
    own = {name.encode(): variables[name].encode() for name in launcher.names if name in variables} if launcher else {}
    process = os.getppid()
    while _has(process, own):
        process = int(_status(process)[1])
    return f"{process} {_status(process)[19]}"


def _has(process: int, own: Mapping[bytes, bytes]) -> bool:
    """Whether `process` was started with the variables `own`; one of another user was not."""
    try:
        text = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False
    found = dict(line.partition(b"=")[::2] for line in text.split(b"\0"))
    return bool(own) and all(found.get(name) == value for name, value in own.items())


def _status(process: int) -> list[str]:
    """The words in /proc/PID/stat after the program's name: state, parent, …, and as the 20th the time of its start."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no Linux
        return ["", "0", *[""] * 18]
