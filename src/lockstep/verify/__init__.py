"""Whether a training gives the same bits at other numbers of workers; if not, where they part, and the likely cause."""

from __future__ import annotations

from .causes import likely_cause
from .comparing import Parting, first_parting
from .recording import Record, record

__all__ = ["Parting", "Record", "first_parting", "likely_cause", "record"]
