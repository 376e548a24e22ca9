"""Asks a user's program which machines there are."""

from __future__ import annotations

import shlex
import subprocess
import time
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..hosts import Host, parse_hosts

__all__ = ["Discovery"]

_EVERY_S = 1.0
_ARGUMENT = "host_discovery_script"


@dataclass(frozen=True)
class Discovery:
    """A program that prints a line ``host:slots`` for each machine, and what is wanted of it.

    Attributes:
        command: its path, perhaps with arguments.
        needed: slots to wait for.
        slots: of a machine that is printed without a number.
        timeout: seconds to wait for so many.
    """

    command: str
    needed: int = 1
    slots: int = 1
    timeout: float = 600.0

    def find(self) -> list[Host]:
        """The machines, in the order in which they have been seen first, once they have enough slots.

        Raises:
            ConfigError: when the program cannot be run, prints something else, or time has run out.
        """
        deadline = time.monotonic() + self.timeout
        seen: dict[str, Host] = {}
        while True:
            now = {host.name: host for host in self._ask()}
            seen = {name: now[name] for name in (*seen, *now) if name in now}
            count = sum(host.slots for host in seen.values())
            if count >= self.needed:
                return list(seen.values())
            if time.monotonic() > deadline:
                names = ", ".join(f"{host.name}:{host.slots}" for host in seen.values()) or "no machine"
                expected = f"{self.needed} slots within {self.timeout:g} s"
                raise ConfigError(_ARGUMENT, expected, found=f"{count}: {names}")
            time.sleep(_EVERY_S)

    def _ask(self) -> list[Host]:
        expected = "a program that prints a line `host:slots` for each machine"
        try:
            words = shlex.split(self.command)
            said = subprocess.run(words, capture_output=True, text=True, timeout=max(self.timeout, _EVERY_S))
        except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
            raise ConfigError(_ARGUMENT, expected, found=f"{self.command}: {error}") from None
        if said.returncode != 0:
            got = f"exit code {said.returncode}: {said.stderr.strip()[-500:]}"
            raise ConfigError(_ARGUMENT, expected, found=f"{self.command}: {got}")
        lines = [line.strip() for line in said.stdout.splitlines() if line.strip()]
        return [self._host(line) for line in lines]

    def _host(self, line: str) -> Host:
        (host,) = parse_hosts(line, _ARGUMENT) if "," not in line else (None,)
        if host is None:
            raise ConfigError(_ARGUMENT, "one machine a line", line)
        has_slots = ":" in line.rpartition("]")[2]
        return host if has_slots else replace(host, slots=self.slots)
