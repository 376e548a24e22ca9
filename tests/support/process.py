"""The pool's side of one worker process."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from lockstep.launcher.worker_process.fork_server import start_fork_server

from .outcome import Outcome
from .worker import STACK_SIGNAL, Job, Release, serve

__all__ = ["WorkerProcess", "start_server"]

# Imported once, by the server from which all workers are forked. The first optimizer of a process
# imports the last, which takes longer than all others but torch itself.
PRELOAD = ["numpy", "psutil", "cloudpickle", "pytest", "lockstep.training.trainer", "torch._dynamo"]

START_LIMIT = 100.0  # seconds for the first worker: importing torch from a cold disk
TIDY_LIMIT = 10.0  # seconds to leave the process group
STACK_LIMIT = 2.0  # seconds to wait for the stacks of a rank that hangs


def start_server() -> None:
    """Start multiprocessing's fork server, if there is none yet, with all that workers of tests
    need.
    """
    with _one_thread():
        start_fork_server(PRELOAD)


@dataclass
class WorkerProcess:
    """One worker process: how to start it, talk to it and end it.

    Args:
        folder: where it keeps its files.
        port: of the pool's store.
    """

    folder: Path
    port: int
    gone: bool = False
    _read: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start_server()
        context = multiprocessing.get_context("forkserver")
        self.connection: Connection
        self.connection, far = context.Pipe()
        files = tempfile.mkdtemp(dir=self.folder)
        self.output, self.stacks = Path(files, "output"), Path(files, "stacks")
        self.process: ForkServerProcess = context.Process(
            target=serve,
            args=(far, self.port, self.output, self.stacks),
            name="pool worker",
            daemon=True,
        )
        self.process.start()
        far.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self.process.pid is not None
        return self.process.pid

    def is_usable(self) -> bool:
        """Whether it lives and waits for a job."""
        # its end of the connection closes before the fork server knows that it has ended; no answer
        # is due otherwise
        if not self.gone and (self.connection.poll() or not self.process.is_alive()):
            self.kill()
        return not self.gone

    def wait_until_ready(self) -> None:
        """Return when it can take a job."""
        answer = self._receive(START_LIMIT)
        if answer != "ready":
            raise RuntimeError(
                "a pool worker did not start: "
                f"{answer or 'no answer'}\n{self.new_text(self.output)}"
            )

    def start(self, job: Job) -> None:
        """Give it a job."""
        self.connection.send(job)

    def take_outcome(self, rank: int) -> Outcome:
        """What it has answered, or how it died."""
        try:
            if self.connection.poll():
                outcome: Outcome = cloudpickle.loads(self.connection.recv_bytes())
                return outcome
        except (EOFError, ConnectionError):
            pass
        at = time.monotonic()
        self.process.join(5)
        code = self.process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return Outcome(
            rank, "died", at, message=how, exit_code=code, trace=self.new_text(self.stacks)
        )

    def release(self, linger: float | None) -> None:
        """Let it leave the process group."""
        with suppress(ConnectionError):
            self.connection.send(Release(linger))

    def take_leftovers(self) -> list[str]:
        """What it still holds after tidying up."""
        answer = self._receive(TIDY_LIMIT)
        if answer is None and self.process.is_alive():
            wrote = self.new_text(self.output)  # an exception of its own, if it no longer serves
            return [
                f"a process group that it cannot leave within {TIDY_LIMIT:g} "
                f"s\n{self.dump_stacks()}\n{wrote}"
            ]
        if answer is None:
            return [
                "nothing, as its process died while tidying up with exit code "
                f"{self.process.exitcode}"
            ]
        left: list[str] = answer
        return left

    def dump_stacks(self) -> str:
        """The stacks of its threads now."""
        self.new_text(self.stacks)
        with suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_LIMIT
        text = ""
        while time.monotonic() < deadline:
            more = self.new_text(self.stacks)
            if text and not more:
                return text
            text += more
            time.sleep(0.05)
        return text or "(no stack: the process does not answer signals)"

    def new_text(self, path: Path) -> str:
        """What was written to one of its files since the last call."""
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
            self._read[path] = file.tell()
        return data.decode(errors="replace")

    def stop(self) -> None:
        """Ask it to end, and make sure of it."""
        if not self.gone:
            self.connection.close()
            self.process.join(5)
            self._finish()

    def kill(self) -> None:
        """End it and its children at once."""
        if self.gone:
            return
        with suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        self._finish()

    def _finish(self) -> None:
        self.gone = True
        self.process.kill()
        self.process.join(10)
        self.connection.close()
        self.process.close()

    def _receive(self, limit: float) -> Any:
        try:
            return self.connection.recv() if self.connection.poll(limit) else None
        except (EOFError, ConnectionError):
            self.process.join(5)
            return None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Libraries size their thread pools on import, which happens in the server that all workers are
    forked from.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
