"""How patient the watch is."""

from __future__ import annotations

from dataclasses import dataclass

from .. import environment

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long is waited, in seconds, and for what; see `environment`.

    Attributes: strict, whether other lines are an error; warning_s, stall_s, heartbeat_s; debugging.
    """

    strict: bool
    warning_s: float
    stall_s: float
    debugging: bool
    heartbeat_s: float = 30.0

    @classmethod
    def read(cls) -> Limits:
        """As the environment says."""
        return cls(
            environment.watch_mode() == "strict",
            environment.stall_warning(),
            environment.stall_timeout(),
            environment.debug_rank() is not None,
            environment.heartbeat_timeout(),
        )
