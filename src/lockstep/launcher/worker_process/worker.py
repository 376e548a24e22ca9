"""A worker process: it sets itself up, runs its task or script, reports its exit, and leaves no
process behind.
"""

from __future__ import annotations

import base64
import bdb
import ctypes
import io
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from ... import environment, watchdog
from ...environment import emulated_network, find_world, records_dir
from ...errors import InterruptedRunError, LockstepError
from ...extension_points import EXTENSION_POINTS
from ...flight_recorder import jobs
from ...job.client import JobClient
from ...job.messages import Failure, Finished, ToAnyWorker
from ...system.crashes import print_stack_of_crashes
from ...system.job_folders import JobFolderLock
from ...system.processes import ProcessLiveness, end_orphans, is_stopped
from ...transports.runtime import host_identity
from ...watchdog.call_sites import user_call_site
from ...watchdog.last_rank import describe_activity
from ..output.worker_output import OutputTarget
from ..pulse import Patience, SilenceWatch, write_to_launcher
from ..worker_status import pickle_by_value
from ..workers import worker_socket
from . import late_failures, mpi_singletons

# A worker with an error of Lockstep waits this long for the others to raise the same one. If the
# input is bad, all do so at nearly the same time; if only one worker fails, the launch fails this
# much later.
SAME_ERROR_WAIT_SECONDS = 1.0

# Between the moment in which the kernel closes the launcher's end of the pipe and that in which its
# process has ended.
_LAUNCHER_ENDS_S = 5.0

_OTHERS_FIRST_S = 3.0  # by which the other hosts give up a launcher before its workers do

PR_SET_PDEATHSIG = 1

# Of <malloc.h>; see mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_ON_HEAP = 32 << 20  # bytes: the largest that glibc allows
_NEVER_TRIM = -1

_NEW_LINE = "\n"

_PACKAGE = __package__.partition(".")[0]
_COMMUNICATION_MODULES = (
    *("torch.distributed.", "torch.autograd.", "torch.nn.parallel."),
    *(f"{_PACKAGE}.transports.", f"{_PACKAGE}.compat.horovod."),
)


@dataclass(frozen=True)
class WorkerSetup:
    """The settings of a worker besides its task.

    Attributes:
        folder: of the run, private to this user.
        threads: intra-op threads of PyTorch.
        output: the target of its standard output and standard error.
        run_id: value of LOCKSTEP_RUN_ID in all processes of the run.
        program: what the job runs, for lists of processes; "" to keep the title that the process
            has.
        patience: with a launcher that does not answer.
    """

    folder: Path
    threads: int
    output: OutputTarget
    run_id: str
    program: str
    patience: Patience


def main(task: Callable[[], object], setup: WorkerSetup, rank: int) -> None:
    """Run `task` as the worker with the local rank `rank`.

    An exception is reported to the launcher and ends the process with the exception's exit code.
    One that shuts a worker down cleanly on a signal (InterruptedRunError) ends it with exit code 0:
    the launcher ends the peers of a worker that fails.
    """
    _set_up_signals()
    client = _connect(setup, rank)
    try:
        JobFolderLock(setup.folder)  # for as long as this process lives
        _set_up_process(setup, rank)
        late_failures.set_reporter(partial(_report_late, client))
        task()
        watchdog.report_exit()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    except InterruptedRunError as error:
        client.fail(_make_report(client, error))
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watchdog.report_exception(error)
        report = _make_report(client, error)
        if report.exit_code:  # sys.exit(0) is a successful end
            _exit_with_report(report, client)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the task is done
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # without the program's handler
    _flush()
    client.send(Finished())


def _connect(setup: WorkerSetup, rank: int) -> JobClient:
    """Connect to the launcher; the end of that connection ends this worker."""
    incoming: object = ToAnyWorker
    if environment.elastic_worker() is not None:
        from ...elastic.membership import Down

        incoming = ToAnyWorker | Down
    launcher = _Launcher(setup)
    try:
        client = JobClient(
            worker_socket(setup.folder), rank, incoming, launcher.look, launcher.lost
        )
    except OSError:  # it has ended by now
        os.killpg(os.getpid(), signal.SIGKILL)
        raise
    launcher.client = client
    return client


def _set_up_process(setup: WorkerSetup, local_rank: int) -> None:
    setup.output.redirect(local_rank)
    print_stack_of_crashes()
    refuse_bad_fork()
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True)
    torch.set_num_threads(setup.threads)
    keep_freed_memory()
    if setup.program:
        _set_title(f"lockstep rank {find_world().rank}", setup.program)
    if emulated_network() is not None:
        EXTENSION_POINTS.load("start of a worker on an emulated network")()
    watchdog.install(host_identity.host_key, lasting=True)
    mpi_singletons.install()


def keep_freed_memory() -> bool:
    """Let glibc's allocator keep what a step frees for the next step; returns whether it does.

    By default it may give memory back to the system, which clears it before it hands it out again.
    Whether it does depends on what lies above it on the heap. Both thresholds are set, as one alone
    turns off the adaptation of the other and is slower than none. Where the user has a setting, or
    another C library is used, nothing is changed.
    """
    if environment.sets_allocator() or platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    return bool(
        set_option(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        and set_option(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    )


def _set_title(name: str, program: str) -> None:
    """Show `name` and `program` as this process's command line in ps and top, where setproctitle is
    installed.
    """
    with suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(f"{name}: {program}")
        # where the place of the command line is not known: not forked, but spawned
        setproctitle.setthreadtitle(name)


def refuse_bad_fork() -> None:
    """Raise LockstepError if an accelerator was in use in the process from which this one was
    forked.
    """
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    if getattr(torch.get_device_module(kind), "_is_in_bad_fork", bool)():
        raise LockstepError(
            f"a module in --preload initialises {kind} on import, and a process that uses it "
            "cannot be forked. Remove the module from --preload, or use --start-method spawn."
        )


def _set_up_signals() -> None:
    # In its own process group a worker gets Ctrl-C only from the launcher, and so once.
    os.setpgid(0, 0)
    # Outside the terminal's foreground group, writing to it must not stop the process ("stty
    # tostop").
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if sys.platform == "linux":
        # PyTorch requests SIGINT at the death of the fork server, but a worker follows the
        # launcher.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class _Launcher:
    """The launcher, as its worker sees it: whether it answers, and what follows from its end.

    Args:
        setup: of this worker.

    Attributes:
        client: the connection to it.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self.client: JobClient | None = None
        parent = multiprocessing.parent_process()
        assert parent is not None and parent.pid is not None
        self._pid = parent.pid
        self._liveness = ProcessLiveness({0: self._pid})
        # the others know first why this worker ends, and do not take it for dead
        limit_s = setup.patience.limit_s + _OTHERS_FIRST_S
        self._silence = SilenceWatch(replace(setup.patience, limit_s=limit_s))

    def look(self) -> None:
        """Say that the launcher has not answered for long, and end this worker when that has lasted
        too long.

        The others go on without this host by then, or have ended.
        """
        silence = self._silence
        client = self.client
        if client is None:
            return
        pulse = client.pings
        folder = self._setup.folder
        silence.tick()
        is_due = silence.is_due("launcher", pulse)
        is_over = silence.is_over("launcher", pulse)
        limits = silence.patience
        name = socket.gethostname()
        limit_s = limits.limit_s - _OTHERS_FIRST_S
        if is_due and _is_first(folder, "silent", limits.warning_s):
            hint = (
                f"; it is stopped by a signal, `kill -CONT {self._pid}` lets it go on"
                if is_stopped(self._pid)
                else ""
            )
            text = f"the launcher of host {name} has not answered for {limits.warning_s:g} s{hint}"
            write_to_launcher(self._pid, f"lockstep: {text}")
        if is_over:
            if _is_first(folder, "over", limit_s):
                text = (
                    f"the launcher of host {name} has not answered for {limit_s:g} s "
                    "(LOCKSTEP_LAUNCHER_TIMEOUT)"
                )
                write_to_launcher(self._pid, f"lockstep: {text}; its workers end")
            os.killpg(os.getpid(), signal.SIGKILL)  # the folder stays the launcher's

    def lost(self) -> None:
        """End this process and those that it has started; if the launcher has ended, remove what it
        has left.
        """
        try:
            if self._has_ended():
                self._remove_traces()
        finally:
            os.killpg(os.getpid(), signal.SIGKILL)

    def _has_ended(self) -> bool:
        """Return whether the launcher has ended, and has not only given up this worker: its folder
        is its own then.
        """
        deadline = time.monotonic() + _LAUNCHER_ENDS_S
        while not self._liveness.poll():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _remove_traces(self) -> None:
        """Remove the folders of a run whose launcher is gone, and end the processes that its ranks
        have started.
        """
        records = records_dir()
        shutil.rmtree(self._setup.folder, ignore_errors=True)
        if records is not None:
            jobs.remove(records.parent)
        # Every rank does this and then kills itself: a rank killed by another would leave its own
        # cleanup undone.
        peers = frozenset({os.getpid()}) if self.client is None else self.client.peers
        end_orphans(self._setup.run_id, keep_children=False, keep=peers)


def _is_first(folder: Path, kind: str, seconds: float) -> bool:
    """Return whether no other worker of this host has left a mark of this kind within so many
    seconds.
    """
    marks = list(folder.glob(f"{kind}-*"))
    try:
        newest = max((mark.stat().st_mtime for mark in marks), default=0.0)
        if time.time() - newest < seconds:
            return False
        (folder / f"{kind}-{len(marks)}").touch(exist_ok=False)
    except OSError:  # another one is faster, or the folder is gone
        return False
    return True


def _make_report(client: JobClient, error: BaseException) -> Failure:
    stopped = isinstance(error, InterruptedRunError)
    return Failure(
        client.number,
        time.time_ns(),
        type(error).__name__,
        _message(error),
        "" if stopped or isinstance(error, SystemExit) else _traceback(error),
        _exit_code(error),
        signal_number=error.signal_number if isinstance(error, InterruptedRunError) else 0,
        checkpoint=error.checkpoint if isinstance(error, InterruptedRunError) else None,
        pickled=_pickled(error) if isinstance(error, LockstepError) and not stopped else "",
        in_collective=_is_raised_in_communication(error),
        repeats_watchdog=bool(getattr(error, "report_json", "")),
        call_site=user_call_site(error) if isinstance(error, LockstepError) else "",
    )


def _is_raised_in_communication(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inner = frames[-1].f_globals.get("__name__", "") if frames else ""
    return isinstance(error, RuntimeError) and f"{inner}.".startswith(_COMMUNICATION_MODULES)


def _pickled(error: LockstepError) -> str:
    try:
        return base64.b64encode(pickle_by_value(error)).decode()
    except Exception:  # it holds something that cannot be sent
        return ""


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return f"ended with exit code {_exit_code(error)}"
    if isinstance(error, bdb.BdbQuit) and not (sys.stdin and sys.stdin.isatty()):
        return (
            "breakpoint() has no terminal. Start the job with `lockstep run --debug-rank "
            f"{find_world().rank} ...`."
        )
    if isinstance(error, ModuleNotFoundError) and error.name == "horovod":
        return (
            f"{error}. `lockstep run --as-horovod ...` lets Lockstep take its place, without a "
            "change to the program; `lockstep horovodrun` does so too."
        )
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
    while frames is not None and _is_launcher_frame(frames):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_launcher_frame(frames: TracebackType) -> bool:
    """Return whether this is a frame of the launcher or runpy and not of the program."""
    names = frames.tb_frame.f_globals
    parts = str(names.get("__package__", "")).split(".")
    is_ours = parts[:2] in ([_PACKAGE, "launcher"], [_PACKAGE, "ray"])
    return is_ours or names.get("__name__") == "runpy"


def _exit_with_report(report: Failure, client: JobClient) -> None:
    _flush()
    client.fail(report)
    may_be_alike = report.pickled and not report.repeats_watchdog
    # the launcher knows which reports are still to come
    if may_be_alike and environment.elastic_worker() is None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        client.wait_for_release(SAME_ERROR_WAIT_SECONDS)
    raise SystemExit(report.exit_code) from None


def _report_late(client: JobClient, error: BaseException) -> None:
    """Report the failure of a program that something keeps running, and what that is.

    The launcher then ends the job as after every failure. A job of one rank is left to end by
    itself, as Python does.
    """
    report = _make_report(client, error)
    if report.stopped or not report.exit_code:
        return
    number = find_world().rank
    text = (
        f"rank {number} has failed ({report.kind}: {report.reason.partition(_NEW_LINE)[0]}) and "
        "does not end:"
    )
    with suppress(OSError):  # the launcher is gone, or the disk is full
        jobs.write_message(records_dir(), f"{text}\n  {describe_activity()}")
    if find_world().world_size > 1:
        client.fail(report)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
