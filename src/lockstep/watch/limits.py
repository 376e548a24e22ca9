"""How patient the watch is."""

from __future__ import annotations

from dataclasses import dataclass

from .. import environment

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Attributes: strict, whether other lines are an error; warning_s, stall_s, see `environment`; debugging."""

    strict: bool
    warning_s: float
    stall_s: float
    debugging: bool

    @classmethod
    def read(cls) -> Limits:
        """As the environment says."""
        return cls(
            environment.watch_mode() == "strict",
            environment.stall_warning(),
            environment.stall_timeout(),
            environment.debug_rank() is not None,
        )
