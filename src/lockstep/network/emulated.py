"""An emulated network as users describe it: hosts, the links between them, and what disturbs
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from .. import arguments
from ..errors import ConfigError
from .presets import PRESETS, Link, parse_link, quantity

AUTO_DILATION = 0.0
"""The value of `VirtualNetwork.dilation` for ``auto``."""

ROOM = 2.0
"""How much time an automatic dilation gives to each worker's computing: half of it is for the
threads that move messages, which each host of a real cluster runs beside it."""

MAX_HOSTS = 120


@dataclass(frozen=True, slots=True)
class Cut:
    """A link between two hosts that is lost for good.

    Attributes:
        hosts: their numbers, from 0.
        after: seconds from the start of the job.
    """

    hosts: tuple[int, int]
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class VirtualNetwork:
    """Hosts of an emulated network; each has one network card, and all are connected by one switch
    that never blocks.

    Attributes:
        hosts: their number.
        link: between a host and any other.
        jitter: seconds; each message takes up to so much longer, drawn evenly.
        slow: host → how many times slower its network card is.
        cuts: the links that are lost.
        dilation: how many times slower than real time everything runs (time dilation);
            `AUTO_DILATION` for twice the workers per core.
        seed: of the jitter.
    """

    hosts: int
    link: Link
    jitter: float = 0.0
    slow: tuple[tuple[int, float], ...] = ()
    cuts: tuple[Cut, ...] = ()
    dilation: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        arguments.whole("hosts", self.hosts, least=1, most=MAX_HOSTS)
        arguments.number(
            "jitter", self.jitter, least=0, finite=True, expected="a number of seconds, 0 or more"
        )
        if self.dilation != AUTO_DILATION:
            expected = "a number from 1 to 10000, or auto"
            arguments.number("dilation", self.dilation, least=1, most=10_000, expected=expected)
        for host, factor in self.slow:
            arguments.whole("host", host, least=0, most=self.hosts - 1)
            arguments.number(
                "slow host", factor, least=1, most=10_000, expected="a factor from 1 to 10000"
            )
        for cut in self.cuts:
            for host in cut.hosts:
                arguments.whole("host", host, least=0, most=self.hosts - 1)
            if cut.hosts[0] == cut.hosts[1] or not 0 <= cut.after < math.inf:
                raise ConfigError(
                    "cut", "two different hosts and a number of seconds, 0 or more", cut
                )

    def card(self, host: int) -> Link:
        """Return the network card of `host`, as fast as it is emulated: dilated, and slower if it
        is a slow host.

        Raises:
            ConfigError: the dilation is not known yet; see `resolved`.
        """
        if self.dilation == AUTO_DILATION:
            raise ConfigError("dilation", "a number; `resolved` replaces auto", found="auto")
        return self.link.slower(dict(self.slow).get(host, 1.0) * self.dilation)

    def resolved(self, workers: int, cores: int) -> VirtualNetwork:
        """Return the network with the dilation that `workers` on `cores` need, if it is auto."""
        return (
            replace(self, dilation=max(1.0, ROOM * workers / cores))
            if self.dilation == AUTO_DILATION
            else self
        )

    def host_of(self, rank: int, workers: int) -> int:
        """Return the host of `rank`: ranks are dealt out in blocks, as a launcher does, the first
        hosts first.
        """
        small, larger = divmod(workers, self.hosts)
        on_larger = larger * (small + 1)
        return (
            rank // (small + 1)
            if rank < on_larger
            else larger + (rank - on_larger) // max(1, small)
        )

    def place_of(self, rank: int, workers: int) -> tuple[int, int]:
        """Return the local rank of `rank` on its host, and the number of workers there."""
        host = self.host_of(rank, workers)
        members = [member for member in range(workers) if self.host_of(member, workers) == host]
        return members.index(rank), len(members)

    def __str__(self) -> str:
        parts = [
            f"{self.hosts} host{'s'[: self.hosts != 1]}",
            f"{8e-6 * self.link.bandwidth:.12g}Mbit",
        ]
        parts.append(f"{1e6 * self.link.latency:.12g}us")
        parts += [f"jitter {1e6 * self.jitter:.9g}us"] * bool(self.jitter)
        parts += [f"slow host {host} {factor:.9g}x" for host, factor in self.slow]
        parts += [f"cut {cut.hosts[0]}-{cut.hosts[1]} after {cut.after:.9g}s" for cut in self.cuts]
        if self.dilation != 1:
            parts.append(
                "dilation auto"
                if self.dilation == AUTO_DILATION
                else f"dilation {self.dilation:.9g}"
            )
        parts += [f"seed {self.seed}"] * bool(self.seed)
        return ", ".join(parts)


NETWORK_FORM = (
    'hosts, a bandwidth and a latency such as "4 hosts, 25Gbit, 50us", which may be followed by '
    '"jitter 10us", "slow host 3 4x", "cut 0-2 after 30s", "dilation auto" or "dilation 2", "seed '
    '1"'
)

_HOSTS = re.compile(r"(\d{1,9})\s*hosts?", re.IGNORECASE)
_JITTER = re.compile(r"jitter\s+(.+)", re.IGNORECASE)
_SLOW = re.compile(r"slow\s+host\s+(\d{1,9})\s+(\d+(?:\.\d+)?)\s*x", re.IGNORECASE)
_CUT = re.compile(r"cut\s+(\d{1,9})\s*-\s*(\d{1,9})(?:\s+after\s+(.+))?", re.IGNORECASE)
_DILATION = re.compile(r"dilation\s+(auto|\d+(?:\.\d+)?)", re.IGNORECASE)
_SEED = re.compile(r"seed\s+(\d{1,18})", re.IGNORECASE)


def parse_network(text: str, argument: str = "network") -> VirtualNetwork:
    """Return the emulated network that `text` describes, such as ``4 hosts, 25Gbit, 50us, jitter
    10us``.

    Args:
        text: of the user; parts in any order, separated by commas.
        argument: its name in errors.

    Raises:
        ConfigError: a part is not understood or out of range, or hosts or bandwidth are missing.
    """
    parts = _Parts(argument, text)
    for part in text.split(","):
        parts.read(part.strip())
    return parts.network()


class _Parts:
    """The parts of a description that have been read."""

    def __init__(self, argument: str, text: str) -> None:
        self._argument = argument
        self._text = text
        self._link: list[str] = []
        self._values: dict[str, object] = {}
        self._slow: list[tuple[int, float]] = []
        self._cuts: list[Cut] = []

    def read(self, part: str) -> None:
        readers: tuple[tuple[re.Pattern[str], Callable[..., None]], ...] = (
            (_HOSTS, lambda count: self._set("hosts", int(count))),
            (_JITTER, lambda time: self._set("jitter", self._seconds(time))),
            (_SLOW, lambda host, factor: self._slow.append((int(host), float(factor)))),
            (
                _CUT,
                lambda a, b, time: self._cuts.append(
                    Cut((int(a), int(b)), self._seconds(time) if time else 0.0)
                ),
            ),
            (
                _DILATION,
                lambda value: self._set(
                    "dilation", AUTO_DILATION if value.lower() == "auto" else float(value)
                ),
            ),
            (_SEED, lambda value: self._set("seed", int(value))),
        )
        for pattern, read in readers:
            if (match := pattern.fullmatch(part)) is not None:
                read(*match.groups())
                return
        if part.lower() not in PRESETS and not quantity(part)[0]:
            raise ConfigError(self._argument, NETWORK_FORM, part)
        self._link.append(part)

    def _set(self, name: str, value: object) -> None:
        if name in self._values:
            raise ConfigError(self._argument, f"{name} once", self._text)
        self._values[name] = value

    def _seconds(self, text: str) -> float:
        kind, value = quantity(text)
        if kind != "latency":
            raise ConfigError(self._argument, "a time such as 10us or 30s", text)
        return value

    def network(self) -> VirtualNetwork:
        if "hosts" not in self._values or not self._link:
            raise ConfigError(self._argument, NETWORK_FORM, self._text)
        link = parse_link(",".join(self._link), self._argument)
        values: dict[str, object] = {
            **self._values,
            "slow": tuple(self._slow),
            "cuts": tuple(self._cuts),
        }
        try:
            return VirtualNetwork(link=link, **values)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(
                self._argument, f"{error.argument}: {error.expected}", error.got
            ) from None
