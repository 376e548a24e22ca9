"""Horovod's interface: ``import lockstep.doors.horovod.torch as hvd``; see docs/horovod.md."""

from .runner import run

__all__ = ["run"]

__version__ = "0.28.1"
"""Of the Horovod whose interface this is, for programs that ask."""
