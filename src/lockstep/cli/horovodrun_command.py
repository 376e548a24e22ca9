"""The command ``horovodrun``, for those who install it beside ``lockstep``."""

from __future__ import annotations

import sys

from .main import main

__all__ = ["run"]


def run() -> int:
    """``lockstep horovodrun`` with the same arguments."""
    return main(["horovodrun", *sys.argv[1:]])
