"""This machine's part of a job on several: started by hand, by Slurm, or by the launcher of another machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .. import environment
from ..errors import ConfigError, InterruptedRunError, LockstepError, WorkerError
from .choices import Choices
from .failure import Failure
from .meet import call_the_roll, meet, serve
from .network import address_towards, interface_of
from .part import default_workers, prepare, run_part
from .roll_call import describe_here
from .screen import Screen
from .script import Script
from .supervision import FAILURE_GRACE

if TYPE_CHECKING:
    from .meeting import Meeting

__all__ = ["MARK", "run_as_node"]

MARK = "\x1eLOCKSTEP "
"""Begins a line on standard error that is meant for the launcher that started this one."""


def run_as_node(script: Script, choices: Choices) -> None:
    """Meet the other machines and run this one's workers.

    Raises:
        ConfigError: when the machines cannot meet, or do not fit together.
        WorkerError: for the rank that failed first, on whichever machine.
        as `start.start`.
    """
    workers = choices.workers or default_workers()
    prepare(choices, workers)
    if choices.as_host:
        _run_for_parent(script, choices, workers)
        return
    problem = _problem(script)
    meeting = meet(choices, str(choices.master_addr), choices.master_port)
    call_the_roll(meeting, describe_here(workers, problem), choices)
    screen = Screen((1, 2), colours=environment.wants_colours(), prefixes=not choices.no_prefix)
    _run(script, choices, workers, screen, meeting)


def _run_for_parent(script: Script, choices: Choices, workers: int) -> None:
    """Do as the launcher of another machine says, in lines on standard input; it reads lines on standard error."""
    problem = _problem(script)
    if choices.node_rank == 0 and not problem:
        from .. import stores  # noqa: F401 - loads PyTorch while the others do
    connection = environment.variables().get("SSH_CONNECTION", "")
    _say({"ready": asdict(describe_here(workers, problem, connection))})
    word, rest = _next_order()
    store = None
    if word == "serve":  # only now is it known which of this machine's addresses the others use
        store = serve(rest[0], 0, choices)
        _say({"port": store.port})
        word, rest = _next_order()
    if word != "go":
        return
    now, (address, port, at) = time.time_ns(), rest
    threading.Thread(target=_obey, name="lockstep parent", daemon=True).start()
    screen = Screen((1, 2), colours=False, prefixes=not choices.no_prefix, live=True)
    try:
        meeting = meet(choices, address, int(port), store)
        meeting.ahead = now - int(at)
        _run(script, replace(choices, quiet=True), workers, screen, meeting)
    except (LockstepError, KeyboardInterrupt) as error:
        _say({"ended": str(error)})
        raise


def _next_order() -> tuple[str, list[str]]:
    """What the parent says next; "" where it has gone."""
    word, *rest = sys.stdin.readline().split() or [""]
    return word, rest


def _run(script: Script, choices: Choices, workers: int, screen: Screen, meeting: Meeting) -> None:
    _choose_interface(choices, meeting)
    own, error = None, None
    with meeting.kept():
        try:
            run_part(script, choices, workers, screen, meeting)
        except InterruptedRunError:
            raise
        except LockstepError as raised:
            _check_interruption(raised, meeting)
            own, error = _failure(raised, meeting), raised
        if own is not None and choices.as_host:
            _say({"failure": asdict(own)})
        first = meeting.first_failure(own, FAILURE_GRACE + 2)
    if first is not None:
        # one host shows the traceback
        raise (first if own is not None and own.rank == first.rank else replace(first, traceback="")).as_error()
    if error is not None:
        raise error


def _check_interruption(error: LockstepError, meeting: Meeting) -> None:
    """Raise InterruptedRunError where workers fail, or cannot go on, as those of an interrupted node have left."""
    found, cause = meeting.interruption(), error if isinstance(error, WorkerError) else error.__cause__
    if isinstance(cause, WorkerError):
        follows = cause.in_collective or (error.report_json and json.loads(error.report_json)["kind"] != "raised")
    else:
        follows = bool(meeting.keep_in_touch())  # the first node is gone, and the store with it
    if found and follows:
        host, number = found
        raise InterruptedRunError(f"stopped by {signal.Signals(number).name} on {host}: its workers have left", number)


def _failure(error: LockstepError, meeting: Meeting) -> Failure | None:
    """That of a worker; one in which all of this node's workers agree was the first worker's too."""
    cause = error if isinstance(error, WorkerError) else error.__cause__
    return Failure.of(cause, socket.gethostname(), meeting.ahead) if isinstance(cause, WorkerError) else None


def _problem(script: Script) -> str:
    try:
        script.check()
    except ConfigError as error:
        return str(error)
    return ""


def _choose_interface(choices: Choices, meeting: Meeting) -> None:
    """Let Gloo and NCCL use the network in which the first machine is; by itself Gloo takes the host name's address."""
    name = choices.network_interface
    if name is None and meeting.nodes > 1:
        with suppress(OSError):
            name = interface_of(address_towards(meeting.address))
    if name is not None:
        environment.preset({"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name})


def _obey() -> None:
    """Pass on what the parent says; without the parent, or the way to it, nobody wants this any more."""
    for line in sys.stdin:
        word, _, number = line.partition(" ")
        if word == "signal":
            os.kill(os.getpid(), int(number))
    for number in (signal.SIGTERM, signal.SIGINT):  # at the second signal nobody is waited for
        os.kill(os.getpid(), number)


def _say(what: dict[str, Any]) -> None:
    with suppress(OSError):  # the parent has gone
        os.write(2, (MARK + json.dumps(what) + "\n").encode())
