"""What one worker process does around its work: settle in, report how it ended, leave nothing running."""

from __future__ import annotations

import base64
import ctypes
import io
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

import torch
import torch.distributed as dist

from .. import watch
from ..environment import attempt, watch_dir
from ..errors import InterruptedRunError, LockstepError
from ..transports.shm import host
from ..watch import jobs
from .call import pack
from .folder import Folder, Report
from .streams import Streams
from .sweep import MOMENT, sweep

__all__ = ["Setup", "main", "refuse_bad_fork"]

# A worker that failed because a peer died waits this long to be ended with the others, so that the launcher sees
# the peer's death first. It looks five times a second.
FOLLOW_SECONDS = 10.0

# A worker with an error of Lockstep's waits this long for the others to have the same. All have when the input is bad,
# at nearly the same time; where it is one worker's own error, the launch fails by so much later.
COMPANY_SECONDS = 1.0

PR_SET_PDEATHSIG = 1

_OWN = __package__.partition(".")[0]
_TALKING = (
    *("torch.distributed.", "torch.autograd.", "torch.nn.parallel."),
    *(f"{_OWN}.transports.", f"{_OWN}.doors.horovod."),
)


@dataclass(frozen=True)
class Setup:
    """What a worker must know beside its work.

    Attributes:
        folder: of the run.
        workers: number of workers on this machine.
        threads: threads that PyTorch may use within one operation.
        streams: where it writes.
        run_id: marks the processes of the run.
    """

    folder: Folder
    workers: int
    threads: int
    streams: Streams
    run_id: str


def main(task: Callable[[], object], setup: Setup, local_rank: str) -> object:
    """Do `task` as the worker `local_rank` (text, as PyTorch's agent fills it in) and return its value.

    An exception is written down for the launcher, and ends the process with the exception's exit code. A worker
    that stopped in good order (InterruptedRunError) stays until all have, as the agent ends the peers of a worker
    that fails.
    """
    rank = int(local_rank)
    setup = replace(setup, folder=setup.folder.attempt(attempt()))
    try:
        setup.folder.enter(rank)
        _settle(setup, rank)
        value = task()
        watch.left()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    except InterruptedRunError as error:
        setup.folder.write(_report(rank, error, setup))
        value = None
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watch.raised(error)
        report = _report(rank, error, setup)
        if report.exit_code:
            _fail(report, setup)
        value = None  # sys.exit(0) is a way to return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be interrupted
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nor to be cleared up by a handler of the program's
    _flush()
    setup.folder.finish(rank)
    return value


def _settle(setup: Setup, local_rank: int) -> None:
    _take_signals()
    threading.Thread(target=_end_with_launcher, args=(setup,), name="launcher watch", daemon=True).start()
    setup.streams.enter(local_rank)
    refuse_bad_fork()
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True)
    torch.set_num_threads(setup.threads)
    watch.install(host.host_key, lasting=True)


def refuse_bad_fork() -> None:
    """Raise LockstepError where CUDA was in use in the process that this one was forked from."""
    if getattr(torch.cuda, "_is_in_bad_fork", bool)():
        raise LockstepError(
            "a module that --preload names uses CUDA as soon as it is loaded, and a process in which CUDA is in use "
            "cannot be forked. Leave the module out, or use --start-method spawn."
        )


def _take_signals() -> None:
    # In a process group of its own a worker gets Ctrl-C from the launcher alone, and so once.
    os.setpgid(0, 0)
    # Outside the terminal's foreground group, writing to it must not stop the process ("stty tostop").
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if sys.platform == "linux":
        # PyTorch asks for SIGINT at the death of the fork server; the death that matters is the launcher's.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_launcher(setup: Setup) -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()  # reads a pipe whose other end only the launcher holds
    recordings, ranks = watch_dir(), set(setup.folder.present(range(setup.workers)).values())
    shutil.rmtree(setup.folder.path.parent, ignore_errors=True)
    if recordings is not None:
        jobs.remove(recordings.parent)
    # Every rank does this, and ends itself: one that is ended by another leaves its own work undone. Where another has
    # removed the list of ranks before this one could read it, there is no moment for anybody.
    sweep(setup.run_id, spare_children=False, spared=ranks, moment=MOMENT if os.getpid() in ranks else 0.0)
    os.killpg(os.getpid(), signal.SIGKILL)


def _report(rank: int, error: BaseException, setup: Setup) -> Report:
    now = time.time_ns()
    stopped = isinstance(error, InterruptedRunError)
    return Report(
        rank,
        now,
        type(error).__name__,
        _message(error),
        "" if stopped or isinstance(error, SystemExit) else _traceback(error),
        _exit_code(error),
        tuple(setup.folder.lost(r for r in range(setup.workers) if r != rank)),
        error.signal_number if isinstance(error, InterruptedRunError) else 0,
        error.checkpoint if isinstance(error, InterruptedRunError) else None,
        _packed(error) if isinstance(error, LockstepError) and not stopped else "",
        _is_in_collective(error),
        is_joint=bool(getattr(error, "report_json", "")),
    )


def _is_in_collective(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inner = frames[-1].f_globals.get("__name__", "") if frames else ""
    return isinstance(error, RuntimeError) and f"{inner}.".startswith(_TALKING)


def _packed(error: LockstepError) -> str:
    try:
        return base64.b64encode(pack(error)).decode()
    except Exception:  # it holds something that cannot be sent
        return ""


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return f"left with exit code {_exit_code(error)}"
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be shown: {type(second).__name__})"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.exit_code if isinstance(error, LockstepError) else 1


def _traceback(error: BaseException) -> str:
    frames: TracebackType | None = error.__traceback__
    while frames is not None and _is_around(frames):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_around(frames: TracebackType) -> bool:
    """Whether this is a frame of what runs the program, not of the program."""
    names = frames.tb_frame.f_globals
    return names.get("__package__") == __package__ or names.get("__name__") == "runpy"


def _fail(report: Report, setup: Setup) -> None:
    _flush()
    setup.folder.write(report)
    if report.after or report.packed:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if report.after and not report.is_joint:
            time.sleep(FOLLOW_SECONDS)
        elif not report.is_joint:  # the launcher knows whose words are still to come
            _await_others(setup)
    raise SystemExit(report.exit_code) from None


def _await_others(setup: Setup) -> None:
    deadline = time.monotonic() + COMPANY_SECONDS
    while not all(map(setup.folder.has_ended, range(setup.workers))) and time.monotonic() < deadline:
        time.sleep(0.01)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
