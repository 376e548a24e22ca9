"""A link between hosts, its bandwidth and latency, and networks by name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .. import arguments
from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two hosts, alike in both directions, which do not disturb each other (full
    duplex).

    Attributes:
        bandwidth: bytes per second in each direction, of what programs send (goodput).
        latency: seconds from the moment in which a program sends a byte to the one in which the
            other has it.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        expected = "a number of bytes per second above 0"
        arguments.number("bandwidth", self.bandwidth, above=0, finite=True, expected=expected)
        arguments.number(
            "latency", self.latency, least=0, finite=True, expected="a number of seconds, 0 or more"
        )

    def seconds(self, size: float) -> float:
        """Return how long a message of `size` bytes takes on an idle link."""
        return self.latency + size / self.bandwidth

    def slower(self, factor: float) -> Link:
        """Return a link on which everything takes `factor` times as long."""
        return Link(self.bandwidth / factor, self.latency * factor)

    def __str__(self) -> str:
        bits = 8 * self.bandwidth
        unit, name = next(
            (scale for scale in ((1e9, "Gbit"), (1e6, "Mbit")) if bits >= scale[0]), (1e3, "kbit")
        )
        return f"{bits / unit:.4g}{name},{1e6 * self.latency:.4g}us"


@dataclass(frozen=True, slots=True)
class Preset:
    """A network known by name.

    Attributes:
        link: what a program sees of it.
        source: where bandwidth and latency come from.
    """

    link: Link
    source: str


_FRAMES = 1448 / 1538
"""Payload of TCP in a full Ethernet frame of 1,500 bytes, to what occupies the wire: preamble,
header, checksum, gap (IEEE 802.3), and the headers of IPv4 and of TCP with time stamps (RFC 791,
RFC 9293, RFC 7323)."""


def _ethernet(gigabits: float, microseconds: float, latency_source: str) -> Preset:
    source = (
        f"{gigabits:g} Gbit/s (IEEE 802.3), of which TCP's payload is 94.1 %; latency assumed: "
        f"{latency_source}"
    )
    return Preset(Link(gigabits * 1e9 / 8 * _FRAMES, microseconds * 1e-6), source)


def _infiniband(gigabits: float, microseconds: float) -> Preset:
    source = (
        f"{gigabits:g} Gbit/s of data over 4 lanes (InfiniBand Trade Association); latency "
        "assumed: RDMA"
    )
    return Preset(Link(gigabits * 1e9 / 8, microseconds * 1e-6), source)


PRESETS = {
    "1gbe": _ethernet(1, 100, "TCP through both kernels, interrupt moderation, one switch"),
    "10gbe": _ethernet(10, 50, "TCP through both kernels, one switch"),
    "25gbe": _ethernet(25, 40, "TCP through both kernels, one switch"),
    "40gbe": _ethernet(40, 40, "TCP through both kernels, one switch"),
    "100gbe": _ethernet(100, 30, "TCP through both kernels, one switch"),
    "infiniband-hdr": _infiniband(200, 3),
    "infiniband-ndr": _infiniband(400, 3),
    "internet": Preset(Link(12.5e6, 20e-3), "100 Mbit/s, 20 ms: assumed, two sites of one country"),
}
"""Networks by name. Bandwidths are those of standards; latencies are assumptions: measure with
`lockstep bench`.
"""

LINK_FORM = "a bandwidth and a latency such as 25Gbit,50us, or one of " + ", ".join(PRESETS)

_QUANTITY = re.compile(
    r"(?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*(?P<unit>[a-zµμ/]*)", re.IGNORECASE
)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {
    "bit": 1.0,
    "kbit": 1e3,
    "mbit": 1e6,
    "gbit": 1e9,
    "tbit": 1e12,
    "mbps": 1e6,
    "gbps": 1e9,
    "kbps": 1e3,
}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}


def parse_link(text: str, argument: str = "network") -> Link:
    """Return the link that `text` describes: ``25Gbit,50us``, or a name in `PRESETS`.

    Bits are decimal as network cards are sold: 1 Gbit is 125,000,000 bytes per second; ``GB`` and
    ``GiB`` are bytes. Without a latency it is 0.

    Args:
        text: of the user.
        argument: its name in errors.

    Raises:
        ConfigError: it is neither, or a bandwidth of 0.
    """
    text = text.strip()
    if text.lower() in PRESETS:
        return PRESETS[text.lower()].link
    bandwidth = None
    latency = None
    for part in text.split(","):
        kind, value = quantity(part)
        if kind == "bandwidth" and bandwidth is None:
            bandwidth = value
        elif kind == "latency" and latency is None:
            latency = value
        else:
            raise ConfigError(argument, LINK_FORM, text)
    if bandwidth is None:
        raise ConfigError(
            argument, LINK_FORM, text, f"The bandwidth is missing: {text},10Gbit" if latency else ""
        )
    if not 0 < bandwidth < math.inf:
        raise ConfigError(argument, "a bandwidth above 0", text)
    return Link(bandwidth, latency or 0.0)


def quantity(text: str) -> tuple[str, float]:
    """Return "bandwidth" and bytes per second, "latency" and seconds, or "" and 0 for anything
    else.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        return "", 0.0
    number = float(match["number"])
    unit = match["unit"]
    if unit in _SECONDS:
        return "latency", number * _SECONDS[unit]
    unit = unit.lower().removesuffix("/s")
    if unit in _BITS:
        return "bandwidth", number * _BITS[unit] / 8
    if unit in _BYTES:
        return "bandwidth", number * _BYTES[unit]
    return "", 0.0
