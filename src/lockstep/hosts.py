"""Lists of machines, as launchers are given them: ``a:4,b:4`` and host files."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError

__all__ = ["Host", "parse_hostfile", "parse_hosts", "read_hostfile"]

_ENTRY = re.compile(
    r"(?:(?P<user>\w[\w.-]*)@)?"
    r"(?:\[(?P<v6>[^\]@]+)\]|(?P<name>[A-Za-z0-9](?:[\w.-]*\w)?))"
    r"(?::(?P<slots>[^:]*))?",
    re.ASCII,
)
_FORM = "[user@]host[:slots], an IPv6 address in brackets"


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of a list.

    Attributes:
        name: a name or an address, without brackets.
        slots: how many workers it takes.
        user: whom ssh logs in as there; "" leaves it to ssh's configuration.
    """

    name: str
    slots: int = 1
    user: str = ""

    @property
    def login(self) -> str:
        """What ssh is told to connect to."""
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(text: str, argument: str = "hosts") -> list[Host]:
    """The machines of ``a:4,user@b,[fe80::1]:2``; one without a number of slots takes one worker.

    Args:
        text: entries with commas between them.
        argument: what errors call it.

    Raises:
        ConfigError: for an entry that cannot be read, a machine named twice, or no machine at all.
    """
    entries = [(argument, entry.strip()) for entry in text.split(",")]
    return _distinct(((where, _parse_entry(entry, where)) for where, entry in entries), argument)


def read_hostfile(path: Path) -> list[Host]:
    """The machines of the host file `path`.

    Raises:
        ConfigError: when it cannot be read; and as `parse_hostfile`.
    """
    try:
        return parse_hostfile(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError("hostfile", "a text file that can be read", found=f"{path}: {reason}") from None


def parse_hostfile(text: str, source: str = "hostfile") -> list[Host]:
    """The machines of a host file, as Open MPI, MPICH and Horovod write it.

    A line is ``host``, ``host slots=4`` or ``host:4``, each perhaps with ``user@``. Empty lines and what follows a #
    are left out, and so is ``max_slots=``: no machine gets more workers than it has slots.

    Args:
        text: the file's lines.
        source: what errors call it, followed by the number of the line.

    Raises:
        ConfigError: for a line that cannot be read, a machine named twice, or no machine at all.
    """
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    found = ((f"{source}, line {number}", words) for number, words in enumerate(lines, 1) if words)
    return _distinct(((where, _parse_line(words, where)) for where, words in found), source)


def _parse_line(words: list[str], where: str) -> Host:
    host, settings = _parse_entry(words[0], where), [word.partition("=") for word in words[1:]]
    given = [value for key, _, value in settings if key == "slots"]
    unknown = [key for key, _, _ in settings if key not in ("slots", "max_slots", "max-slots")]
    if unknown or len(given) > 1 or (given and ":" in words[0].rpartition("]")[2]):
        raise ConfigError(where, "host slots=4, or host:4", found=" ".join(words))
    return Host(host.name, _parse_slots(given[0], where), host.user) if given else host


def _parse_entry(text: str, where: str) -> Host:
    found = _ENTRY.fullmatch(text)
    if found is None or (found["v6"] and not _is_ipv6(found["v6"])):
        hint = f"Write [{text}] for an IPv6 address." if _is_ipv6(text) else ""
        raise ConfigError(where, _FORM, text, hint)
    slots = 1 if found["slots"] is None else _parse_slots(found["slots"], where)
    return Host(found["v6"] or found["name"], slots, found["user"] or "")


def _parse_slots(text: str, where: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
        raise ConfigError(where, "a number of slots, at least 1", text)
    return int(text)


def _is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _distinct(hosts: Iterable[tuple[str, Host]], source: str) -> list[Host]:
    found = list(_refuse_twice(hosts))
    if not found:
        raise ConfigError(source, "at least one machine", found="no machine")
    return found


def _refuse_twice(hosts: Iterable[tuple[str, Host]]) -> Iterator[Host]:
    seen: set[str] = set()
    for where, host in hosts:
        if host.name in seen:
            raise ConfigError(where, "each machine once", host.name, "Give it as many slots as it has in all.")
        seen.add(host.name)
        yield host
