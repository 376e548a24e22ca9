"""How long collectives take: by their algorithm, from latency and bandwidth, or from curves that
were measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .. import arguments
from ..errors import ConfigError
from ..network import Link
from .measurement import Curve, NetworkMeasurement


@dataclass(frozen=True, slots=True)
class Cost:
    """What one collective costs one worker.

    Attributes:
        latency_s: seconds during which nothing occupies the lanes.
        send_s: seconds for which it occupies the lane to the network.
        receive_s: the same for the lane from it.
    """

    latency_s: float
    send_s: float
    receive_s: float

    @property
    def seconds(self) -> float:
        """The duration of the collective alone on an idle network."""
        return self.latency_s + max(self.send_s, self.receive_s)

    def scaled(self, latency: float, bandwidth: float) -> Cost:
        """Return the cost with the time of each part multiplied."""
        return Cost(self.latency_s * latency, self.send_s * bandwidth, self.receive_s * bandwidth)


# Each is a function of bytes, the number of workers, and the link between two of them. Source of
# the formulas: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
# MPICH", IJHPCA 2005, section 4; additions of the reduction are left out, as they run at the speed
# of memory.


def ring_all_reduce(size: float, workers: int, link: Link) -> Cost:
    """A reduce-scatter and an all-gather around a ring: 2 (p - 1) messages of n / p bytes, one
    after the other.
    """
    lane = 2 * (workers - 1) / workers * size / link.bandwidth
    return Cost(2 * (workers - 1) * link.latency, lane, lane)


def tree_all_reduce(size: float, workers: int, link: Link) -> Cost:
    """A reduction up a binary tree and a broadcast down: 2 ceil(log2 p) messages of n bytes, one
    after the other.
    """
    depth = math.ceil(math.log2(workers))
    lane = 2 * depth * size / link.bandwidth
    return Cost(2 * depth * link.latency, lane, lane)


def flat_exchange(size: float, workers: int, link: Link) -> Cost:
    """An all-to-all of slices and an all-gather of their sums: the bytes of a ring, in two rounds
    at once.
    """
    lane = 2 * (workers - 1) / workers * size / link.bandwidth
    return Cost(2 * link.latency, lane, lane)


def all_to_all(size: float, workers: int, link: Link) -> Cost:
    """Each worker sends a slice of n / p bytes to every other one, all at once."""
    lane = (workers - 1) / workers * size / link.bandwidth
    return Cost(link.latency, lane, lane)


def ring_all_gather(size: float, workers: int, link: Link) -> Cost:
    """Slices of n / p bytes go around a ring; `size` is that of the result."""
    lane = (workers - 1) / workers * size / link.bandwidth
    return Cost((workers - 1) * link.latency, lane, lane)


def broadcasts(size: float, workers: int, link: Link) -> Cost:
    """An all-gather of n / p bytes from each worker as p broadcasts along binomial trees, one after
    the other.
    """
    depth = math.ceil(math.log2(workers))
    lane = depth * size / link.bandwidth
    return Cost(workers * depth * link.latency, lane, lane)


Algorithm = Callable[[float, int, Link], Cost]

ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "flat": flat_exchange,
    "all_to_all": all_to_all,
    "all_gather": ring_all_gather,
    "broadcasts": broadcasts,
}
"""The algorithms, by the names that `Fabric.algorithm` takes."""


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """A measured collective, extended to other numbers of workers as the formula of its algorithm
    grows.

    Attributes:
        curve: seconds by the bytes of one worker's input.
        workers: among how many it was measured.
        algorithm: a key of `ALGORITHMS`.
    """

    curve: Curve
    workers: int = 2
    algorithm: str = "ring"

    def cost(self, size: float, workers: int) -> Cost:
        """Return the cost for `size` bytes, as of the functions in `ALGORITHMS`, among
        `workers`.
        """
        if self.algorithm == "all_gather":  # whose input is a slice of its result
            size /= workers
        latency = self.curve.latency
        lane = max(0.0, self.curve.at(size) - latency)
        unit = Link(1.0, 1.0)
        new, old = (
            ALGORITHMS[self.algorithm](1.0, count, unit) for count in (workers, self.workers)
        )
        if self.algorithm == "all_gather":  # by the bytes of a slice
            lane *= workers / self.workers
        lane *= new.send_s / old.send_s
        return Cost(latency * new.latency_s / old.latency_s, lane, lane)


DIGEST_BYTES = 360.0
"""What the watchdog's pre-flight check all-reduces beside each collective between hosts."""

MEMORY_LINK = Link(4e9, 15e-6)
"""Stands for the shared memory of a host that has not been measured; of an all-reduce among two
workers of a laptop.
"""


@dataclass(frozen=True)
class Fabric:
    """What workers are connected by: shared memory inside of hosts, links between them.

    Attributes:
        link: between hosts; None if there is only one host.
        per_host: workers on each host.
        algorithm: of an all-reduce between hosts, a key of `ALGORITHMS`.
        gather: of an all-gather between hosts, likewise; Lockstep's transport between hosts does it
            by broadcasts.
        inside: measured collectives inside a host: "all_reduce", "all_to_all", "all_gather".
        measured: measured collectives between hosts, used instead of the formulas.
        in_flight: collectives that a worker runs at the same time.
        hierarchical: whether one worker of each host speaks for it, so that a host's sums cross the
            link once.
        checks_calls: whether the hosts compare what they call at the same time as each collective,
            as the watchdog's pre-flight check does. Beside an all-reduce it costs nothing;
            collectives of fewer rounds wait for it.
    """

    link: Link | None
    per_host: int = 1
    algorithm: str = "ring"
    gather: str = "broadcasts"
    inside: Mapping[str, MeasuredCollective] = field(default_factory=dict)
    measured: Mapping[str, MeasuredCollective] = field(default_factory=dict)
    in_flight: int = 1
    hierarchical: bool = True
    checks_calls: bool = False

    @classmethod
    def of_measurement(
        cls, measurement: NetworkMeasurement, transport: str, per_host: int = 1
    ) -> Fabric:
        """Return the fabric that `lockstep bench` has measured.

        A measurement on one host says what happens inside of hosts; one on several hosts, what
        happens between them.

        Raises:
            ConfigError: `transport` was not measured.
        """
        arguments.choice("transport", transport, measurement.transports)
        of_transport = measurement.transports[transport].collectives
        collectives = {
            name: MeasuredCollective(of_transport[name].idle, measurement.workers, algorithm)
            for name, algorithm in _MEASURED.items()
            if name in of_transport
        }
        if "all_reduce" not in collectives:
            raise ConfigError(
                "network", "a measurement of all_reduce among two workers or more", found="none"
            )
        if len(measurement.hosts) > 1:
            return cls(None, 1, measured=collectives, checks_calls=transport != "gloo")
        return cls(None, per_host, inside=collectives)

    @property
    def is_one_host(self) -> bool:
        """Whether all workers share memory."""
        return self.link is None and not self.measured

    def cost(self, collective: str, size: float, workers: int) -> Cost:
        """Return the cost of "all_reduce", "all_to_all" or "all_gather" among all `workers`, with
        the check beside it.

        Args:
            collective: its name.
            size: bytes: those of the sum, of all slices that a worker sends, or of the gathered
                result.
            workers: their number.
        """
        if workers < 2:
            return Cost(0.0, 0.0, 0.0)
        alone = self._alone(collective, size, workers)
        if not self.checks_calls or self.is_one_host or workers <= self.per_host:
            return alone
        check_s = self._alone("all_reduce", DIGEST_BYTES, workers).seconds
        return Cost(
            alone.latency_s + max(0.0, check_s - alone.seconds), alone.send_s, alone.receive_s
        )

    def _alone(self, collective: str, size: float, workers: int) -> Cost:
        if self.is_one_host:
            return self._inside(collective, size, workers)
        local = min(self.per_host, workers)
        if local == 1:
            return self._between(collective, size, workers)
        hosts = -(-workers // local)
        inside = self._inside(collective, size, local)
        if hosts == 1:
            return inside
        if not self.hierarchical or collective == "all_to_all":
            # all workers of a host share its link
            outside = self._between(collective, size, workers)
            lanes = local * (workers - local) / (workers - 1)
            return Cost(outside.latency_s, outside.send_s * lanes, outside.receive_s * lanes)
        outside = self._between(collective, size, hosts)
        return Cost(outside.latency_s + inside.seconds, outside.send_s, outside.receive_s)

    def _inside(self, collective: str, size: float, workers: int) -> Cost:
        measured = self.inside.get(collective)
        if measured is not None:
            return measured.cost(size, workers)
        return ALGORITHMS[_MEASURED[collective]](size, workers, MEMORY_LINK)

    def _between(self, collective: str, size: float, workers: int) -> Cost:
        measured = self.measured.get(collective)
        if measured is not None:
            return measured.cost(size, workers)
        if self.link is None:  # of several hosts, where this collective was not measured
            return self.measured["all_reduce"].cost(size, workers)
        name = {"all_reduce": self.algorithm, "all_gather": self.gather}.get(collective, collective)
        return ALGORITHMS[name](size, workers, self.link)


_MEASURED = {"all_reduce": "ring", "all_to_all": "all_to_all", "all_gather": "all_gather"}
"""The collectives of a training, by name → the algorithm by which they are extended to more
workers.
"""
