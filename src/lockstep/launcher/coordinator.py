"""The coordinator of a job whose hosts are fixed: when the workers of all hosts start, start again,
and end (pure).

It is a part of the launcher of the first host. Every launcher, its own included, tells it what has
happened there, and gets messages that are the same for all, in the same order. There is no clock
and no connection here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..job.messages import Failure, Finished, JobEnd, Request, Say
from ..messages import Integer, Tagged


class Join(Tagged, frozen=True):
    """This host can start so many workers in a round: after so many restarts. From the coordinator,
    that a host has begun a further round, which all join.
    """

    round: Integer
    workers: Integer


class Round(Tagged, frozen=True):
    """Start the workers; the only message that differs from host to host.

    Attributes:
        number: of restarts before.
        first_rank: of this host's workers.
        world_size: the number of workers of all hosts.
        port: of the workers' store, on the first host.
    """

    number: Integer
    first_rank: Integer
    world_size: Integer
    port: Integer


ToCoordinator = Join | Finished | Request | JobEnd
"""From the launcher of a host: the request is to stop, as it has received a signal; with the end of
the job its part is over.
"""

FromCoordinator = Round | Join | Finished | Request | JobEnd | Failure | Say
"""To the launchers of all hosts: the request is that of the host that was first to receive a
signal; the failure is the first one of all hosts, said once all parts are over.
"""


_FINISHED = "workers cannot be restarted, because another host's have finished already"
_FAILED = "another host's workers have failed"


@dataclass
class Coordinator:
    """Decides for all hosts. Its methods are the events.

    Args:
        names: of all hosts, by number.
        send: sends a message to the launcher of a host.
        serve: opens the store of the next round's workers, and returns its port.

    Attributes:
        ended: the hosts whose part is over.
    """

    names: Mapping[int, str]
    send: Callable[[int, FromCoordinator], None]
    serve: Callable[[], int]
    ended: set[int] = field(default_factory=set)
    _round: int = 0
    _joined: dict[int, int] = field(default_factory=dict)  # workers, by host
    _done: set[int] = field(default_factory=set)
    _failures: dict[int, Failure] = field(default_factory=dict)
    _interruption: Request | None = None
    _is_over: bool = False

    def receive(self, host: int, message: ToCoordinator) -> None:
        """The launcher of a host has sent a message."""
        match message:
            case Join(number, workers):
                self._join(host, number, workers)
            case Finished():
                self._done.add(host)
                if len(self._done) == len(self.names):
                    self._tell_all(Finished())
            case Request(what="stop"):
                if self._interruption is None:
                    self._interruption = message
                    self._tell_all(message)
            case JobEnd(failure=failure):
                self._end(host, failure)

    def lost(self, host: int, reason: str) -> None:
        """A host, or its launcher, is gone."""
        if host in self.ended:
            return
        self.ended.add(host)
        self.end_job(reason)
        self._tell_outcome()

    def end_job(self, reason: str, failure: Failure | None = None) -> None:
        """The job cannot go on."""
        if not self._is_over:
            self._is_over = True
            self._tell_all(JobEnd(reason, failure=failure))

    def give_up(self) -> None:
        """The hosts whose part is not over have had enough time."""
        self.ended |= self.names.keys()
        self._tell_outcome()

    def say(self, text: str) -> None:
        """Let all hosts show a message."""
        self._tell_all(Say(text))

    def _join(self, host: int, number: int, workers: int) -> None:
        if self._is_over or self._done:
            self.send(host, JobEnd(_FINISHED if self._done else _FAILED))
            return
        if number > self._round:
            self._round = number
            self._joined.clear()
            self._tell_all(Join(number, workers))
        if number == self._round:
            self._joined[host] = workers
        if len(self._joined) == len(self.names):
            self._start()

    def _start(self) -> None:
        """All hosts have joined the round: give each of them its ranks."""
        port = self.serve()
        world_size = sum(self._joined.values())
        first_rank = 0
        for host in sorted(self.names):
            self.send(host, Round(self._round, first_rank, world_size, port))
            first_rank += self._joined[host]

    def _end(self, host: int, failure: Failure | None) -> None:
        self.ended.add(host)
        if failure is not None:
            self._failures[host] = failure
            self.end_job(_FAILED, Failure.earliest(list(self._failures.values())))
        self._tell_outcome()

    def _tell_outcome(self) -> None:
        failure = Failure.earliest(list(self._failures.values()))
        if failure is not None and self.ended >= self.names.keys():
            self._tell_all(failure)

    def _tell_all(self, message: FromCoordinator) -> None:
        for host in self.names:
            self.send(host, message)
