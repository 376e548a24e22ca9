"""Which worker failed first, and what the end of all workers means."""

from __future__ import annotations

import base64
import bdb
import io

import pytest
from msgspec.structs import replace

from lockstep.errors import DataError, InterruptedRunError, WorkerError
from lockstep.job.messages import Failure
from lockstep.launcher.worker_process import worker
from lockstep.launcher.worker_status import (
    WorkerResults,
    common_error,
    first_failure,
    pickle_by_value,
    raise_failure,
)


def failed(rank: int, time: int, *dead_peers: int, kind: str = "RuntimeError") -> Failure:
    return Failure(rank, time, kind, f"of rank {rank}", dead_peers=dead_peers)


@pytest.mark.parametrize(
    ("results", "first"),
    [
        (WorkerResults(), None),
        (WorkerResults([failed(1, 5), failed(0, 6)], codes={0: 1}), 1),
        # a silent death comes before a failure that saw it, whatever the launcher saw first
        (WorkerResults([failed(0, 5, 1)], dead_ranks=[1], codes={1: -9}), 1),
        (WorkerResults([failed(0, 5, 1)], dead_ranks=[1], codes={0: 1}), 1),
        # an exception comes before the deaths that follow from it
        (WorkerResults([failed(2, 5)], dead_ranks=[0], codes={0: -6}), 2),
        # of those found dead together, the one that the launcher did not end itself
        (WorkerResults([], dead_ranks=[0, 1, 2], codes={1: -9}), 1),
        (WorkerResults([], dead_ranks=[1], codes={0: -9}), 1),
        (WorkerResults([], codes={2: 4}), 2),
        (WorkerResults([failed(0, 5, 1), failed(1, 4, 2)], codes={}), 0),
    ],
)
def test_the_first_failure(results: WorkerResults, first: int | None) -> None:
    error = first_failure(results)
    assert (error and error.rank) == first


def test_a_breakpoint_without_a_terminal_names_the_option_that_gives_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert worker._message(bdb.BdbQuit()).endswith(
        "Start the job with `lockstep run --debug-rank 0 ...`."
    )
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert worker._message(bdb.BdbQuit()) == ""  # the user has left the debugger


def bad(rank: int, text: str = "a") -> Failure:
    error = DataError(text)
    return Failure(
        rank, rank, "DataError", text, pickled=base64.b64encode(pickle_by_value(error)).decode()
    )


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (WorkerResults([bad(0), bad(1)], workers=2), "a"),
        (WorkerResults([bad(1)], workers=1), "a"),
        (WorkerResults([bad(1)], workers=2), None),
        (WorkerResults([bad(0), bad(1, "b")], workers=2), None),
        (WorkerResults([bad(0), failed(1, 2)], workers=2), None),
        (WorkerResults([failed(0, 1), failed(0, 1)], workers=2), None),
        (WorkerResults(dead_ranks=[0], workers=1), None),
    ],
)
def test_the_failure_that_all_share(results: WorkerResults, said: str | None) -> None:
    error = common_error(results)
    assert said == (None if error is None else str(error))


STOPPED = Failure(1, 9, "InterruptedRunError", "stopped", signal_number=15, checkpoint="c")


@pytest.mark.parametrize(
    ("results", "raised"),
    [
        (WorkerResults(), None),
        (WorkerResults(signals=[2]), KeyboardInterrupt),
        (WorkerResults(signals=[15]), InterruptedRunError),
        (WorkerResults([STOPPED]), InterruptedRunError),
        (WorkerResults([STOPPED], signals=[15]), InterruptedRunError),
        (WorkerResults([failed(0, 1), STOPPED], signals=[15]), WorkerError),
        (
            WorkerResults([failed(0, 1, kind="KeyboardInterrupt"), STOPPED], signals=[2]),
            InterruptedRunError,
        ),
        (WorkerResults([failed(0, 1, kind="KeyboardInterrupt")], signals=[2]), KeyboardInterrupt),
        (WorkerResults([failed(0, 1, kind="KeyboardInterrupt")]), WorkerError),
        (
            WorkerResults([replace(failed(0, 1), in_collective=True)], signals=[2]),
            KeyboardInterrupt,
        ),
        (WorkerResults([replace(failed(0, 1), in_collective=True), STOPPED]), InterruptedRunError),
        (WorkerResults([replace(failed(0, 1), in_collective=True)]), WorkerError),
        (WorkerResults(dead_ranks=[0], codes={0: -15}, signals=[15]), InterruptedRunError),
        (
            WorkerResults(dead_ranks=[0], signals=[15]),
            InterruptedRunError,
        ),  # nobody has its exit code
        (WorkerResults(dead_ranks=[0], codes={0: -15}), WorkerError),
        (WorkerResults(dead_ranks=[0], codes={0: -9}, signals=[2]), WorkerError),
        (WorkerResults(dead_ranks=[0], codes={0: -9}, signals=[2], killed=True), KeyboardInterrupt),
        (WorkerResults([STOPPED], dead_ranks=[0], codes={0: -9}, killed=True), InterruptedRunError),
        (WorkerResults(dead_ranks=[0], codes={1: -9}, killed=True), WorkerError),
    ],
)
def test_what_the_end_means(results: WorkerResults, raised: type[BaseException] | None) -> None:
    if raised is None:
        raise_failure(results)
    else:
        with pytest.raises(raised):
            raise_failure(results)
