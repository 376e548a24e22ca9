"""Threads stay, work at the same time, and take the caller's settings with them."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.parallel.replicas import replica_threads
from lockstep.replicas import ReplicaError, Threads, parallel_apply


def test_tasks_run_at_the_same_time_in_threads_that_stay() -> None:
    pool, meeting = Threads(2), threading.Barrier(2)

    def meet() -> int:
        meeting.wait(60)  # alone, a task would wait in vain
        return threading.get_ident()

    assert pool.run([meet, meet]) == pool.run([meet, meet])


def test_a_fork_starts_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Threads(1)
    (parents,) = pool.run([threading.get_ident])
    held = pool._pools
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a child
    assert pool.run([threading.get_ident]) != [parents]
    del held


def test_cores_are_shared_and_the_callers_setting_stays() -> None:
    torch.set_num_threads(6)
    pool = Threads(2)
    assert pool.run([torch.get_num_threads] * 2) == [3, 3]
    assert torch.get_num_threads() == 6
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    torch.set_num_threads(1)
    assert found == [6]


def test_the_first_failure_is_raised_when_all_have_ended() -> None:
    pool, ended = Threads(3), threading.Event()
    others_failed = threading.Event()

    def fail(text: str) -> None:
        others_failed.set()
        raise ValueError(text)

    def finish() -> None:
        others_failed.wait(60)
        ended.set()

    with pytest.raises(ValueError, match="first"):
        pool.run([partial(fail, "first"), partial(fail, "second"), finish])
    assert ended.is_set()


def test_after_an_interruption_nothing_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, go, ended = Threads(1), threading.Event(), threading.Event()
    waiting = replica_threads.wait

    def interrupted(futures: object) -> None:
        monkeypatch.setattr(replica_threads, "wait", waiting)
        go.set()
        raise KeyboardInterrupt

    def work() -> None:
        go.wait(60)
        ended.set()

    monkeypatch.setattr(replica_threads, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run([work])
    assert ended.is_set()


def test_settings_of_the_caller_hold_in_the_threads() -> None:
    def settings() -> tuple[bool, bool, bool, torch.dtype]:
        cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *cast

    def found() -> list[object]:
        return parallel_apply([settings] * 2, [(), ()], devices=["cpu"] * 2)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert found() == [(False, False, True, torch.float16)] * 2
    with torch.inference_mode():
        assert [one[:2] for one in found()] == [(False, True)] * 2  # type: ignore[index]
    assert [one[0] for one in found()] == [True] * 2  # type: ignore[index]


def test_arguments_reach_their_function() -> None:
    functions = [lambda a, b=0: (a, b), lambda a, b=0: [a, b]]
    assert parallel_apply(functions, [1, (2,)], [{}, {"b": 3}]) == [(1, 0), [2, 3]]


def test_a_failure_names_device_and_shapes() -> None:
    model = torch.nn.Linear(4, 1)
    with pytest.raises(
        ReplicaError, match=r"replica 1 of 2 on cpu, given \[2, 3\] float32: RuntimeError: .*mat1"
    ) as info:
        parallel_apply([model, model], [torch.zeros(2, 4), torch.zeros(2, 3)])
    assert isinstance(info.value.__cause__, RuntimeError)
    assert (info.value.replica, info.value.device) == (1, "cpu")


def test_lists_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="'inputs': 1"):
        parallel_apply([abs, abs], [1])
    with pytest.raises(ConfigError, match="a thread for each of 2"):
        parallel_apply([abs, abs], [1, 2], threads=Threads(1))
    with pytest.raises(ConfigError, match="at least one thread"):
        Threads(0)
