"""One process of the warm pool: it takes jobs, is one rank of each, and tidies up in between."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

# Its default arguments hold for ever the process group that is there when it is imported, and other
# parts of torch import it when first used: so now, while there is none.
import torch.distributed.nn.functional

from . import leaks
from .outcome import Outcome

__all__ = ["STACK_SIGNAL", "Job", "Release", "fresh_store", "serve"]

# Asks a rank for the stacks of its threads; a real-time signal, as programs under test may use
# SIGUSR1 and 2.
STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)


@dataclass(frozen=True)
class Job:
    """A function to run as one rank.

    Attributes:
        call: (function, positional arguments, keyword arguments), cloudpickled.
        place: this rank, and the number of ranks.
        environment: all environment variables of the rank.
        folder: its working directory.
        path: its `sys.path`.
        warnings: the warning filters of the test.
        group: backend and unique name of the process group made for it; None when the function
            makes its own.
        timeout: seconds that the run may take.
    """

    call: bytes
    place: tuple[int, int]
    environment: dict[str, str]
    folder: str
    path: list[str]
    warnings: list[Any]
    group: tuple[str, str] | None
    timeout: float


@dataclass(frozen=True)
class Release:
    """Every rank has ended: leave the process group, tidy up and say what is left over.

    Attributes:
        linger: seconds in which what was let go of may end by itself; None when nobody asks what is
            left.
    """

    linger: float | None


def fresh_store() -> Any:
    """A store for one job, served by this process on a free port."""
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]


def serve(connection: Connection, port: int, output: Path, stacks: Path) -> None:
    """Run jobs until the pool closes the connection."""
    _redirect(output)
    # As in a worker of `lockstep run`: a process of a fork server would start its own by another
    # one, which imports PyTorch first, and under load that takes as long as a test may.
    multiprocessing.set_start_method(None, force=True)
    with stacks.open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(STACK_SIGNAL, file, all_threads=True)
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
        # what is imported by now is no garbage, and each collection after a test would go through
        # it
        gc.freeze()
        connection.send("ready")
        with suppress(EOFError, KeyboardInterrupt, ConnectionError):
            while True:
                _serve_one(connection, connection.recv(), store, file)


def _redirect(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # what was inherited may be a test runner's own stream
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _serve_one(connection: Connection, job: Job, store: Any, stacks: Any) -> None:
    state, held = leaks.State.now(), leaks.resources()
    # should the pool be gone when the deadline has long passed, nobody else ends a rank that hangs
    faulthandler.dump_traceback_later(job.timeout + 30, exit=True, file=stacks)
    try:
        with _as_rank(job):
            returned, answer = _answer(job, store)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(answer)
            if not returned:
                _leave_group()  # now, so that no peer waits for this rank
            release = connection.recv()
            _leave_group()
    finally:
        leaks.forget_communicator()
        state.restore()
        faulthandler.cancel_dump_traceback_later()
    left: list[str] = []
    if release.linger is not None:
        left = leaks.remaining(held, leaks.resources, release.linger)
    connection.send(left)


@contextmanager
def _as_rank(job: Job) -> Iterator[None]:
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.folder)
    sys.path[:] = job.path
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(job.warnings):
            warnings.filterwarnings(
                action,
                getattr(message, "pattern", ""),
                category,
                getattr(module, "pattern", ""),
                line,
            )
        yield


def _answer(job: Job, store: Any) -> tuple[bool, bytes]:
    try:
        function, arguments, named = cloudpickle.loads(job.call)
        if job.group is not None:
            _join(job, store, *job.group)
        value = function(*arguments, **named)
        # what cannot be sent back is this rank's failure
        return True, cloudpickle.dumps(
            Outcome(job.place[0], "returned", time.monotonic(), value=value)
        )
    except BaseException as error:
        outcome = Outcome(
            job.place[0], "raised", time.monotonic(), kind=type(error).__name__, message=str(error)
        )
        outcome.trace = "".join(traceback.format_exception(error))
        return False, _with_exception(outcome, error)


def _join(job: Job, store: Any, backend: str, name: str) -> None:
    rank, size = job.place
    own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    limit = timedelta(seconds=job.timeout)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)
    # a rank that fails at once must not break up the group while others still enter it
    own.set(f"joined {rank}", "")
    own.wait([f"joined {peer}" for peer in range(size)], limit)


def _with_exception(outcome: Outcome, error: BaseException) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(replace(outcome, exception=error))
        cloudpickle.loads(data)
    except Exception:  # a class that cannot be rebuilt from its arguments; the text is enough
        data = cloudpickle.dumps(outcome)
    return data


def _leave_group() -> None:
    if dist.is_initialized():
        # here, and not in one of Gloo's threads: what a test has left may hold its group
        gc.collect()
        with suppress(Exception):  # a group that has failed may also fail to end
            dist.destroy_process_group()
    if (last_rank := sys.modules.get("lockstep.watchdog.last_rank")) is not None:
        last_rank.watch(None)  # this process does not end with its rank
