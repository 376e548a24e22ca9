"""The stall inspector: ends every wait, finds ranks that are lost, and reports those that have not
submitted.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import distributed_c10d as c10d

from lockstep import Communicator, arguments
from lockstep.environment import debug_rank, variables
from lockstep.errors import (
    LockstepError,
    MembershipChangedError,
    RankLostError,
    StallError,
    TransportError,
    ranks_in_words,
)
from lockstep.stores import get_available
from lockstep.system.processes import ProcessLiveness
from lockstep.transports.runtime.host_identity import host_key
from lockstep.watchdog.delivery import is_transport_error

from .request import JOIN_KEY, KEY_BYTES, Request

__all__ = [
    "HostPeers",
    "StallInspector",
    "StallLimits",
    "StalledOps",
    "StatusBoard",
    "group_stalled",
]


# --- Ranks of this host
# -----------------------------------------------------------------------------------------------

# A process counts as ended or stopped after so many checks in a row: this one may have been stopped
# itself until now.
_ENDED_CHECKS = 3
_STOPPED_CHECKS = 10


class HostPeers:
    """The liveness of the other ranks of this host. No descriptors are kept open between waits.

    Args:
        comm: the ranks; each of them creates its instance at the same time.
    """

    def __init__(self, comm: Communicator) -> None:
        own_host = host_key()
        processes: list[tuple[str, int]] = comm.allgather_object((own_host, os.getpid()))
        self._pids = {
            rank: pid
            for rank, (host, pid) in enumerate(processes)
            if host == own_host and rank != comm.rank
        }
        self._liveness: ProcessLiveness | None = None
        self._checks: Counter[tuple[str, int]] = Counter()

    def check(self) -> TransportError | None:
        """Return an error if a rank has been ended or stopped for several checks; to be called
        again during a wait.
        """
        liveness = self._liveness = self._liveness or ProcessLiveness(self._pids)
        problems = {("ended", rank) for rank in liveness.poll()} | {
            ("stopped", rank) for rank in self._pids if liveness.is_stopped(rank)
        }
        self._checks = Counter({problem: self._checks[problem] + 1 for problem in problems})
        for (problem, rank), checks in sorted(self._checks.items()):
            if problem == "ended" and checks >= _ENDED_CHECKS:
                return self.lost(rank)
            if problem == "stopped" and checks >= _STOPPED_CHECKS:
                text = (
                    f"{self._process(rank)} is stopped, by SIGSTOP or Ctrl-Z, while other ranks "
                    "wait for it"
                )
                return TransportError(text)
        return None

    def wait_for_end(self, timeout_s: float = 0.0) -> set[int]:
        """Wait until a rank has ended, for at most `timeout_s` seconds; return the ranks that have
        ended.
        """
        deadline = time.monotonic() + timeout_s
        liveness = ProcessLiveness(self._pids)
        try:
            while not (ended := set(liveness.poll())) and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            liveness.close()
        return ended

    def lost(self, rank: int) -> RankLostError:
        """Return the error for the end of `rank`, a rank of this host."""
        return RankLostError(
            rank, f"{self._process(rank)} has ended while other ranks waited for it"
        )

    def reset(self) -> None:
        """Close the descriptors at the end of a wait."""
        self._checks.clear()
        if self._liveness is not None:
            self._liveness.close()
            self._liveness = None

    def _process(self, rank: int) -> str:
        return f"rank {rank} (process {self._pids[rank]})"


# --- Limits and stalled operations (pure)
# -----------------------------------------------------------------------------

_MAX_NAMES = 6
_WARN = "HOROVOD_STALL_CHECK_TIME_SECONDS"
_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
# Set by `lockstep run --stall-timeout`, which takes precedence over Horovod's variable in the
# user's environment.
_RUN_TIMEOUT = "LOCKSTEP_STALL_TIMEOUT"


@dataclass(frozen=True)
class StallLimits:
    """How long an operation may be pending, in seconds; infinite for no limit.

    Attributes:
        warn_s: until a warning.
        shutdown_s: until an error.
    """

    warn_s: float = 60.0
    shutdown_s: float = math.inf

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> StallLimits:
        """Read the limits from the environment variables HOROVOD_STALL_…; 0 means no limit.

        The variables are HOROVOD_STALL_CHECK_DISABLE, HOROVOD_STALL_CHECK_TIME_SECONDS and
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.

        Raises:
            ConfigError: for a value that is not a number of seconds.
        """
        if variables.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return cls(math.inf, math.inf)
        shutdown = _RUN_TIMEOUT if variables.get(_RUN_TIMEOUT) else _SHUTDOWN
        return cls(
            _seconds(variables, _WARN, 60.0) or math.inf,
            _seconds(variables, shutdown, 0.0) or math.inf,
        )


def _seconds(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name, "").strip()
    expected = "a number of seconds, 0 or more"
    return arguments.parse_number(
        f"environment variable {name}", text or default, least=0, expected=expected
    )


@dataclass(frozen=True)
class StalledOps:
    """Operations that the same ranks have not submitted.

    Attributes:
        missing: the ranks that have not submitted them; empty if all have, and the operations do
            not complete.
        names: the operations, such as "allreduce 'x'".
        waiting: the ranks that have submitted them.
        waited_s: how long the oldest of them has been pending, in seconds.
    """

    missing: tuple[int, ...]
    names: tuple[str, ...]
    waiting: tuple[int, ...]
    waited_s: float

    def __str__(self) -> str:
        more = len(self.names) - _MAX_NAMES
        operations = ", ".join(self.names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
        if not self.missing:
            return (
                f"all ranks have submitted {operations}, but no result has arrived after "
                f"{self.waited_s:.0f} s"
            )
        missing = _ranks_have(self.missing)
        waiting = _ranks_have(self.waiting)
        return (
            f"{missing} not submitted {operations}, for which {waiting} waited "
            f"{self.waited_s:.0f} s"
        )


def _ranks_have(ranks: Sequence[int]) -> str:
    return f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def group_stalled(
    requests: Sequence[Request],
    now: float,
    submitted: Mapping[bytes, Sequence[int]],
    size: int,
    joined: Sequence[int],
) -> list[StalledOps]:
    """Group `requests` by the ranks that have not submitted them.

    Args:
        requests: pending requests of this rank.
        now: the time, on the clock of `Request.submitted_at`.
        submitted: the ranks that have submitted each request, by key.
        size: the number of ranks.
        joined: the ranks that have joined.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Request]] = {}
    for request in requests:
        waiting = tuple(submitted[request.key])
        missing = tuple(rank for rank in range(size) if rank not in waiting and rank not in joined)
        groups.setdefault((missing, waiting), []).append(request)
    return [
        StalledOps(
            missing,
            tuple(f"{request.kind} {request.name!r}" for request in members),
            waiting,
            max(now - request.submitted_at for request in members),
        )
        for (missing, waiting), members in groups.items()
    ]


# --- The status board in the store
# ------------------------------------------------------------------------------------

T = TypeVar("T")

# Limit for an access to the store: the process that hosts it may be the one that does not respond.
_STORE_TIMEOUT_S = 3.0


class StatusBoard:
    """Shares, through the job's store, what each rank waits for, and why the first rank has given
    up.

    No method raises: without the store, ranks only know less of each other.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._rank = comm.rank
        self._size = comm.size
        group: Any = comm.group
        self._prefix = f"lockstep-horovod/{group.group_name}"
        self._default_store: Any = c10d._get_default_store()
        self._store: Any = None
        self._published = b""
        self._failed = False

    def publish_waits(self, keys: Iterable[bytes]) -> None:
        """Publish the keys of the requests for which this rank waits."""
        data = b"".join(sorted(keys))
        if data != self._published:
            self._published = data
            self._access(lambda store: store.set(str(self._rank), data.hex() or "-"), None)

    def waits(self) -> dict[int, set[bytes]]:
        """Return the keys for which each rank waits, by rank, without the ranks that have not
        published any.
        """
        return self._access(self._read_waits, {})

    def publish_reason(self, text: str) -> str:
        """Publish why this rank gives up, unless a rank has done so before; return the reason that
        counts.
        """
        return self._access(lambda store: _set_once(store, text), text)

    def reason(self) -> str:
        """Return why a rank has given up; "" if none has."""
        return self._access(lambda store: _set_once(store, ""), "")

    def _read_waits(self, store: Any) -> dict[int, set[bytes]]:
        waits = {}
        for rank, value in get_available(store, [str(rank) for rank in range(self._size)]).items():
            data = bytes.fromhex(value.decode().removeprefix("-"))
            waits[int(rank)] = {data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)}
        return waits

    def _access(self, call: Callable[[Any], T], default: T) -> T:
        """Return ``call(store)``, or `default` if that fails or times out; a thread runs it, as it
        may hang.
        """
        results: list[T] = []

        def work() -> None:
            try:
                results.append(call(self._open()))
            except (RuntimeError, ValueError):
                self._failed = True

        if self._failed:
            return default
        thread = threading.Thread(target=work, name="lockstep horovod store", daemon=True)
        thread.start()
        thread.join(_STORE_TIMEOUT_S)
        self._failed = self._failed or thread.is_alive()
        return results[0] if results else default

    def _open(self) -> Any:
        if self._store is None:
            store = self._default_store
            # a separate connection: the program's own may be blocked in a call
            if hasattr(store, "clone"):
                store = store.clone()
                store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
            self._store = c10d.PrefixStore(self._prefix, store)
        return self._store

    def close(self) -> None:
        """Close the connection to the store."""
        self._failed = True
        self._store = None
        self._default_store = None


def _set_once(store: Any, text: str) -> str:
    """Set the reason to `text` if no rank has set one, and return the one that is set; "" for
    `text` only reads.
    """
    if text and store.add("gave up", 1) == 1:
        store.set("reason", text)
        return text
    return str(store.get("reason").decode()) if text or store.check(["reason"]) else ""


# --- The inspector
# --------------------------------------------------------------------------------------------------

_log = logging.getLogger("lockstep.horovod")

_CHECK_INTERVAL_S = 0.1
# Requests that are pending for less than this are not inspected; a cycle takes less than a
# thousandth of it.
_MIN_PENDING_S = 1.0
# The store is accessed at one check in so many.
_CHECKS_PER_STORE_ACCESS = 5
# Within this time the operating system reports the end of a process whose connections have been
# closed.
_PROCESS_END_S = 1.0


class StallInspector:
    """Inspects the pending requests of this rank ten times a second.

    Args:
        comm: the ranks; each of them creates its inspector at the same time.
        pending: returns the pending requests of this rank.
        missing_ranks: returns the ranks that are not known to have submitted the request of a key.
        abort: fails all requests with an error.
    """

    def __init__(
        self,
        comm: Communicator,
        pending: Callable[[], list[Request]],
        missing_ranks: Callable[[bytes], list[int]],
        abort: Callable[[TransportError], None],
    ) -> None:
        self._rank = comm.rank
        self._size = comm.size
        self._limits = StallLimits.from_variables(variables())
        self._pending = pending
        self._missing_ranks = missing_ranks
        self._abort = abort
        self._peers = HostPeers(comm)
        self._board = StatusBoard(comm)
        self._min_pending_s = min(
            _MIN_PENDING_S, self._limits.warn_s / 2, self._limits.shutdown_s / 2
        )
        self._checks = 0  # since the wait began
        self._warned: set[Request] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="lockstep horovod monitor", daemon=True
        )
        if debug_rank() is None:  # a rank in a debugger may be stopped for any time
            self._thread.start()

    def close(self) -> None:
        """Stop inspecting."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._peers.reset()
        self._board.close()

    def publish_reason(self, text: str) -> None:
        """Publish why this rank is about to abort its waits."""
        self._board.publish_reason(text)

    def find_cause(self, error: BaseException) -> BaseException:
        """Return the cause of an error of a cycle: the reason that another rank has published, or
        the end of a rank.

        An error of this rank itself is published and returned.
        """
        if not isinstance(error, Exception) or (
            isinstance(error, LockstepError) and error.report_json
        ):
            return error
        # in an elastic job, whose launcher knows who is lost
        if isinstance(error, MembershipChangedError):
            return error
        if not is_transport_error(error):
            self._board.publish_reason(f"rank {self._rank}: {type(error).__name__}: {error}")
            return error
        lost = error.rank if isinstance(error, RankLostError) else None
        if lost in self._peers.wait_for_end():
            return error
        cause: TransportError
        if reason := self._board.reason():
            cause = TransportError(reason)
        elif lost is None and (ended := self._peers.wait_for_end(_PROCESS_END_S)):
            cause = self._peers.lost(min(ended))
        else:
            return error
        cause.__cause__ = error
        return cause

    def _run(self) -> None:
        while not self._stop.wait(_CHECK_INTERVAL_S):
            try:
                self._inspect()
            except (
                OSError,
                ValueError,
                RuntimeError,
            ):
                # the host is short of a resource; the next check tries again
                continue

    def _inspect(self) -> None:
        now = time.monotonic()
        pending = [
            request
            for request in self._pending()
            if now - request.submitted_at >= self._min_pending_s
        ]
        if not pending:
            self._reset()
            return
        error = self._peers.check()
        if error is not None:
            self._publish_and_abort(error)
            return
        if self._checks % _CHECKS_PER_STORE_ACCESS == 0:
            self._board.publish_waits(request.key for request in pending)
            if reason := self._board.reason():
                self._abort(TransportError(reason))
                return
        self._checks += 1
        self._check_limits(pending, now)

    def _reset(self) -> None:
        if self._checks:
            self._checks = 0
            self._warned.clear()
            self._board.publish_waits(())
        self._peers.reset()

    def _check_limits(self, pending: Sequence[Request], now: float) -> None:
        waits = [request for request in pending if request.kind != "join"]
        overdue = [
            request for request in waits if now - request.submitted_at >= self._limits.shutdown_s
        ]
        if overdue:
            (first, *_) = self._stalled(overdue, now)
            limit = (
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS makes this an error after "
                f"{self._limits.shutdown_s:g} s"
            )
            self._publish_and_abort(StallError(f"{first}. {limit}", first.missing))
            return
        slow = [request for request in waits if now - request.submitted_at >= self._limits.warn_s]
        new = [request for request in slow if request not in self._warned]
        if new:
            self._warned.update(new)
            for stalled in self._stalled(new, now):
                if self._rank == min(stalled.waiting):  # one of the waiting ranks logs it
                    _log.warning(
                        "%s. It may be busy, have ended, or call other operations.", stalled
                    )

    def _stalled(self, requests: Sequence[Request], now: float) -> list[StalledOps]:
        waits = self._board.waits()
        waits[self._rank] = {request.key for request in self._pending()}
        submitted = {}
        for request in requests:
            missing = self._missing_ranks(request.key)
            ranks = [
                r for r in range(self._size) if r not in missing or request.key in waits.get(r, ())
            ]
            submitted[request.key] = sorted({*ranks, self._rank})
        joined = [rank for rank, keys in waits.items() if JOIN_KEY in keys]
        return group_stalled(requests, now, submitted, self._size, joined)

    def _publish_and_abort(self, error: TransportError) -> None:
        reason = self._board.publish_reason(str(error))
        self._abort(error if reason == str(error) else TransportError(reason))
