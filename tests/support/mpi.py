"""The pool's workers as the ranks of one MPI job, which mpiexec has started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from . import leaks
from .process import PRELOAD, START_LIMIT, WorkerProcess
from .worker import fresh_store, serve

__all__ = ["BACKEND", "MpiJob", "find_mpiexec", "missing"]

BACKEND = "mpi4py"
TESTS = Path(__file__).parents[1]


def find_mpiexec() -> str | None:
    """The path of mpiexec: the one installed beside this Python, or else that of the system."""
    return shutil.which(
        "mpiexec",
        path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    )


def missing() -> str:
    """What of MPI is not installed; "" when all is."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'lockstep-train[mpi]'"
    return "" if find_mpiexec() else "mpiexec is not installed: pip install 'lockstep-train[mpi]'"


class RankProcess:
    """One process of the job, with what of `multiprocessing.Process` the pool asks for; it is
    mpiexec's child.
    """

    exitcode = None  # mpiexec has it

    def __init__(self, pid: int) -> None:
        self.pid, self.sentinel = pid, os.pidfd_open(pid)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not wait([self.sentinel], 0)

    def join(self, timeout: float) -> None:
        """Wait for its end."""
        wait([self.sentinel], timeout)

    def kill(self) -> None:
        """End it; mpiexec then ends the others."""
        if self.is_alive():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self.pid).kill()

    def close(self) -> None:
        """Stop watching it."""
        os.close(self.sentinel)


@dataclass
class MpiWorker(WorkerProcess):
    """One rank, which has connected itself to the pool."""

    link: Any = None

    def __post_init__(self) -> None:
        self.connection = self.link
        files = tempfile.mkdtemp(dir=self.folder)
        self.output, self.stacks = Path(files, "output"), Path(files, "stacks")
        self.rank, pid = self.connection.recv()
        self.process: Any = RankProcess(pid)
        self.connection.send((self.port, self.output, self.stacks))


class MpiJob:
    """One `mpiexec` whose ranks serve the pool; started when first needed, and again when a rank
    has ended.

    Args:
        folder: where it keeps its files.
        ranks: how many; a run takes the first of them.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        self._program: subprocess.Popen[bytes] | None = None
        self._workers: list[MpiWorker] = []
        self.pids: set[int] = set()
        self.files: set[leaks.File] = set()

    def staff(self, count: int, port: int) -> Sequence[WorkerProcess]:
        """The first `count` ranks, ready for a job; without MPI the test is skipped.

        Args:
            count: the number of ranks.
            port: of the pool's store.
        """
        if missing():
            pytest.skip(missing())
        if not self._workers or not all(worker.is_usable() for worker in self._workers):
            self.close()
            before = leaks.descriptors()
            self._start(port)
            self.files = leaks.descriptors() - before
        return self._workers[:count]

    def close(self) -> None:
        """End it: all ranks at once, as each waits for the others in MPI_Finalize."""
        for worker in self._workers:
            worker.connection.close()
        if self._program is not None:
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(10)
            self._program.kill()
            self._program.wait()
        for worker in self._workers:
            worker.kill()
        self._workers, self._program = [], None
        self.pids, self.files = set(), set()

    def _start(self, port: int) -> None:
        said = self._folder / "mpiexec"
        with (
            tempfile.TemporaryDirectory(dir=self._folder) as folder,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.bind(f"{folder}/pool")
            server.listen(self._ranks)
            command = [
                str(find_mpiexec()),
                "-n",
                str(self._ranks),
                sys.executable,
                "-m",
                "support.mpi",
            ]
            paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
            with said.open("wb") as file:
                self._program = subprocess.Popen(
                    [*command, f"{folder}/pool"],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=env,
                )
            links = [self._accept(server, said) for _ in range(self._ranks)]
        workers = [MpiWorker(self._folder, port, link=link) for link in links]
        self._workers = sorted(workers, key=lambda worker: worker.rank)
        for worker in self._workers:
            worker.wait_until_ready()
        self.pids = {self._program.pid} | {
            c.pid for c in psutil.Process(self._program.pid).children(recursive=True)
        }

    def _accept(self, server: socket.socket, said: Path) -> Connection:
        deadline = time.monotonic() + START_LIMIT
        server.settimeout(0.2)
        while (
            self._program is not None
            and self._program.poll() is None
            and time.monotonic() < deadline
        ):
            with suppress(TimeoutError):
                accepted, _ = server.accept()
                accepted.setblocking(True)
                return Connection(accepted.detach())
        self.close()
        raise RuntimeError(f"mpiexec has not started the pool's ranks:\n{said.read_text()}")


def _be_a_rank(address: str) -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    # torch keeps two descriptors from its first store on; no job shall seem to leave them
    fresh_store()
    from mpi4py import MPI  # starts MPI, which all ranks must do together

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        connection = Connection(client.detach())
    connection.send((MPI.COMM_WORLD.rank, os.getpid()))
    port, output, stacks = connection.recv()
    serve(connection, port, output, stacks)


if __name__ == "__main__":
    _be_a_rank(sys.argv[1])
