"""A worker process: it sets itself up, runs its task or script, reports its exit, and leaves no process behind."""

from __future__ import annotations

import base64
import bdb
import ctypes
import io
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
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

from .. import watchdog
from ..environment import emulated_network, find_world, records_dir, restart_count
from ..errors import InterruptedRunError, LockstepError
from ..extension_points import EXTENSION_POINTS
from ..flight_recorder import jobs
from ..system.processes import TERM_GRACE_S, ProcessLiveness, end_orphans, is_stopped
from ..transports.runtime import host_identity
from ..watchdog.call_sites import user_call_site
from ..watchdog.last_rank import describe_activity
from . import late_failures, mpi_singletons
from .log_multiplexer import OutputTarget
from .pulse import Patience, SilenceWatch, read_pulse, write_to_launcher
from .worker_status import StatusFolder, WorkerReport, pickle_by_value

__all__ = ["WorkerSetup", "main", "refuse_bad_fork"]


# --- The worker process -----------------------------------------------------------------------------------------------

# A worker that failed because a peer died waits this long to be ended together with the others, so that the launcher
# sees the peer's death first. The launcher polls five times a second.
PEER_FAILURE_WAIT_SECONDS = 10.0

# A worker with an error of Lockstep waits this long for the others to raise the same one. If the input is bad, all do
# so at nearly the same time; if only one worker fails, the launch fails this much later.
SAME_ERROR_WAIT_SECONDS = 1.0

# Between the moment in which the kernel closes the launcher's end of the pipe and that in which its process has ended.
_LAUNCHER_ENDS_S = 5.0

_LOOK_S = 0.25  # between two looks at the launcher's pulse
_OTHERS_FIRST_S = 3.0  # by which the other hosts give up a launcher before its workers do

PR_SET_PDEATHSIG = 1
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
        folder: the status folder of the run.
        workers: number of workers on this host.
        threads: intra-op threads of PyTorch.
        output: the target of its standard output and standard error.
        run_id: value of LOCKSTEP_RUN_ID in all processes of the run.
        program: what the job runs, for lists of processes; "" to keep the title that the process has.
        patience: with a launcher that does not answer; None where there is none.
    """

    folder: StatusFolder
    workers: int
    threads: int
    output: OutputTarget
    run_id: str
    program: str
    patience: Patience | None = None


def main(task: Callable[[], object], setup: WorkerSetup, local_rank: str) -> object:
    """Run `task` as the worker `local_rank` (text, as PyTorch's agent passes it) and return its value.

    An exception is reported to the launcher and ends the process with the exception's exit code. A worker that shut
    down cleanly on a signal (InterruptedRunError) stays until all workers have ended, because the agent ends the peers
    of a worker that fails.
    """
    rank = int(local_rank)
    setup = replace(setup, folder=setup.folder.for_attempt(restart_count()))
    try:
        setup.folder.register(rank)
        _set_up_process(setup, rank)
        late_failures.set_reporter(partial(_report_late, rank, setup))
        value = task()
        watchdog.report_exit()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    except InterruptedRunError as error:
        setup.folder.write_report(_make_report(rank, error, setup))
        value = None
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watchdog.report_exception(error)
        report = _make_report(rank, error, setup)
        if report.exit_code:
            _exit_with_report(report, setup)
        value = None  # sys.exit(0) is a successful end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the task is done
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # without the program's handler
    _flush()
    setup.folder.mark_finished(rank)
    return value


def _set_up_process(setup: WorkerSetup, local_rank: int) -> None:
    _set_up_signals()
    if multiprocessing.parent_process() is not None:  # in an actor of Ray, which ends with its job, there is none
        threading.Thread(target=_exit_with_launcher, args=(setup,), name="launcher watch", daemon=True).start()
    setup.output.redirect(local_rank)
    refuse_bad_fork()
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True)
    torch.set_num_threads(setup.threads)
    if setup.program:
        _set_title(f"lockstep rank {find_world().rank}", setup.program)
    if emulated_network() is not None:
        EXTENSION_POINTS.load("start of a worker on an emulated network")()
    watchdog.install(host_identity.host_key, lasting=True)
    mpi_singletons.install()


def _set_title(name: str, program: str) -> None:
    """Show `name` and `program` as this process's command line in ps and top, where setproctitle is installed."""
    with suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(f"{name}: {program}")
        setproctitle.setthreadtitle(name)  # where the place of the command line is not known: not forked, but spawned


def refuse_bad_fork() -> None:
    """Raise LockstepError if an accelerator was in use in the process from which this one was forked."""
    found = torch.accelerator.current_accelerator()
    kind = "cuda" if found is None else found.type
    if getattr(torch.get_device_module(kind), "_is_in_bad_fork", bool)():
        raise LockstepError(
            f"a module in --preload initialises {kind} on import, and a process that uses it cannot be forked. "
            "Remove the module from --preload, or use --start-method spawn."
        )


def _set_up_signals() -> None:
    # In its own process group a worker gets Ctrl-C only from the launcher, and so once.
    os.setpgid(0, 0)
    # Outside the terminal's foreground group, writing to it must not stop the process ("stty tostop").
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if sys.platform == "linux":
        # PyTorch requests SIGINT at the death of the fork server, but a worker follows the launcher.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _exit_with_launcher(setup: WorkerSetup) -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None and launcher.pid is not None
    liveness = ProcessLiveness({0: launcher.pid})
    silence = None
    if setup.patience is not None:  # the others know first why this worker ends, and do not take it for dead
        silence = SilenceWatch(replace(setup.patience, limit_s=setup.patience.limit_s + _OTHERS_FIRST_S))
    while launcher.is_alive():  # reads a pipe whose other end only the launcher holds
        launcher.join(_LOOK_S)
        if silence is not None and launcher.is_alive():
            _look_at_launcher(setup.folder.path.parent, launcher.pid, silence)
    try:
        if _has_ended(liveness):
            _remove_traces(setup)
    finally:
        os.killpg(os.getpid(), signal.SIGKILL)


def _look_at_launcher(folder: Path, pid: int, silence: SilenceWatch) -> None:
    """Say that the launcher has not answered for long, and end this worker when that has lasted too long.

    The others go on without this host by then, or have ended.
    """
    pulse = read_pulse(folder)
    silence.tick()
    is_due, is_over = silence.is_due("launcher", pulse), silence.is_over("launcher", pulse)
    limits, name = silence.patience, socket.gethostname()
    limit_s = limits.limit_s - _OTHERS_FIRST_S
    if is_due and _is_first(folder / f"silent-{pulse}"):
        hint = f"; it is stopped by a signal, `kill -CONT {pid}` lets it go on" if is_stopped(pid) else ""
        text = f"the launcher of host {name} has not answered for {limits.warning_s:g} s{hint}"
        write_to_launcher(pid, f"lockstep: {text}")
    if is_over:
        if _is_first(folder / f"over-{pulse}"):
            text = f"the launcher of host {name} has not answered for {limit_s:g} s (LOCKSTEP_LAUNCHER_TIMEOUT)"
            write_to_launcher(pid, f"lockstep: {text}; its workers end")
        os.killpg(os.getpid(), signal.SIGKILL)  # the folder stays the launcher's


def _is_first(mark: Path) -> bool:
    """Return whether no other worker of this host has left this mark."""
    try:
        mark.touch(exist_ok=False)
    except OSError:
        return False
    return True


def _has_ended(liveness: ProcessLiveness) -> bool:
    """Return whether the launcher has ended, and has not only given up this worker: its folder is its own then."""
    deadline = time.monotonic() + _LAUNCHER_ENDS_S
    while not liveness.poll():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _remove_traces(setup: WorkerSetup) -> None:
    """Remove the folders of a run whose launcher is gone, and end the processes that its ranks have started."""
    folder, ranks = records_dir(), set(setup.folder.live_pids(range(setup.workers)).values())
    shutil.rmtree(setup.folder.path.parent, ignore_errors=True)
    if folder is not None:
        jobs.remove(folder.parent)
    # Every rank does this and then kills itself: a rank killed by another would leave its own cleanup undone. If
    # another rank has removed the list of ranks before this one read it, orphans get no time to terminate.
    end_orphans(
        setup.run_id, keep_children=False, keep=ranks, term_grace_s=TERM_GRACE_S if os.getpid() in ranks else 0.0
    )


def _make_report(rank: int, error: BaseException, setup: WorkerSetup) -> WorkerReport:
    now = time.time_ns()
    stopped = isinstance(error, InterruptedRunError)
    return WorkerReport(
        rank,
        now,
        type(error).__name__,
        _message(error),
        "" if stopped or isinstance(error, SystemExit) else _traceback(error),
        _exit_code(error),
        tuple(setup.folder.dead_ranks(r for r in range(setup.workers) if r != rank)),
        error.signal_number if isinstance(error, InterruptedRunError) else 0,
        error.checkpoint if isinstance(error, InterruptedRunError) else None,
        _pickled(error) if isinstance(error, LockstepError) and not stopped else "",
        _is_raised_in_communication(error),
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
        return f"breakpoint() has no terminal. Start the job with `lockstep run --debug-rank {find_world().rank} ...`."
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
    return names.get("__package__") in (__package__, f"{_PACKAGE}.ray") or names.get("__name__") == "runpy"


def _exit_with_report(report: WorkerReport, setup: WorkerSetup) -> None:
    _flush()
    setup.folder.write_report(report)
    if report.dead_peers or report.pickled:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if report.dead_peers and not report.repeats_watchdog:
            time.sleep(PEER_FAILURE_WAIT_SECONDS)
        elif not report.repeats_watchdog:  # the launcher knows which reports are still to come
            _wait_for_other_failures(setup)
    raise SystemExit(report.exit_code) from None


def _report_late(rank: int, setup: WorkerSetup, error: BaseException) -> None:
    """Report the failure of a program that something keeps running, and what that is.

    The launcher then ends the job as after every failure. A job of one rank is left to end by itself, as Python does.
    """
    report = _make_report(rank, error, setup)
    if report.stopped or not report.exit_code:
        return
    number = find_world().rank
    text = f"rank {number} has failed ({report.kind}: {report.reason.partition(_NEW_LINE)[0]}) and does not end:"
    with suppress(OSError):  # the launcher is gone, or the disk is full
        jobs.write_message(records_dir(), f"{text}\n  {describe_activity()}")
    if find_world().world_size > 1:
        setup.folder.write_report(report)


def _wait_for_other_failures(setup: WorkerSetup) -> None:
    deadline = time.monotonic() + SAME_ERROR_WAIT_SECONDS
    while not all(map(setup.folder.has_ended, range(setup.workers))) and time.monotonic() < deadline:
        time.sleep(0.01)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
