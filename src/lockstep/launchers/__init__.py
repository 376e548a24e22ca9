"""Running a function in several worker processes of this machine."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from .. import environment
from ..errors import ConfigError, DesyncError, LockstepError, RankLostError, StallError
from .options import GRACE, Options

__all__ = ["launch"]

T = TypeVar("T")

MAX_WORKERS = 120
"""PyTorch's agent needs two file descriptors per worker in every worker; multiprocessing passes on fewer than 256."""


def launch(
    fn: Callable[..., T],
    *args: object,
    workers: int = 2,
    threads: int | None = None,
    grace: float = GRACE,
    **kwargs: object,
) -> T:
    """Run ``fn(*args, **kwargs)`` as the ranks of one job on this machine and return what rank 0 returns.

    Every worker is a process of its own in which ``lockstep.init()`` (or ``torch.distributed``) finds its rank in
    torchrun's environment variables. The function may be a lambda, a closure, or defined in a script or notebook: it
    travels by value, with its arguments, and the main module is not run again in the workers. Tensors of a device
    arrive on the CPU, both ways. Workers write to this process's standard output and standard error.

    Workers are forked from multiprocessing's fork server, which is started with PyTorch loaded by the first call
    and, with multiprocessing's resource tracker, lives as long as this process; nothing else is left behind.

    Ctrl-C and SIGTERM are passed on to the workers, which then have `grace` seconds to finish their step, save and
    leave; a second signal kills them at once. That needs the main thread: in another one signals are left alone.
    Workers never outlive this process.

    Args:
        fn: what to run.
        args: its positional arguments.
        workers: number of worker processes, 1 to 120.
        threads: threads that PyTorch may use within one operation, per worker; usable cores / workers when None.
        grace: seconds between a signal and the end of workers that do not leave.
        kwargs: its keyword arguments. Those named as a setting here can be bound with `functools.partial`.

    Raises:
        ConfigError: for a setting that cannot be used, or a function or argument that cannot be sent (it names which).
        WorkerError: a worker raised an exception or died; of several, the one that did so first.
        DesyncError, RankLostError, StallError: the workers have parted, or wait in vain; it says which for whom.
        LockstepError: one of its kinds, e.g. ConfigError, where all workers raised the same: then it is no worker's
            own, and the first worker's error with its traceback is the cause.
        InterruptedRunError: the workers stopped in good order on a signal, or this process was sent SIGTERM.
        KeyboardInterrupt: this process was sent SIGINT and the workers did not say more.
        LockstepError: this process is a worker itself, or workers cannot be started.
    """
    _check_settings(fn, workers, threads, grace)
    _check_process()
    from .fork_server import start_fork_server

    start_fork_server()  # first, as it loads PyTorch while this process goes on
    from . import call, local, meeting, streams

    options = Options(workers, threads or max(1, environment.usable_cores() // workers), grace, patience=grace)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, streams.inherited() as own:
        path = Path(folder, "call")
        path.write_bytes(call.pack_call(fn, args, kwargs))
        job = local.Job(Path(folder), options, meeting.one_machine(), own)
        try:
            values = local.run(functools.partial(call.call, path), job)
        except LockstepError as error:
            _explain(error)
            raise
    return cast(T, None if values[0] is None else call.unpack(values[0]))


def _explain(error: LockstepError) -> None:
    """Let the error's text be the report on all workers, if the watch over them has made one."""
    if not error.report_json:
        return
    from ..watch import render, report

    text = render.as_text(report.from_json(error.report_json))
    if isinstance(error, DesyncError | RankLostError | StallError):
        error.message = text
    else:
        error.report_text = text


def _check_settings(fn: object, workers: object, threads: object, grace: object) -> None:
    if not callable(fn):
        raise ConfigError("fn", "a function or another callable", fn)
    if not _is_count(workers, MAX_WORKERS):
        raise ConfigError("workers", f"a whole number from 1 to {MAX_WORKERS}", workers)
    if threads is not None and not _is_count(threads):
        raise ConfigError("threads", "a whole number of at least 1, or None", threads)
    if isinstance(grace, bool) or not isinstance(grace, int | float) or not grace >= 0:
        raise ConfigError("grace", "a number of seconds, 0 or more", grace)


def _is_count(value: object, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _check_process() -> None:
    if environment.is_launched():
        raise LockstepError(
            "launch() starts workers, and this process is a worker already (a launcher's variables, such as RANK, are "
            "set). Call it in the program that is started first, or call the function itself here."
        )
    for descriptor, name in enumerate(("standard input", "standard output", "standard error")):
        try:
            os.fstat(descriptor)
        except OSError:
            hint = "Redirect it to /dev/null instead of closing it: files opened later would be taken for it."
            raise LockstepError(f"{name} is closed, and workers inherit it. {hint}") from None
