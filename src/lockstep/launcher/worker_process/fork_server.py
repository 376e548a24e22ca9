"""Starts multiprocessing's fork server, the parent of workers, and settles before that what workers
inherit from it.

PyTorch is loaded there, not here: a launcher imports what needs PyTorch afterwards, so that both
load it at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import context, forkserver, popen_forkserver, resource_tracker, util
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from ... import environment
from ...environment.variable_table import RUN_ID
from ...errors import ConfigError
from ...interruption import LAUNCHER_SIGNALS
from ...system import socket_folders
from ...system.processes import UNKNOWN_EXIT_CODE
from .. import host_requirements
from ..options import JobOptions

__all__ = [
    "check_memory",
    "default_workers",
    "hidden_main",
    "note_how_to_know",
    "prepare_workers",
    "start_fork_server",
    "starting_processes",
    "threads_per_worker",
    "wait_until_loaded",
]

# held while the main module is hidden
_main_lock = threading.Lock()


def start_fork_server(preload: Sequence[str] = ()) -> None:
    """Start multiprocessing's fork server, with PyTorch and the modules of `preload` loaded, unless
    it is running.
    """
    host_requirements.check_shared_memory()
    socket_folders.prepare_multiprocessing()
    multiprocessing.set_forkserver_preload([f"{__package__}.preload", *preload])
    with hidden_main():
        _ensure_running()


def _ensure_running() -> None:
    """Start the fork server unless it is running, as it may have been killed."""
    resource_tracker.ensure_running()  # before the mask: starting it would unblock both signals
    # The mask is inherited. Without it Ctrl-C would end the server with a traceback while it loads;
    # and SIGTERM, which Slurm sends to every process of a step, or the end of the terminal, without
    # one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def hidden_main() -> Iterator[None]:
    """Hide this program's `__main__` from multiprocessing, so that child processes do not run it
    again.

    Functions are pickled by value, so workers do not need the main module, and a script without an
    ``if __name__ == "__main__"`` guard would launch itself once more. Starting a process also fixes
    multiprocessing's default start method; it is reset afterwards.
    """
    main = sys.modules["__main__"]
    with _main_lock:
        hidden = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
        method = multiprocessing.get_start_method(allow_none=True)
        main.__spec__ = None
        vars(main).pop("__file__", None)
        try:
            yield
        finally:
            vars(main).update(hidden)
            if method is None:
                multiprocessing.set_start_method(None, force=True)


# in which the fork server tells the exit code of a process that has ended; it may be stopped
_CODE_S = 1.0


class _Process(popen_forkserver.Popen):
    """A process that has ended when its own pidfd says so; the fork server, which may end before
    it, tells its code.

    multiprocessing takes the end of the fork server for that of all of its processes.

    Attributes:
        is_finished: returns whether its work is done, so that its exit code is 0 if nobody can
            tell.
    """

    is_finished: Callable[[], bool] = staticmethod(lambda: False)

    def _launch(self, process_obj: BaseProcess) -> None:
        super()._launch(process_obj)  # type: ignore[misc]
        self._status: int = self.sentinel
        self._finalizers = [self.finalizer]
        try:
            self.sentinel = os.pidfd_open(self.pid)
        except (OSError, AttributeError):  # it has ended, or the kernel has no pidfds
            return
        self._finalizers.append(util.Finalize(self, os.close, (self.sentinel,)))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None if the process runs, and `flag` says not to wait for it."""
        if self.returncode is None:
            if not wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                return None
            self.returncode = self._code()
        return self.returncode

    def _code(self) -> int:
        if wait([self._status], _CODE_S):
            try:
                return forkserver.read_signed(self._status)  # type: ignore[no-any-return]
            except (OSError, EOFError):  # the fork server is gone
                pass
        return 0 if self.is_finished() else UNKNOWN_EXIT_CODE

    def close(self) -> None:
        """Close the descriptors."""
        for finalizer in self._finalizers:
            finalizer()


def note_how_to_know(process: BaseProcess, is_finished: Callable[[], bool]) -> None:
    """Let `is_finished` say whether a process that has ended had done its work, where its exit code
    is not known.
    """
    popen: Any = process._popen  # type: ignore[attr-defined]
    if isinstance(popen, _Process):
        popen.is_finished = is_finished


@contextmanager
def starting_processes() -> Iterator[None]:
    """Let processes that are started during the body outlive the fork server; `__main__` is hidden,
    see `hidden_main`.

    A fork server that has been killed is started again.
    """
    kind: Any = context.ForkServerProcess
    with hidden_main():
        if forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
            _ensure_running()
        before = kind._Popen
        kind._Popen = staticmethod(_Process)
        try:
            yield
        finally:
            kind._Popen = staticmethod(before)


# Memory of a worker that has imported PyTorch and joined its job, beyond what it shares with the
# fork server.
_LEAST_MEMORY = 64 << 20


def check_memory(workers: int) -> None:
    """Check that so many workers fit into the available memory of this host, where it is known.

    Raises:
        ConfigError: if they do not.
    """
    import psutil

    try:
        available = psutil.virtual_memory().available
    except OSError:  # no /proc
        return
    most = max(1, available // _LEAST_MEMORY)
    if workers > most:
        shortage = (
            f"{available / (1 << 30):.1f} GiB of its memory are available, and each worker needs "
            "at least"
        )
        expected = f"at most {most} on this host: {shortage} {_LEAST_MEMORY >> 20} MiB"
        cores = environment.usable_cores()
        hint = (
            f"Start fewer workers (this host has {cores} core{'s'[: cores != 1]}), or end other "
            "programs."
        )
        raise ConfigError("workers", expected, workers, hint)


def default_workers() -> int:
    """Return the usual number of workers: one per accelerator, or 1 on a host without any."""
    import torch

    return max(1, torch.accelerator.device_count())


def threads_per_worker(config: JobOptions, workers: int) -> int:
    """Return --threads, or else OMP_NUM_THREADS, or else so many that no two threads share a
    core.
    """
    return config.threads or environment.threads() or max(1, environment.usable_cores() // workers)


def prepare_workers(config: JobOptions, workers: int) -> None:
    """Set the environment of the workers and start the fork server, while this process continues.

    Raises:
        ConfigError: for more workers than this host has memory for, before anything is opened or
            started for them.
    """
    check_memory(workers)
    threads = threads_per_worker(config, workers)
    # torch and its libraries read these when they are imported, also in the fork server
    environment.set_defaults(
        {"OMP_NUM_THREADS": str(threads), RUN_ID.name: f"run-{os.getpid()}-{time.time_ns()}"}
    )
    if config.start_method == "forkserver":
        # what torch imports for the first optimizer, 1.6 s of a core, would delay each worker that
        # joins
        start_fork_server((*config.preload, "torch._dynamo") if config.elastic else config.preload)


def wait_until_loaded(config: JobOptions) -> None:
    """Wait until the fork server has loaded PyTorch, so that a launcher that joins a job does not
    wait later.
    """
    if config.start_method == "forkserver":
        process = multiprocessing.get_context("forkserver").Process(target=int)
        with starting_processes():
            process.start()
        process.join()
