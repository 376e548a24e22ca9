"""The creation of a process group, in which its ranks wait for each other: it is watched as a
collective.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from .session import Session

_CREATION_POLL_S = 1e-3


def _timeout_argument(args: tuple[Any, ...], kw: dict[str, Any]) -> timedelta | None:
    """Return the timeout among the arguments of c10d's function; None without one."""
    return kw.get("timeout", next((value for value in args if isinstance(value, timedelta)), None))


def limit_of_user(args: tuple[Any, ...], kw: dict[str, Any]) -> float:
    """Return the timeout in seconds that the user has set for a group; 0 if torch has filled in its
    default.
    """
    timeout = _timeout_argument(args, kw)
    defaults = (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout)
    is_default = any(timeout is default for default in defaults)
    return 0.0 if timeout is None or is_default else float(timeout.total_seconds())


def watch_creation(
    session: Session | None,
    name: str,
    ranks: list[int],
    backend: Any,
    args: tuple[Any, ...],
    kw: dict[str, Any],
) -> AbstractContextManager[None]:
    """Return a context in which this rank makes the group `name` together with the other `ranks`.

    Args:
        session: None without a watchdog.
        name, ranks, backend: of the group.
        args, kw: the other arguments of c10d's function.
    """
    if session is None or session.state.rank not in ranks or len(ranks) < 2:
        return nullcontext()
    timeout = _timeout_argument(args, kw)
    own_limit_s = math.inf if timeout is None else timeout.total_seconds()
    # the ranks wait for each other in the constructors of these
    parts = {part.rpartition(":")[2] for part in str(backend).split(",")}
    connects = parts <= {"gloo", "shm"}
    limit_s = limit_of_user(args, kw)
    return _watched_creation(session, name, tuple(ranks), connects, own_limit_s, limit_s)


@contextmanager
def _watched_creation(
    session: Session,
    name: str,
    ranks: tuple[int, ...],
    connects: bool,
    own_limit_s: float,
    limit_s: float,
) -> Iterator[None]:
    """Record that this rank makes a group.

    Args:
        session: of the watchdog.
        name, ranks: of the group.
        connects: whether the ranks wait for each other in its constructor, in C++, from which no
            error gets them: they wait here.
        own_limit_s: seconds after which the constructor gives up.
        limit_s: timeout in seconds that the user has set for the group; 0 for none.
    """
    state = session.state
    if not state.recorder.has_free_slot:
        yield
        return
    monitor = session.add_group(f"creation of {name}", name, ranks, limit_s)
    try:
        pending = monitor.enter("new_group", (str(list(ranks)),))
        with state.blocking(pending.number, ranks):
            deadline = time.monotonic() + own_limit_s
            while (
                connects and monitor.peers.missing(pending.sequence) and time.monotonic() < deadline
            ):
                state.check()
                time.sleep(_CREATION_POLL_S)
            state.check()
            yield
        monitor.finish(pending, time.monotonic())
    finally:
        session.remove_monitor(monitor)
