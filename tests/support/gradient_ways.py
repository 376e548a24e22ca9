"""The two ways in which data parallelism averages gradients: torch's DistributedDataParallel, or
one message.

The models of tests are small, and go in one message. A test that is about DistributedDataParallel
says so with `way`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.parallel import one_bucket
from lockstep.parallel.distributed import Distributed
from lockstep.parallel.strategy import Strategy

__all__ = ["WAYS", "check_way", "way"]

WAYS = ("message", "ddp")


@contextmanager
def way(name: str) -> Iterator[None]:
    """A context in which strategies average the gradients of small models by "ddp" or in one
    "message".
    """
    before = one_bucket.MOST_BYTES
    try:
        one_bucket.MOST_BYTES = before if name == "message" else 0
        yield
    finally:
        one_bucket.MOST_BYTES = before


def check_way(strategy: Strategy, name: str) -> None:
    """Check that a strategy of several workers averages gradients in this way."""
    assert isinstance(strategy, Distributed)
    if strategy.comm.size > 1:
        assert (strategy._ddp is None, strategy._one_bucket is None) == (
            name == "message",
            name == "ddp",
        )
