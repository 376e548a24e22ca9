"""How long collectives take: by their algorithm, from latency and bandwidth, or from curves that were measured."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["ALGORITHMS", "Cost", "Curve", "Fabric", "Wire"]


@dataclass(frozen=True, slots=True)
class Wire:
    """A link between two workers, alike in both directions.

    Attributes:
        latency_s: seconds that an empty message takes.
        bytes_per_s: in each direction.
    """

    latency_s: float
    bytes_per_s: float


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


# --- Algorithms -------------------------------------------------------------------------------------------------------
# Each is a function of the bytes of one worker's tensor, the number of workers, and the wire.
# Source of the formulas: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH",
# IJHPCA 2005, section 4; additions of the reduction are left out, as they run at the speed of memory.


def ring_all_reduce(size: float, workers: int, wire: Wire) -> Cost:
    """A reduce-scatter and an all-gather around a ring: 2 (p - 1) messages of n / p bytes, one after the other."""
    lane = 2 * (workers - 1) / workers * size / wire.bytes_per_s
    return Cost(2 * (workers - 1) * wire.latency_s, lane, lane)


def tree_all_reduce(size: float, workers: int, wire: Wire) -> Cost:
    """A reduction up a binary tree and a broadcast down: 2 ceil(log2 p) messages of n bytes, one after the other."""
    depth = math.ceil(math.log2(workers))
    lane = 2 * depth * size / wire.bytes_per_s
    return Cost(2 * depth * wire.latency_s, lane, lane)


def flat_exchange(size: float, workers: int, wire: Wire) -> Cost:
    """An all-to-all of slices and an all-gather of their sums: the bytes of a ring, in two rounds at once."""
    lane = 2 * (workers - 1) / workers * size / wire.bytes_per_s
    return Cost(2 * wire.latency_s, lane, lane)


def all_to_all(size: float, workers: int, wire: Wire) -> Cost:
    """Each worker sends a slice of n / p bytes to every other one, all at once."""
    lane = (workers - 1) / workers * size / wire.bytes_per_s
    return Cost(wire.latency_s, lane, lane)


def ring_all_gather(size: float, workers: int, wire: Wire) -> Cost:
    """Slices of n / p bytes go around a ring; `size` is that of the result."""
    lane = (workers - 1) / workers * size / wire.bytes_per_s
    return Cost((workers - 1) * wire.latency_s, lane, lane)


Algorithm = Callable[[float, int, Wire], Cost]

ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "flat": flat_exchange,
    "all_to_all": all_to_all,
    "all_gather": ring_all_gather,
}
"""The algorithms, by the names that `Fabric.between` takes."""


# --- Measured curves --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured duration by message size, linear between its points and along the last two beyond them.

    Attributes:
        sizes: bytes, ascending; at least one.
        seconds: the duration at each.
        workers: among how many it was measured.
        collective: the key in `ALGORITHMS` by which it is extended to other numbers of workers.
    """

    sizes: Sequence[float]
    seconds: Sequence[float]
    workers: int = 2
    collective: str = "ring"

    def at(self, size: float) -> float:
        """Return the seconds for `size` bytes among the workers of the measurement."""
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1 or size <= sizes[0]:
            return seconds[0]
        right = min(bisect.bisect_left(sizes, size), len(sizes) - 1)
        left = right - 1
        share = (size - sizes[left]) / (sizes[right] - sizes[left])
        return seconds[left] + share * (seconds[right] - seconds[left])

    def cost(self, size: float, workers: int) -> Cost:
        """Return the cost for `size` bytes among `workers`: latency and lanes grow as the algorithm's formula does."""
        latency = self.at(0.0)
        lane = max(0.0, self.at(size) - latency)
        unit = Wire(1.0, 1.0)
        new, old = (ALGORITHMS[self.collective](1.0, count, unit) for count in (workers, self.workers))
        lane *= new.send_s / old.send_s
        return Cost(latency * new.latency_s / old.latency_s, lane, lane)


# --- Fabrics ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fabric:
    """What workers are connected by: shared memory inside of hosts, a wire between them.

    Attributes:
        wire: between hosts; None if there is only one host.
        per_host: workers on each host.
        between: the algorithm of an all-reduce between hosts, a key of `ALGORITHMS`.
        inside: measured curves inside a host, by the name of the collective: "all_reduce", "all_to_all", "all_gather".
        measured: measured curves between hosts, used instead of the formulas.
        in_flight: collectives that a worker runs at the same time.
        hierarchical: whether one worker of each host speaks for it, so that a host's data crosses the wire once.
    """

    wire: Wire | None
    per_host: int = 1
    between: str = "ring"
    inside: Mapping[str, Curve] = field(default_factory=dict)
    measured: Mapping[str, Curve] = field(default_factory=dict)
    in_flight: int = 1
    hierarchical: bool = True

    def cost(self, collective: str, size: float, workers: int) -> Cost:
        """Return the cost of "all_reduce", "all_to_all" or "all_gather" of `size` bytes among all `workers`."""
        if workers < 2:
            return Cost(0.0, 0.0, 0.0)
        if self.wire is None and not self.measured:
            return self._inside(collective, size, workers)
        local = min(self.per_host, workers)
        if local == 1:
            return self._between(collective, size, workers)
        hosts = -(-workers // local)
        inside = self._inside(collective, size, local)
        if hosts == 1:
            return inside
        if not self.hierarchical or collective == "all_to_all":
            # all workers of a host share its wire
            outside = self._between(collective, size, workers)
            lanes = local * (workers - local) / (workers - 1)
            return Cost(outside.latency_s, outside.send_s * lanes, outside.receive_s * lanes)
        outside = self._between(collective, size, hosts)
        return Cost(outside.latency_s + inside.seconds, outside.send_s, outside.receive_s)

    def _inside(self, collective: str, size: float, workers: int) -> Cost:
        curve = self.inside.get(collective) or self.inside.get("all_reduce")
        return Cost(0.0, 0.0, 0.0) if curve is None else curve.cost(size, workers)

    def _between(self, collective: str, size: float, workers: int) -> Cost:
        curve = self.measured.get(collective)
        if curve is not None:
            return curve.cost(size, workers)
        if self.wire is None:
            return self._inside(collective, size, workers)
        name = self.between if collective == "all_reduce" else collective
        return ALGORITHMS[name](size, workers, self.wire)
