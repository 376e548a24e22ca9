"""What the user and the launcher say about the watch over ranks."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError

__all__ = ["heartbeat_timeout", "stall_timeout", "stall_warning", "timeline_dir", "watch_dir", "watch_mode"]

_MODES = {"on": "on", "1": "on", "": "on", "strict": "strict", "off": "off", "0": "off"}


def watch_mode() -> str:
    """ "on", "strict" or "off", from LOCKSTEP_WATCH.

    Raises:
        ConfigError: for another word.
    """
    text = os.environ.get("LOCKSTEP_WATCH", "").strip().lower()
    if text not in _MODES:
        raise ConfigError("LOCKSTEP_WATCH", "on, strict or off", text)
    return _MODES[text]


def heartbeat_timeout() -> float:
    """The seconds in which another host must answer, from LOCKSTEP_HEARTBEAT_TIMEOUT; 30 if unset."""
    return _seconds("LOCKSTEP_HEARTBEAT_TIMEOUT", 30.0)


def stall_timeout() -> float:
    """The seconds after which ranks that others wait for are an error, from LOCKSTEP_STALL_TIMEOUT; 600 if unset."""
    return _seconds("LOCKSTEP_STALL_TIMEOUT", 600.0)


def stall_warning() -> float:
    """The seconds after which they are worth a warning, from LOCKSTEP_STALL_WARNING; 5 if unset."""
    return _seconds("LOCKSTEP_STALL_WARNING", 5.0)


def watch_dir() -> Path | None:
    """The folder that the launcher has made for this job's recordings on this machine."""
    text = os.environ.get("LOCKSTEP_WATCH_DIR", "")
    return Path(text) if text else None


def timeline_dir() -> Path | None:
    """The folder for files of all records, from LOCKSTEP_TIMELINE."""
    text = os.environ.get("LOCKSTEP_TIMELINE", "")
    return Path(text) if text else None


def _seconds(name: str, usual: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        seconds = float(text or usual)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(name, "a number of seconds above 0", text)
    return seconds
