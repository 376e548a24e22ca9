"""Modules of Horovod beside `horovod.torch` that programs import from."""

from __future__ import annotations

import os
import threading

import pytest

import lockstep.compat.horovod.torch as hvd
from lockstep.compat.horovod.common.util import env, is_iterable, is_version_greater_equal_than
from lockstep.compat.horovod.runner.util.threads import (
    execute_function_multithreaded,
    in_thread,
    on_event,
)


def test_a_function_in_a_thread() -> None:
    found: list[int] = []
    thread = in_thread(found.append, (3,), name="three")
    thread.join()
    assert (found, thread.name, thread.daemon) == ([3], "three", True)
    in_thread(int, ("no number",), silent=True).join()
    with pytest.raises(ValueError, match=r"args: expected a tuple; \(arg,\) for one argument"):
        in_thread(found.append, 3)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_a_thread_is_shown_unless_it_is_to_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[type[BaseException] | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda about: shown.append(about.exc_type))
    in_thread(int, ("no number",), silent=True).join()
    assert shown == []
    in_thread(int, ("no number",)).join()
    assert shown == [ValueError]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_function_when_an_event_is_set(stopped: bool) -> None:
    event, stop, found = threading.Event(), threading.Event(), list[int]()
    thread = on_event(
        event, found.append, (1,), stop=stop, check_stop_interval_s=0.01, daemon=False
    )
    (stop if stopped else event).set()
    thread.join()
    assert found == ([] if stopped else [1])
    event.set()
    on_event(event, found.append, (2,)).join()
    assert found[-1] == 2
    with pytest.raises(ValueError, match="event: expected"):
        on_event(None, found.append)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stop: expected"):
        on_event(event, found.append, daemon=False)


def test_a_function_in_many_threads() -> None:
    assert execute_function_multithreaded(pow, [[2, n] for n in range(9)]) == {
        n: 2**n for n in range(9)
    }
    assert execute_function_multithreaded(pow, [], max_concurrent_executions=2) == {}
    both = threading.Barrier(3)
    assert (
        execute_function_multithreaded(lambda: both.wait(60), [[], []], block_until_all_done=False)
        is None
    )
    both.wait(60)
    with pytest.raises(ZeroDivisionError):
        execute_function_multithreaded(divmod, [[1, 1], [1, 0]])


def test_variables_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_A", "1")
    monkeypatch.setenv("HOROVOD_C", "3")
    monkeypatch.delenv("HOROVOD_B", raising=False)

    def seen() -> list[str | None]:
        return [os.environ.get(f"HOROVOD_{name}") for name in "ABC"]

    with env(HOROVOD_A="2", HOROVOD_B="2", HOROVOD_C=None):
        assert seen() == ["2", "2", "3"]
    assert seen() == ["1", None, "3"]


def test_small_questions() -> None:
    assert is_iterable(range(2))
    assert not is_iterable(2)
    assert is_version_greater_equal_than("2.10.0+cpu", "2.9.1")
    assert not is_version_greater_equal_than("2.9", "2.9.1")
    for wrong in ((2.9, "2.9.1"), ("2.9.1", "2.9")):
        with pytest.raises(ValueError, match=": expected"):
            is_version_greater_equal_than(*wrong)  # type: ignore[arg-type]


def test_the_numbers_of_process_sets() -> None:
    hvd.init()
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0]}
    hvd.shutdown()
