"""Host discovery scripts of Horovod's elastic jobs: which hosts there are, at the start and while a
job runs.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from ..errors import ConfigError, LockstepError
from ..hosts import Host, is_this_host, parse_hosts

_RETRY_S = 1.0  # as in Horovod
_ARGUMENT = "host_discovery_script"


@dataclass(frozen=True)
class Discovery:
    """A host discovery script, which prints a line ``host:slots`` per host, and the number of slots
    to wait for.

    Attributes:
        command: its path, optionally with arguments.
        needed: number of slots to wait for.
        slots: the slots of a host that is printed without a number.
        timeout: seconds to wait for `needed` slots.
    """

    command: str
    needed: int = 1
    slots: int = 1
    timeout: float = 600.0

    def find(self) -> list[Host]:
        """Run the script until the hosts have enough slots, and return them in the order of their
        first appearance.

        Raises:
            ConfigError: the script cannot be run, prints anything else, or the time has run out.
        """
        deadline = time.monotonic() + self.timeout
        hosts: dict[str, Host] = {}
        while True:
            printed = {host.name: host for host in self.run_script()}
            hosts = {name: printed[name] for name in (*hosts, *printed) if name in printed}
            count = sum(host.slots for host in hosts.values())
            if count >= self.needed:
                return list(hosts.values())
            if time.monotonic() > deadline:
                names = (
                    ", ".join(f"{host.name}:{host.slots}" for host in hosts.values()) or "no host"
                )
                expected = f"{self.needed} slots within {self.timeout:g} s"
                raise ConfigError(_ARGUMENT, expected, found=f"{count}: {names}")
            time.sleep(_RETRY_S)

    def run_script(self) -> list[Host]:
        """Run the script once, and return what it prints.

        Raises:
            ConfigError: the script cannot be run, or prints anything else.
        """
        expected = "a program that prints a line `host:slots` for each host"
        try:
            words = shlex.split(self.command)
            result = subprocess.run(
                words, capture_output=True, text=True, timeout=max(self.timeout, _RETRY_S)
            )
        except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
            raise ConfigError(_ARGUMENT, expected, found=f"{self.command}: {error}") from None
        if result.returncode != 0:
            got = f"exit code {result.returncode}: {result.stderr.strip()[-500:]}"
            raise ConfigError(_ARGUMENT, expected, found=f"{self.command}: {got}")
        lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
        return [self._parse_line(line) for line in lines]

    def _parse_line(self, line: str) -> Host:
        if "," in line:
            raise ConfigError(_ARGUMENT, "one host per line", line)
        (host,) = parse_hosts(line, _ARGUMENT)
        has_slots = ":" in line.rpartition("]")[2]
        return host if has_slots else replace(host, slots=self.slots)


class Follower:
    """Runs the script once a second, as long as it is entered.

    Args:
        discovery: of the hosts.
        hosts: those at the start.
        changed: called, in another thread, with the hosts when they are not those of the last call.
        log: prints a line.

    Attributes:
        hosts: the newest ones.
    """

    def __init__(
        self,
        discovery: Discovery,
        hosts: Sequence[Host],
        changed: Callable[[Sequence[Host]], object],
        log: Callable[[str], None],
    ) -> None:
        self.hosts = list(hosts)
        self._discovery = discovery
        self._changed = changed
        self._log = log
        self._last_problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="lockstep host discovery", daemon=True
        )

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(_RETRY_S)  # a script that hangs does not keep the job

    def _run(self) -> None:
        while not self._stop.wait(_RETRY_S):
            self.check()

    def check(self) -> None:
        """Run the script, and tell of the hosts if they have changed."""
        try:
            hosts = self._discovery.run_script()
            if hosts != self.hosts:
                self._changed(hosts)
                self.hosts = hosts
            self._last_problem = ""
        except LockstepError as error:  # the next run may succeed
            if str(error) != self._last_problem and not self._stop.is_set():
                self._last_problem = str(error)
                self._log(f"the hosts are not changed: {error}")


def _resize_own_job(workers: int) -> str:
    from ..elastic.control import request
    from ..flight_recorder import jobs

    for job in jobs.find_jobs().values():
        if job.pid == os.getpid() and job.control:
            return request(job.control, "resize", workers)
    raise LockstepError("the job is not running yet")


@dataclass
class OwnJob:
    """The elastic job that this process has started on this host alone.

    Attributes:
        workers: that it shall have.
        least, most: the limits of their number.
        resize: changes their number.
    """

    workers: int
    least: int
    most: int
    resize: Callable[[int], object] = _resize_own_job

    def follow(self, hosts: Sequence[Host]) -> None:
        """Change the number of workers to that of the slots.

        Raises:
            ConfigError: there are other hosts.
            LockstepError: the job does not run yet, or cannot have so many workers.
        """
        if not all(is_this_host(host.name) for host in hosts):
            expected = (
                "localhost only, as the job was started on a host of this name, by which others "
                "do not reach it"
            )
            raise ConfigError(_ARGUMENT, expected, found=", ".join(host.name for host in hosts))
        workers = max(self.least, min(sum(host.slots for host in hosts), self.most))
        if workers != self.workers:
            self.resize(workers)
            self.workers = workers
