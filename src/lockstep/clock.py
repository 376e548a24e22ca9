"""The clock of a job: real time or, where its network is emulated, that of the emulated hosts."""

from __future__ import annotations

import time

from . import environment

__all__ = ["dilation", "monotonic"]


def dilation() -> float:
    """Return how many times slower than real time this job's emulated network is; 1.0 without
    one.
    """
    network = environment.emulated_network()
    if network is None:
        return 1.0
    from .network import parse_network

    return parse_network(network[0]).dilation


def monotonic() -> float:
    """Return `time.monotonic()` in the time of the emulated network: divided by the dilation.

    Differences of two values are what a cluster with a core per worker would take (Gupta et al.,
    "To Infinity and Beyond: Time-Warped Network Emulation", NSDI 2006).
    """
    return time.monotonic() / dilation()
