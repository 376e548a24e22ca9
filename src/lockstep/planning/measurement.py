"""Measured networks: the curves of each transport's collectives, and the file network.json that
holds them.

What measures them is in `network_ranks`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .. import messages
from ..errors import ConfigError, DataError
from ..network import LINK_FORM, Link, parse_link
from ..system import atomic_files

__all__ = [
    "FORMAT",
    "NOISE_LIMIT",
    "CollectiveCurve",
    "Curve",
    "NetworkMeasurement",
    "PairMeasurement",
]
__all__ += [
    "TransportMeasurement",
    "find_network",
    "from_json",
    "read_measurement",
    "to_json",
    "write_measurement",
]

FORMAT = "lockstep network 1"
"""What network.json says that it is; the number is that of the version."""

NOISE_LIMIT = 0.25
"""How far medians may differ among the parts of a measurement, relative to the whole's, for it to
be a result.
"""


class Curve(msgspec.Struct, frozen=True):
    """Seconds by message size: linear between its points, and beyond them as between the two
    nearest.

    Attributes:
        sizes: bytes, ascending.
        seconds: at each of the sizes.
        residual: the largest deviation of a measured median from the curve, relative to the median.
    """

    sizes: messages.List[float]
    seconds: messages.List[float]
    residual: float = 0.0

    def at(self, size: float) -> float:
        """Return the seconds for `size` bytes; below the first size, those of the first size."""
        sizes = self.sizes
        seconds = self.seconds
        if len(sizes) == 1 or size <= sizes[0]:
            return seconds[0]
        right = min(bisect.bisect_left(sizes, size), len(sizes) - 1)
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.seconds[0]

    @property
    def bandwidth(self) -> float:
        """Bytes per second among the largest messages; among all where those take equally long,
        else infinity.
        """
        for i in (-2, 0):
            rise = self.seconds[-1] - self.seconds[i] if len(self.sizes) > 1 else 0.0
            if rise > 0:
                return (self.sizes[-1] - self.sizes[i]) / rise
        return math.inf

    @staticmethod
    def fit(points: Mapping[float, float], tolerance: float = 0.1, most: int = 5) -> Curve:
        """Return the curve with the fewest points that deviates from `points` by at most
        `tolerance`.

        For each number of knots, all choices among the measured sizes are tried; the values at the
        knots are those of the weighted least squares of relative deviations. `most` knots are taken
        if none stays within the tolerance.

        Args:
            points: bytes → measured seconds.
            tolerance: relative.
            most: knots.

        Raises:
            ConfigError: there are no points, or one is not above 0.
        """
        sizes = sorted(points)
        seconds = [points[size] for size in sizes]
        if not sizes or not all(0 < value < math.inf for value in seconds):
            raise ConfigError("points", "seconds above 0 for at least one size", dict(points))
        if len(sizes) == 1:
            return Curve((sizes[0],), (seconds[0],))
        best: Curve | None = None
        for count in range(2, min(most, len(sizes)) + 1):
            inner = itertools.combinations(sizes[1:-1], count - 2)
            curves = [
                _fit_knots((sizes[0], *middle, sizes[-1]), sizes, seconds) for middle in inner
            ]
            nearest = min(curves, key=lambda curve: curve.residual)
            best = nearest if best is None or nearest.residual < best.residual else best
            if best.residual <= tolerance:
                break
        assert best is not None
        return best


def _fit_knots(knots: Sequence[float], sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Return the curve through `knots` of least squares; its normal equations are tridiagonal."""
    count = len(knots)
    diagonal = [0.0] * count
    beside = [0.0] * (count - 1)
    right = [0.0] * count
    for size, value in zip(sizes, seconds, strict=True):
        at = min(bisect.bisect_right(knots, size), count - 1) - 1
        share = (size - knots[at]) / (knots[at + 1] - knots[at])
        # relative to the measured value
        low = (1 - share) / value
        high = share / value
        diagonal[at] += low * low
        diagonal[at + 1] += high * high
        beside[at] += low * high
        right[at] += low
        right[at + 1] += high
    for i in range(1, count):
        factor = beside[i - 1] / diagonal[i - 1]
        diagonal[i] -= factor * beside[i - 1]
        right[i] -= factor * right[i - 1]
    values = [0.0] * count
    for i in reversed(range(count)):
        above = beside[i] * values[i + 1] if i + 1 < count else 0.0
        values[i] = max(1e-9, (right[i] - above) / diagonal[i])
    # a larger message that takes less time is noise, which the residual tells
    curve = Curve(tuple(knots), tuple(itertools.accumulate(values, max)))
    deviations = [
        abs(curve.at(size) - value) / value for size, value in zip(sizes, seconds, strict=True)
    ]
    return Curve(curve.sizes, curve.seconds, max(deviations))


class PairMeasurement(msgspec.Struct, frozen=True):
    """Messages between two ranks, there and back.

    Attributes:
        ranks: the two.
        idle: seconds of one message in one direction by its size: half of a round trip.
        noise: how far medians differ among parts of the measurement at the worst size, relative to
            the whole's.
    """

    ranks: tuple[int, int]
    idle: Curve
    noise: float


class CollectiveCurve(msgspec.Struct, frozen=True):
    """One collective of one transport by message size: the bytes of one rank's input.

    Attributes:
        idle: seconds while the ranks do nothing else.
        noise: how far medians differ among parts of the measurement at the worst size, relative to
            the whole's.
        computing: seconds while the ranks compute in another thread; None if it was not measured.
        computing_noise: as `noise`.
    """

    idle: Curve
    noise: float
    computing: Curve | None = None
    computing_noise: float = 0.0


class TransportMeasurement(msgspec.Struct, frozen=True):
    """What was measured of one transport.

    Attributes:
        collectives: by name: "all_reduce", "broadcast", "all_gather", "reduce_scatter",
            "all_to_all", "barrier".
        pairs: of ranks.
        compute_slowdown: how many times slower the ranks compute while an all-reduce runs; 0 if not
            measured.
    """

    collectives: dict[str, CollectiveCurve]
    pairs: messages.List[PairMeasurement] = ()
    compute_slowdown: float = 0.0

    @property
    def noise(self) -> float:
        """The largest noise of collectives and pairs on the idle hosts."""
        of_pairs = [pair.noise for pair in self.pairs]
        return max(of_pairs + [curve.noise for curve in self.collectives.values()], default=0.0)

    @property
    def is_result(self) -> bool:
        """Whether the parts of the measurement agree well enough to draw conclusions."""
        return self.noise <= NOISE_LIMIT


class NetworkMeasurement(msgspec.Struct, frozen=True):
    """What `lockstep bench` has measured.

    Attributes:
        format: `FORMAT`.
        workers: number of ranks.
        hosts: the ranks of each host.
        cores: usable cores of the first host.
        transports: by name: "shm", "gloo", "mpi4py", "nccl".
        copy_bandwidth: bytes per second that one rank copies in memory.
        copy_noise: the same of it.
        description: of the hosts and the time, for readers.
    """

    format: str
    workers: int
    hosts: messages.List[messages.List[int]]
    cores: int
    transports: dict[str, TransportMeasurement]
    copy_bandwidth: float
    copy_noise: float = 0.0
    description: str = ""

    @property
    def noise(self) -> float:
        """The largest noise of all transports, and of copies."""
        return max(self.copy_noise, *(transport.noise for transport in self.transports.values()))

    @property
    def is_result(self) -> bool:
        """Whether the measurements of all transports, and of copies, are results."""
        return self.noise <= NOISE_LIMIT

    def link(self, transport: str = "gloo") -> Link:
        """Return the link that the slowest pair of `transport` amounts to.

        Raises:
            ConfigError: it was not measured.
        """
        if transport not in self.transports or not self.transports[transport].pairs:
            raise ConfigError(
                "transport", f"one of {', '.join(self.transports)}, with pairs", transport
            )
        curves = [pair.idle for pair in self.transports[transport].pairs]
        return Link(min(min(c.bandwidth for c in curves), 1e15), max(c.latency for c in curves))


def to_json(measurement: NetworkMeasurement) -> str:
    """Return the text of network.json."""
    return messages.encode(measurement) + "\n"


def from_json(text: str, name: str) -> NetworkMeasurement:
    """Return the measurement that `to_json` has written; `name` stands for the file in errors.

    Raises:
        DataError: the text is damaged, of another format, or its values contradict each other.
    """
    try:
        head = messages.decode(text, _Head)
    except ValueError as error:
        raise DataError(
            f"{name}: expected a network that `lockstep bench -o FILE` has written, got {error}"
        ) from None
    if head.format != FORMAT:
        hint = "Measure again: lockstep bench -o FILE."
        raise DataError(f"{name}: expected the format {FORMAT!r}, got {head.format!r}. {hint}")
    try:
        measurement = messages.decode(text, NetworkMeasurement)
        _check(measurement)
    except ValueError as error:
        raise DataError(
            f"{name}: this network is damaged: {error}. Measure again: lockstep bench -o FILE."
        ) from None
    return measurement


class _Head(msgspec.Struct, frozen=True):
    format: str = ""


def _check(measurement: NetworkMeasurement) -> None:
    """Raise ValueError for values that no measurement can have."""
    ranks = sorted(rank for of_host in measurement.hosts for rank in of_host)
    if measurement.workers < 1 or ranks != list(range(measurement.workers)):
        raise ValueError(
            f"expected the ranks 0 to {measurement.workers - 1} on its hosts, got "
            f"{measurement.hosts}"
        )
    if not 0 < measurement.copy_bandwidth < math.inf:
        raise ValueError(f"expected a copy bandwidth above 0, got {measurement.copy_bandwidth}")
    if measurement.cores < 1:
        raise ValueError(f"expected at least one core, got {measurement.cores}")
    for name, transport in measurement.transports.items():
        for collective, curves in transport.collectives.items():
            _check_curve(curves.idle, f"{collective} over {name}")
            if curves.computing is not None:
                _check_curve(curves.computing, f"{collective} over {name} while computing")
        for pair in transport.pairs:
            if not all(0 <= rank < measurement.workers for rank in pair.ranks):
                raise ValueError(
                    f"expected a pair of ranks from 0 to {measurement.workers - 1}, got "
                    f"{pair.ranks}"
                )
            _check_curve(pair.idle, f"messages of {pair.ranks} over {name}")


def _check_curve(curve: Curve, what: str) -> None:
    sizes = curve.sizes
    seconds = curve.seconds
    if not sizes or len(sizes) != len(seconds):
        raise ValueError(
            f"{what}: expected as many sizes as seconds, got {len(sizes)} and {len(seconds)}"
        )
    if any(a >= b for a, b in itertools.pairwise(sizes)) or sizes[0] < 0:
        raise ValueError(f"{what}: expected ascending sizes, got {list(sizes)}")
    if not all(value > 0 for value in seconds):
        raise ValueError(f"{what}: expected seconds above 0, got {list(seconds)}")
    if any(a > b for a, b in itertools.pairwise(seconds)):
        raise ValueError(
            f"{what}: expected seconds that do not fall with the size, got {list(seconds)}"
        )


def read_measurement(path: Path) -> NetworkMeasurement:
    """Read network.json.

    Raises:
        DataError: as `from_json`, or the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise DataError(
            f"{path}: cannot be read: {reason}. `lockstep bench -o {path}` measures a network"
        ) from None
    return from_json(text, str(path))


def write_measurement(path: Path, measurement: NetworkMeasurement) -> None:
    """Write network.json, as a whole or not at all.

    Raises:
        OSError: it could not be written.
    """
    atomic_files.write_text(path, to_json(measurement))


def find_network(text: str, argument: str = "network") -> Link | NetworkMeasurement:
    """Return what a user means by `text`: the file of a measurement, a preset, or a bandwidth and a
    latency.

    Raises:
        ConfigError: it is none of them.
        DataError: the file is damaged.
    """
    if text.endswith(".json") or Path(text).is_file():
        return read_measurement(Path(text))
    try:
        return parse_link(text, argument)
    except ConfigError as error:
        expected = f"the file of a measurement (lockstep bench -o network.json), {LINK_FORM}"
        raise ConfigError(
            argument, expected if error.expected == LINK_FORM else error.expected, text
        ) from None
