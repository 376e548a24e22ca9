"""A worker of a job on several hosts completes steps only as long as its launcher says that it
may.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from lockstep.elastic.client import MembershipClient
from lockstep.elastic.membership import Lease, Regroup
from lockstep.job.client import JobClient


class FakeJob:
    """The connection to a launcher, whose messages the test sends."""

    number = 0
    receive: Callable[[Any], None]
    lose: Callable[[], None]

    def subscribe(self, receive: Callable[[Any], None], lose: Callable[[], None]) -> None:
        self.receive, self.lose = receive, lose

    def send(self, message: object) -> None:
        pass


@pytest.fixture
def job() -> FakeJob:
    return FakeJob()


@pytest.fixture
def client(job: FakeJob) -> MembershipClient:
    return MembershipClient(cast(JobClient, job))


def begun(client: MembershipClient) -> threading.Thread:
    """A thread that waits until a step may be completed."""
    thread = threading.Thread(target=client.wait_for_lease, daemon=True)
    thread.start()
    return thread


def test_without_a_lease_a_worker_goes_on(client: MembershipClient) -> None:
    client.wait_for_lease()


def test_a_lease_that_is_over_is_waited_for(client: MembershipClient, job: FakeJob) -> None:
    job.receive(Lease(time.monotonic() - 1.0))
    thread = begun(client)
    thread.join(0.05)
    assert thread.is_alive()
    job.receive(Lease(math.inf))
    thread.join(20.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", ["change", "loss"])
def test_who_has_to_leave_its_group_waits_no_more(
    end: str, client: MembershipClient, job: FakeJob
) -> None:
    job.receive(Lease(0.0))
    thread = begun(client)
    if end == "change":
        job.receive(Regroup(1, "at once"))
    else:
        job.lose()
    thread.join(20.0)
    assert not thread.is_alive() and client.is_over
