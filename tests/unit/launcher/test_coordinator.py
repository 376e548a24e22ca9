"""When the workers of all hosts start, start again and end: events of hosts in, messages to them
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from msgspec.structs import replace

from lockstep.job.messages import Failure, Finished, JobEnd, Request, Say
from lockstep.launcher.coordinator import (
    Coordinator,
    FromCoordinator,
    Join,
    Round,
)

NAMES = {0: "a", 1: "b", 2: "c"}


class Job:
    """A coordinator and what it has sent. Attributes: sent, messages by host; ports, of the stores
    that were opened.
    """

    def __init__(self) -> None:
        self.sent: dict[int, list[FromCoordinator]] = {host: [] for host in NAMES}
        self.ports: Iterator[int] = count(1000)
        self.coordinator = Coordinator(
            NAMES, lambda host, message: self.sent[host].append(message), self._serve
        )
        self.receive = self.coordinator.receive

    def _serve(self) -> int:
        return next(self.ports)

    def take(self) -> list[list[FromCoordinator]]:
        """What each host was sent since the last call."""
        taken = [list(messages) for messages in self.sent.values()]
        for messages in self.sent.values():
            messages.clear()
        return taken

    def start(self, number: int = 0) -> None:
        for host, workers in ((2, 4), (0, 2), (1, 3)):
            self.receive(host, Join(number, workers))


@pytest.fixture
def job() -> Job:
    return Job()


def failure(rank: int, at: int, host: str = "") -> Failure:
    return Failure(rank, at, "ValueError", f"of {rank}", host=host)


def test_workers_start_when_all_hosts_are_ready_in_the_order_of_the_hosts(job: Job) -> None:
    job.receive(1, Join(0, 3))
    job.receive(2, Join(0, 4))
    assert job.take() == [[], [], []]
    job.receive(0, Join(0, 2))
    assert job.take() == [[Round(0, 0, 9, 1000)], [Round(0, 2, 9, 1000)], [Round(0, 5, 9, 1000)]]


def test_a_host_that_starts_its_workers_again_is_followed_by_all_with_another_store(
    job: Job,
) -> None:
    job.start()
    job.take()
    job.receive(1, Join(1, 3))
    assert job.take() == [[Join(1, 3)]] * 3
    job.receive(2, Join(1, 1))
    job.receive(0, Join(1, 2))
    assert job.take() == [[Round(1, 0, 6, 1001)], [Round(1, 2, 6, 1001)], [Round(1, 5, 6, 1001)]]


def test_hosts_whose_workers_fail_at_the_same_time_open_one_round(job: Job) -> None:
    for number in range(3):
        job.start(number)
        assert [sent[-1] for sent in job.take()] == [
            Round(number, first, 9, 1000 + number) for first in (0, 2, 5)
        ]


def test_nothing_is_started_again_after_a_host_has_finished(job: Job) -> None:
    job.start()
    job.receive(0, Finished())
    job.take()
    job.receive(1, Join(1, 3))
    over = JobEnd("workers cannot be restarted, because another host's have finished already")
    assert job.take() == [[], [over], []]


def test_the_job_is_done_when_all_hosts_have_finished(job: Job) -> None:
    job.start()
    job.take()
    for host in (2, 0):
        job.receive(host, Finished())
    assert job.take() == [[]] * 3
    job.receive(1, Finished())
    assert job.take() == [[Finished()]] * 3


def test_a_failure_ends_the_job_and_all_name_the_earliest(job: Job) -> None:
    job.start()
    job.take()
    job.receive(1, JobEnd(failure=failure(1, 20, "b")))
    assert (
        job.take()
        == [[JobEnd("another host's workers have failed", failure=failure(1, 20, "b"))]] * 3
    )
    job.receive(2, JobEnd(failure=failure(2, 10, "c")))
    assert job.take() == [[]] * 3
    job.receive(0, JobEnd())
    earliest = replace(failure(2, 10, "c"), others="rank 1 on b failed later with ValueError")
    assert job.take() == [[earliest]] * 3
    job.receive(2, Join(1, 4))  # it had not heard yet
    assert job.take() == [[], [], [JobEnd("another host's workers have failed")]]


def test_a_lost_host_ends_the_job_and_is_not_waited_for(job: Job) -> None:
    job.start()
    job.take()
    job.coordinator.lost(2, "the launcher on c has ended")
    assert job.take() == [[JobEnd("the launcher on c has ended")]] * 3
    job.receive(0, JobEnd())
    job.receive(1, JobEnd(failure=failure(1, 20)))
    assert job.take() == [[failure(1, 20)]] * 3


def test_the_loss_of_a_host_whose_part_is_over_changes_nothing(job: Job) -> None:
    job.start()
    job.receive(2, JobEnd())
    job.take()
    job.coordinator.lost(2, "the launcher on c has ended")
    assert job.take() == [[]] * 3


def test_hosts_that_take_too_long_to_end_are_not_waited_for(job: Job) -> None:
    job.start()
    job.receive(1, JobEnd(failure=failure(1, 20)))
    job.take()
    job.coordinator.give_up()
    assert job.take() == [[failure(1, 20)]] * 3


def test_all_know_the_host_that_was_interrupted_first(job: Job) -> None:
    job.start()
    job.take()
    job.receive(1, Request(0, "stop", 2, "b"))
    job.receive(0, Request(0, "stop", 15, "a"))
    assert job.take() == [[Request(0, "stop", 2, "b")]] * 3


def test_all_hosts_can_be_told_something(job: Job) -> None:
    job.coordinator.say("text")
    assert job.take() == [[Say("text")]] * 3
