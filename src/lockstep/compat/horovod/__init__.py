"""Horovod's interface: ``import lockstep.compat.horovod.torch as hvd``; see docs/horovod.md."""

from .runner import run

__all__ = ["run"]

__version__ = "0.28.1"
"""The version of Horovod whose interface this is."""
