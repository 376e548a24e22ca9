"""Host discovery scripts of Horovod's elastic jobs: which hosts there are, at the start and while a job runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType

from ..errors import ConfigError, LockstepError
from ..hosts import Host, is_this_host, parse_hosts

__all__ = ["Discovery", "Follower", "resize_own_job"]

_RETRY_S = 1.0  # as in Horovod
_ARGUMENT = "host_discovery_script"


@dataclass(frozen=True)
class Discovery:
    """A host discovery script, which prints a line ``host:slots`` per host, and the number of slots to wait for.

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
        """Run the script until the hosts have enough slots, and return them in the order of their first appearance.

        Raises:
            ConfigError: the script cannot be run, prints anything else, or the time has run out.
        """
        deadline = time.monotonic() + self.timeout
        hosts: dict[str, Host] = {}
        while True:
            printed = {host.name: host for host in self._run_script()}
            hosts = {name: printed[name] for name in (*hosts, *printed) if name in printed}
            count = sum(host.slots for host in hosts.values())
            if count >= self.needed:
                return list(hosts.values())
            if time.monotonic() > deadline:
                names = ", ".join(f"{host.name}:{host.slots}" for host in hosts.values()) or "no host"
                expected = f"{self.needed} slots within {self.timeout:g} s"
                raise ConfigError(_ARGUMENT, expected, found=f"{count}: {names}")
            time.sleep(_RETRY_S)

    def _run_script(self) -> list[Host]:
        expected = "a program that prints a line `host:slots` for each host"
        try:
            words = shlex.split(self.command)
            result = subprocess.run(words, capture_output=True, text=True, timeout=max(self.timeout, _RETRY_S))
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

    def count(self) -> int:
        """Run the script once, and return the slots of this host.

        Raises:
            ConfigError: as `find`, and for another host.
        """
        hosts = self._run_script()
        if not all(is_this_host(host.name) for host in hosts):
            expected = "localhost only, as the workers of this job were started here"
            raise ConfigError(_ARGUMENT, expected, found=", ".join(host.name for host in hosts))
        return sum(host.slots for host in hosts)


# --- While the job runs -----------------------------------------------------------------------------------------------


class Follower:
    """Runs the script once a second, and changes the number of workers to that of the slots; a context.

    Args:
        discovery: of the hosts.
        workers: the number of workers at the start.
        limits: the smallest and the largest number of workers.
        resize: changes the number of workers of the running job.
        log: prints a line.
    """

    def __init__(
        self,
        discovery: Discovery,
        workers: int,
        limits: tuple[int, int],
        resize: Callable[[int], object],
        log: Callable[[str], None],
    ) -> None:
        self._discovery, self._workers, self._limits = discovery, workers, limits
        self._resize, self._log, self._last_problem = resize, log, ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep host discovery", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_RETRY_S)  # a script that hangs does not keep the job

    def _run(self) -> None:
        while not self._stop.wait(_RETRY_S):
            self.check()

    def check(self) -> None:
        """Run the script, and change the number of workers if there are other slots than before."""
        try:
            least, most = self._limits
            workers = max(least, min(self._discovery.count(), most))
            if workers != self._workers:
                self._resize(workers)
                self._workers = workers
            self._last_problem = ""
        except LockstepError as error:  # the next run may succeed
            if str(error) != self._last_problem and not self._stop.is_set():
                self._last_problem = str(error)
                self._log(f"the number of workers is not changed: {error}")


def resize_own_job(workers: int) -> str:
    """Change the number of workers of the elastic job that this process has started.

    Raises:
        LockstepError: it is not running, or cannot have so many.
    """
    from ..elastic.control import request
    from ..watchdog import jobs

    for job in jobs.find_jobs().values():
        if job.pid == os.getpid() and job.control:
            return request(job.control, "resize", workers)
    raise LockstepError("the job is not running yet")
