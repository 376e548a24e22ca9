"""Processes of this host: their status, liveness of the ranks' processes, and the end of orphans of
a run.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

UNKNOWN_EXIT_CODE = 256
"""Stands for the exit code of a process that has ended, when nobody is left who could tell it; no
process has it.
"""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; "signal 35" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# psutil is imported where it is used, as that takes longer than to import all of this package that
# a command needs. It is not used for the status: psutil gives the start time as seconds since the
# epoch, which differ when the clock has been set, so that they do not identify a process; and a
# rank checks the status of every other one twice a second, for which one file is read here and two
# there.


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The status of a process, from /proc/PID/stat.

    Attributes:
        state: the letter that ps shows: R, S, D, T (stopped by a signal), t (by a debugger), Z
            (zombie), …
        parent: PID of the parent.
        started: start time in clock ticks after boot, which together with the PID identifies the
            process.
    """

    state: str
    parent: int
    started: int


def read_status(pid: int) -> ProcessStatus | None:
    """Return the status of a process; None if there is none, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # the fields after the name, which may contain spaces
        fields = text.rpartition(")")[2].split()
        return ProcessStatus(fields[0], int(fields[1]), int(fields[19]))
    except (OSError, IndexError):
        return None


def is_alive(pid: int, any_user: bool = True) -> bool:
    """Return whether there is such a process, a zombie included; with `any_user` False, only one of
    this user.

    If a PID was this user's and is another's now, its process has ended and the PID was reused.
    """
    if pid <= 0:  # kill(2) would address a process group
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return any_user
    return True


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if there is none, or it is not known."""
    import psutil

    with suppress(psutil.Error, OSError, ValueError):  # ValueError: the PID is negative
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def has_variables(pid: int, variables: Mapping[str, str]) -> bool:
    """Return whether a process was started with `variables`; False for a process of another user,
    or if there is none.

    Args:
        pid: of the process.
        variables: of its environment, some or all.
    """
    import psutil

    try:
        environment = psutil.Process(pid).environ()
    except (psutil.Error, OSError, ValueError):
        return False
    return all(environment.get(name) == value for name, value in variables.items())


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; one that a debugger has stopped (state t) is
    not.
    """
    status = read_status(pid)
    return status is not None and status.state == "T"


class ProcessLiveness:
    """Detects the end of processes of this host; any thread may call it.

    A pidfd reports the end of exactly that process, also as a zombie, whichever process gets its
    PID next (Linux 5.3). Without pidfds, or descriptors for them, it checks whether the PIDs exist.

    Args:
        pids: rank → PID.

    Attributes:
        gone: the ranks whose processes had ended at the last `poll`.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)
        self.gone: set[int] = set()
        self._descriptors: dict[int, int] = {}
        # no descriptor is closed, and its number reused, while it is polled
        self._lock = threading.Lock()
        for rank, pid in pids.items():
            try:
                self._descriptors[os.pidfd_open(pid)] = rank
            except ProcessLookupError:
                self.gone.add(rank)
            # an old kernel, no descriptor left, or another system
            except (OSError, AttributeError):
                continue

    def poll(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        with self._lock:
            poller = select.poll()
            for descriptor in self._descriptors:
                poller.register(descriptor, select.POLLIN)
            for descriptor, _ in poller.poll(0):
                self.gone.add(self._descriptors.pop(descriptor))
                os.close(descriptor)
            watched = {*self._descriptors.values(), *self.gone}
            if len(watched) < len(self._pids):
                self.gone |= {
                    rank
                    for rank, pid in self._pids.items()
                    if rank not in watched and not is_alive(pid)
                }
            return set(self.gone)

    def is_stopped(self, rank: int) -> bool:
        """Return whether the process of `rank` is stopped by a signal, and not by a debugger."""
        return rank in self._pids and is_stopped(self._pids[rank])

    def status(self, rank: int) -> ProcessStatus | None:
        """Return the status of the process of `rank`; None if there is none, or no /proc."""
        return read_status(self._pids[rank]) if rank in self._pids else None

    def close(self) -> None:
        """Close the pidfds."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[0])


TERM_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL: enough to remove a temporary file or close a connection, not
to finish work.
"""

# in which children that notice the end of their worker, such as loader processes, exit by
# themselves
_EXIT_S = 0.2
_POLL_S = 0.02  # processes of others cannot be waited for
_MAX_NAMES = 8  # in the message


def end_orphans(
    run_id: str, keep_children: bool, keep: Collection[int] = (), term_grace_s: float = TERM_GRACE_S
) -> str:
    """End every process of this user, except this one, whose environment has this LOCKSTEP_RUN_ID.

    They get SIGTERM, and those that remain after `term_grace_s` seconds SIGKILL.

    Args:
        run_id: of the run.
        keep_children: keep children of this process: a launcher's are the fork server and the
            resource tracker.
        keep: other processes to keep.
        term_grace_s: see above.

    Returns:
        The processes that were ended, as ``123 sleep, 124 python (killed)``; "" if there were none.
    """

    def remaining() -> dict[int, str]:
        return {
            pid: name for pid, name in _find_by_run_id(run_id, keep_children) if pid not in keep
        }

    if not _wait_for_exit(remaining, _EXIT_S):
        return ""
    ended: dict[int, str] = {}

    def terminate() -> dict[int, str]:
        processes = remaining()
        for pid in processes.keys() - ended.keys():  # also those started meanwhile
            _send(pid, signal.SIGTERM)
        ended.update(processes)
        return processes

    killed = _wait_for_exit(terminate, term_grace_s)
    for pid in killed:
        _send(pid, signal.SIGKILL)
    names = [
        f"{pid} {name}{' (killed)' if pid in killed else ''}" for pid, name in sorted(ended.items())
    ]
    more = [f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return ", ".join([*names[:_MAX_NAMES], *more])


def _wait_for_exit(poll: Callable[[], dict[int, str]], seconds: float) -> dict[int, str]:
    """Wait until `poll` returns no processes, for at most so many seconds; return the remaining
    ones.
    """
    deadline = time.monotonic() + seconds
    while (remaining := poll()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return remaining


def _send(pid: int, number: int) -> None:
    with suppress(OSError):  # it has ended
        os.kill(pid, number)


def _find_by_run_id(run_id: str, keep_children: bool) -> Iterator[tuple[int, str]]:
    """Yield the PIDs and names of the processes of the run, without this one, and without its
    children if these are kept.
    """
    import psutil

    for pid in _pids():
        if has_variables(pid, {"LOCKSTEP_RUN_ID": run_id}):
            with suppress(psutil.Error, OSError):  # it has ended
                process = psutil.Process(pid)
                parent = process.ppid() if keep_children else pid
                # multiprocessing's resource tracker exits by itself
                is_tracker = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
                if not is_tracker and os.getpid() not in (pid, parent):
                    yield pid, process.name()


def _pids() -> list[int]:
    import psutil

    try:
        return list(psutil.pids())
    except (psutil.Error, OSError):  # without /proc only the workers' own process groups are ended
        return []
