"""How the launchers of several machines find each other and make sure that they fit together."""

from __future__ import annotations

import errno
import json
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, LockstepError
from ..store_exchange import present
from .choices import Choices
from .part import check_debug_rank
from .roll_call import Description, compare

if TYPE_CHECKING:
    from .meeting import Meeting

__all__ = ["call_the_roll", "meet", "serve"]

_RETRY_S = 0.1


def serve(address: str, port: int, choices: Choices) -> Any:
    """The job's store, on this machine, by which the others know it as `address`; port 0: the system picks one.

    Raises:
        ConfigError: when the port is in use.
    """
    from ..stores import serve_store

    limit = timedelta(seconds=choices.start_timeout)
    try:
        return serve_store(address, port, limit, several_hosts=choices.nnodes > 1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("master_port", "a port that is free on the first machine", port) from None
        raise


def meet(choices: Choices, address: str, port: int, store: Any = None) -> Meeting:
    """Reach the store of the first machine, or serve it where this is the first.

    Raises:
        ConfigError: when the first machine is unknown, or does not answer in time.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from .meeting import Meeting

    if store is None and choices.node_rank == 0:
        _look_up(address, port)  # the workers, and the other machines, will need it
        store = serve(address, port, choices)
    if store is None:
        _await(address, port, choices.start_timeout)
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=choices.start_timeout))
    return Meeting(store, address, choices.node_rank, choices.nnodes, run_id=f"{address}-{port}")


def call_the_roll(meeting: Meeting, here: Description, choices: Choices) -> None:
    """Compare all machines on the first; every one gets the verdict.

    Raises:
        LockstepError: with the verdict, if it is no good one.
    """
    store, limit = meeting.store, choices.start_timeout
    if not store.compare_set(f"here/{meeting.node}", "", text := json.dumps(asdict(here))).decode() == text:
        raise ConfigError("node_rank", "a number that no other machine has", meeting.node)
    if meeting.node == 0:
        verdict = _compare_all(meeting, choices)
        store.set("verdict", json.dumps([verdict, time.time_ns()]))
        if verdict:
            meeting.wait_for([f"heard/{node}" for node in range(1, meeting.nodes)], 2.0)
    elif not meeting.wait_for(["verdict"], limit + 5):
        verdict = f"the first machine has said nothing within {limit + 5:g} s"
    else:
        verdict, at = json.loads(store.get("verdict"))
        meeting.ahead = time.time_ns() - at
        store.set(f"heard/{meeting.node}", "")
    if verdict:
        raise LockstepError(verdict)


def _compare_all(meeting: Meeting, choices: Choices) -> str:
    """What keeps the machines from running the program together; "" where nothing does."""
    keys = [f"here/{node}" for node in range(meeting.nodes)]
    if not meeting.wait_for(keys, choices.start_timeout):
        there = present(meeting.store, keys)
        missing = ", ".join(str(node) for node, key in enumerate(keys) if key not in there)
        return f"of {meeting.nodes} nodes, these have not come within {choices.start_timeout:g} s: {missing}"
    hosts = [Description(**json.loads(text)) for text in meeting.store.multi_get(keys)]
    try:
        compare(hosts)
        check_debug_rank(choices, sum(host.workers for host in hosts))
    except ConfigError as error:
        return str(error)
    return ""


def _look_up(address: str, port: int) -> None:
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            "master_addr", "a name that can be looked up here, or an address", address, f"{reason}."
        ) from None


def _await(address: str, port: int, seconds: float) -> None:
    """Wait until somebody listens there; torch would wait too, but with warnings, and could not be interrupted."""
    deadline = time.monotonic() + seconds
    while True:
        _look_up(address, port)
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                hint = f"The last try ended with: {error}. Is the launcher of node 0 running there, and the port open?"
                expected = f"a machine that answers within {seconds:g} s"
                raise ConfigError("master_addr", expected, found=f"{address}:{port}", hint=hint) from None
        time.sleep(_RETRY_S)
