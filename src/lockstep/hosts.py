"""Host lists as launchers accept them: ``a:4,b:4`` and host files."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import arguments
from .errors import ConfigError

__all__ = ["Host", "is_loopback", "is_this_host", "parse_hostfile", "parse_hosts", "read_hostfile"]

_ENTRY = re.compile(
    r"(?:(?P<user>\w[\w.-]*)@)?"
    r"(?:\[(?P<v6>[^\]@]+)\]|(?P<name>[A-Za-z0-9](?:[\w.-]*\w)?))"
    r"(?::(?P<slots>[^:]*))?",
    re.ASCII,
)
_FORM = "[user@]host[:slots], an IPv6 address in brackets"


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a list.

    Attributes:
        name: a name or an address, without brackets.
        slots: the most workers to run on it.
        user: the login name for ssh; "" leaves it to ssh's configuration.
    """

    name: str
    slots: int = 1
    user: str = ""

    @property
    def login(self) -> str:
        """The destination for ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(text: str, argument: str = "hosts") -> list[Host]:
    """Parse a list such as ``a:4,user@b,[fe80::1]:2``; a host has one slot by default.

    Args:
        text: entries separated by commas.
        argument: its name in errors.

    Raises:
        ConfigError: an entry is invalid, a host is named twice, or there is no host.
    """
    entries = [(argument, entry.strip()) for entry in text.split(",")]
    return _check_hosts(((where, _parse_entry(entry, where)) for where, entry in entries), argument)


def read_hostfile(path: Path) -> list[Host]:
    """Read the hosts of the host file `path`.

    Raises:
        ConfigError: the file cannot be read; and as `parse_hostfile`.
    """
    try:
        return parse_hostfile(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            "hostfile", "a text file that can be read", found=f"{path}: {reason}"
        ) from None


def parse_hostfile(text: str, source: str = "hostfile") -> list[Host]:
    """Parse the text of a host file, in the format of Open MPI, MPICH and Horovod.

    A line is ``host``, ``host slots=4`` or ``host:4``, each optionally with ``user@``. Empty lines
    and text after a # are ignored, and so is ``max_slots=``: no host gets more workers than it has
    slots.

    Args:
        text: the file's lines.
        source: its name in errors, followed by the line number.

    Raises:
        ConfigError: a line is invalid, a host is named twice, or there is no host.
    """
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    numbered = (
        (f"{source}, line {number}", fields) for number, fields in enumerate(lines, 1) if fields
    )
    return _check_hosts(((where, _parse_line(fields, where)) for where, fields in numbered), source)


def _parse_line(fields: list[str], where: str) -> Host:
    host = _parse_entry(fields[0], where)
    settings = [word.partition("=") for word in fields[1:]]
    slots = [value for key, _, value in settings if key == "slots"]
    unknown = [key for key, _, _ in settings if key not in ("slots", "max_slots", "max-slots")]
    if unknown or len(slots) > 1 or (slots and ":" in fields[0].rpartition("]")[2]):
        raise ConfigError(where, "host slots=4, or host:4", found=" ".join(fields))
    return Host(host.name, _parse_slots(slots[0], where), host.user) if slots else host


def _parse_entry(text: str, where: str) -> Host:
    match = _ENTRY.fullmatch(text)
    if match is None or (match["v6"] and not _is_ipv6(match["v6"])):
        hint = f"Write [{text}] for an IPv6 address." if _is_ipv6(text) else ""
        raise ConfigError(where, _FORM, text, hint)
    slots = 1 if match["slots"] is None else _parse_slots(match["slots"], where)
    name = match["v6"] or arguments.parse_host(where, match["name"], _FORM)
    return Host(name, slots, match["user"] or "")


def _parse_slots(text: str, where: str) -> int:
    return arguments.parse_whole(
        where, text, least=1, most=999_999, expected="a number of slots, at least 1"
    )


def _is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _check_hosts(hosts: Iterable[tuple[str, Host]], source: str) -> list[Host]:
    by_name: dict[str, Host] = {}
    for where, host in hosts:
        if host.name in by_name:
            raise ConfigError(where, "each host once", host.name, "Add up its slots in one entry.")
        by_name[host.name] = host
    if not by_name:
        raise ConfigError(source, "at least one host", found="no host")
    return list(by_name.values())


def is_loopback(host: str) -> bool:
    """Return whether `host` means, on every host, that one itself."""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d+){3}", host))


def is_this_host(host: str) -> bool:
    """Return whether `host` is a name or an address of the host on which this program runs."""
    if is_loopback(host) or host == socket.gethostname():
        return True
    with suppress(OSError):
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
        return any(_is_own_address(str(address)) for address in addresses)
    return False


def _is_own_address(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))  # only an address of this host can be bound
        return True
    return False
