"""Worker processes that stay warm, on which tests run functions as the ranks of a job."""

from __future__ import annotations

import copyreg
import functools
import importlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from lockstep.pickling import pickled

from . import leaks, mpi
from .outcome import Outcome, RanksFailedError
from .process import WorkerProcess
from .worker import Job, fresh_store

__all__ = ["Outcome", "Pool", "RanksFailedError"]

Environment = Mapping[str, str | None]


class Pool:
    """Up to `limit` worker processes, started when first needed and used again by every test.

    Args:
        limit: the largest number of ranks a run may have.
        grace: seconds that the others may go on when one rank has failed.
        linger: seconds in which what a rank has let go of may end by itself.
    """

    def __init__(self, limit: int = 4, grace: float = 10.0, linger: float = leaks.LINGER) -> None:
        self.limit, self.grace, self.linger = limit, grace, linger
        _make_modules_picklable()
        self.watch = True  # whether what a rank leaves open is a failure
        self.folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._store: Any = None
        self._workers: list[WorkerProcess] = []
        self._mpi = mpi.MpiJob(self.folder, limit)
        self._files: set[leaks.File] = set()
        self._runs = 0

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        workers: int = 2,
        backend: str = "gloo",
        init: bool = True,
        timeout: float = 60.0,
        env: Environment | Callable[[int], Environment] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; return what each returned, in rank order.

        Every rank has the test's environment and torchrun's variables, the test's working directory
        and warning filters, seeds of 0, and one thread. Afterwards its process group is destroyed
        and all that is put back.

        Args:
            fn: any function, also one defined in a test; it is sent by cloudpickle.
            workers: number of ranks.
            backend: of the default process group that each rank has when `fn` is called; with
                "mpi4py" the ranks are processes of one `mpiexec`.
            init: False leaves that group to `fn`; MASTER_ADDR and MASTER_PORT lead to a store that
                is there.
            timeout: seconds after which a rank that has not ended counts as hung.
            env: variables to set on top (None: to unset), or a function that gives them for a rank.

        Raises:
            RanksFailedError: when a rank raised, died, hung or left something open.
        """
        options: dict[str, Any] = {
            "workers": workers,
            "backend": backend,
            "init": init,
            "timeout": timeout,
            "env": env,
        }
        outcomes = self.outcomes(fn, *args, **options, **kwargs)
        if any(outcome.failed for outcome in outcomes):
            raise RanksFailedError(_name(fn), outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., Any],
        *args: Any,
        workers: int = 2,
        backend: str = "gloo",
        init: bool = True,
        timeout: float = 60.0,
        env: Environment | Callable[[int], Environment] | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """As `run`, but return how each rank ended, for tests in which ranks are meant to fail."""
        if not 1 <= workers <= self.limit:
            raise ValueError(f"workers: expected 1 to {self.limit}, got {workers}")
        call = _ship(fn, args, kwargs)
        staff = self._staff(workers, backend)
        self._runs += 1
        group = (backend, f"run {self._runs}") if init else None
        store = None if init else fresh_store()
        with _killing(staff):
            for rank, worker in enumerate(staff):
                extra = env(rank) if callable(env) else env
                variables = _variables(rank, workers, store and store.port, extra or {})
                worker.start(_job(call, (rank, workers), variables, group, timeout))
            outcomes = _gather(staff, timeout, self.grace)
            _tidy(staff, outcomes, self.linger if self.watch else None)
        for outcome in outcomes:
            _show(outcome)
        return outcomes

    def close(self) -> None:
        """End all workers."""
        self._mpi.close()
        for worker in self._workers:
            worker.stop()
        self._workers.clear()
        self._store = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def belongings(self) -> tuple[set[int], set[leaks.File]]:
        """The child processes and the open file descriptors that are the pool's own."""
        own = {worker.pid for worker in self._workers if not worker.gone}
        return own | self._mpi.pids, self._files | self._mpi.files

    def _staff(self, count: int, backend: str) -> Sequence[WorkerProcess]:
        if backend == mpi.BACKEND:
            return self._mpi.staff(count, self._store_port())
        self._workers = [worker for worker in self._workers if worker.is_usable()]
        if len(self._workers) < count:
            port, before = self._store_port(), leaks.descriptors()
            fresh = [WorkerProcess(self.folder, port) for _ in range(count - len(self._workers))]
            self._workers += fresh
            with _killing(fresh):
                for worker in fresh:
                    worker.wait_until_ready()
            self._files |= leaks.descriptors() - before
        return self._workers[:count]

    def _store_port(self) -> int:
        if self._store is None:
            before = leaks.descriptors()
            self._store = fresh_store()
            self._files |= leaks.descriptors() - before
        port: int = self._store.port
        return port


def _gather(staff: Sequence[WorkerProcess], timeout: float, grace: float) -> list[Outcome]:
    start = time.monotonic()
    deadline = start + timeout
    outcomes: dict[int, Outcome] = {}
    while pending := [rank for rank in range(len(staff)) if rank not in outcomes]:
        handles = {
            handle: rank
            for rank in pending
            for handle in (staff[rank].connection, staff[rank].process.sentinel)
        }
        ready = wait(list(handles), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in sorted({handles[handle] for handle in ready}):  # type: ignore[index]
            outcomes[rank] = staff[rank].take_outcome(rank)
        if any(outcome.failed for outcome in outcomes.values()):
            deadline = min(deadline, time.monotonic() + grace)
    for rank in pending:
        seconds = time.monotonic() - start
        outcomes[rank] = Outcome(
            rank,
            "hung",
            time.monotonic(),
            message=f"no end after {seconds:.0f} s",
            trace=staff[rank].dump_stacks(),
        )
    return [outcomes[rank] for rank in range(len(staff))]


def _tidy(
    staff: Sequence[WorkerProcess], outcomes: Sequence[Outcome], linger: float | None
) -> None:
    answering = [
        (w, o) for w, o in zip(staff, outcomes, strict=True) if o.ending in ("returned", "raised")
    ]
    for worker, _ in answering:
        worker.release(linger)
    for worker, outcome in answering:
        left = worker.take_leftovers()
        if outcome.ending == "returned":
            outcome.left = left
        if left:
            worker.kill()
    for worker, outcome in zip(staff, outcomes, strict=True):
        outcome.output = worker.new_text(worker.output)
        if outcome.ending in ("hung", "died"):
            worker.kill()


@contextmanager
def _killing(workers: Sequence[WorkerProcess]) -> Iterator[None]:
    """Kill the workers when the body is left by an exception: nobody knows what they are doing
    then.
    """
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.kill()
        raise


def _job(
    call: bytes,
    place: tuple[int, int],
    variables: dict[str, str],
    group: tuple[str, str] | None,
    timeout: float,
) -> Job:
    return Job(
        call,
        place,
        variables,
        str(Path.cwd()),
        list(sys.path),
        list(warnings.filters),
        group,
        timeout,
    )


def _variables(rank: int, workers: int, port: int | None, extra: Environment) -> dict[str, str]:
    """The environment of one rank: the test's own, torchrun's variables, and `extra`."""
    own: dict[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": workers,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": workers,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "OMP_NUM_THREADS": 1,
    }
    if port is not None:  # there is a store, so rank 0 must not open one at that port
        own |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
    merged: dict[str, str | None] = {
        **os.environ,
        **{name: str(value) for name, value in own.items()},
        **extra,
    }
    return {name: value for name, value in merged.items() if value is not None}


def _ship(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call; test modules go along by value, as they cannot be imported by name
    elsewhere.
    """
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    if module is not None and Path(getattr(module, "__file__", None) or "").name.startswith(
        "test_"
    ):
        cloudpickle.register_pickle_by_value(module)
    return pickled((fn, args, kwargs))


def _make_modules_picklable() -> None:
    """Let functions that mention modules such as torch.backends.cudnn be sent; cloudpickle knows
    plain modules only.
    """
    for kind in {type(module) for module in sys.modules.values()} - {ModuleType}:
        if issubclass(kind, ModuleType):
            copyreg.pickle(kind, _by_name)


def _by_name(module: ModuleType) -> tuple[Callable[[str], ModuleType], tuple[str]]:
    return importlib.import_module, (module.__name__,)


def _show(outcome: Outcome) -> None:
    for line in outcome.output.splitlines():
        print(f"[rank {outcome.rank}] {line}")


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
