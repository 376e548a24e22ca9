"""The network interfaces, and whether this machine knows its own name."""

from __future__ import annotations

import socket
import struct
import sys
import time
from pathlib import Path

from .report import Problem, Section

__all__ = ["examine_network"]

_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
_SLOW_S = 1.0  # a name that is in /etc/hosts is found in a millisecond; a lost answer of a name server costs 5 s

_MOST = 8  # a machine with many containers has an interface for each


def examine_network() -> Section:
    """The interfaces that are up, with address and speed; and the host's name, which Gloo looks up."""
    section = Section("network")
    found = [(name, _describe(name)) for _, name in socket.if_nameindex() if name != "lo"]
    for name, text in [(name, text) for name, text in found if text][:_MOST]:
        section.add(name, text)
    _add_name(section)
    return section


def _describe(name: str) -> str:
    folder, address = Path("/sys/class/net", name), _address(name)
    if not address or _first_line(folder / "operstate") == "down":
        return ""
    speed = _first_line(folder / "speed")
    return address + (f", {int(speed) / 1000:g} Gb/s" if speed.isdecimal() else "")


def _address(name: str) -> str:
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _add_name(section: Section) -> None:
    name, begin = socket.gethostname(), time.monotonic()
    fix = f"Add a line with this machine's address and {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface."
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except (OSError, UnicodeError):
        section.add("name", f"{name} (unknown here)", Problem(f"this machine cannot look up its own name, {name}", fix))
        return
    seconds = time.monotonic() - begin
    slow = (
        Problem(f"looking up this machine's own name, {name}, takes {seconds:.1f} s", fix)
        if seconds > _SLOW_S
        else None
    )
    section.add("name", f"{name} is {address}", slow)


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
