"""Which errors of a step the workers of an elastic job go on after, and which events their callbacks are given."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.communicator.elastic_communicator import failure_reason
from lockstep.errors import DesyncError, MembershipChangedError, RankLostError, StallError, TransportError
from lockstep.training.callbacks import Callback
from lockstep.training.elastic_loop import ElasticCallbacks, leave_later
from lockstep.training.stop_signals import StopSignals


@pytest.mark.parametrize(
    "error",
    [
        MembershipChangedError(3),
        TransportError("shm: rank 1 is gone"),
        RankLostError(1, "shm: all_reduce: the process of rank 1 (7) has ended"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"
        ),
    ],
)
def test_a_broken_group_is_one_to_go_on_after(error: RuntimeError) -> None:
    assert failure_reason(error) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        DesyncError("they differ"),
        StallError("slow"),
        RankLostError(1, "Rank 1 has died.", "{}"),
    ],
)
def test_an_error_of_the_program_and_a_report_are_not(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as raised:
        failure_reason(error)
    assert raised.value is error


class Seen(Callback):
    """What it was called for."""

    def __init__(self, every_rank: bool = False) -> None:
        self.every_rank = every_rank
        self.losses: list[tuple[int, float]] = []
        self.rows: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def on_loss(self, trainer: Any, result: Any, loss: float) -> None:
        self.losses.append((result.step, loss))

    def on_row(self, trainer: Any, row: Any) -> None:
        self.rows.append(row)


def a_run(steps_done: int, rows: int) -> Any:
    return SimpleNamespace(step=SimpleNamespace(steps_done=steps_done), history=[{}] * rows, epoch=0)


def a_result(step: int) -> Any:
    return SimpleNamespace(step=step)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_is_given_the_events_of_a_step_that_only_others_have_completed(rank: int) -> None:
    own, on_all = Seen(), Seen(every_rank=True)
    callbacks = ElasticCallbacks([own, on_all], rank)
    callbacks.call("on_loss", a_run(5, 0), a_result(4), 0.25)
    ahead = a_run(6, 1)
    events = [("on_loss", (a_result(4), 0.25)), ("on_loss", (a_result(5), 0.5)), ("on_row", ({"step": 6},))]
    callbacks.set_events(ahead, events)
    callbacks.catch_up(ahead, done=5)
    callbacks.call("on_loss", ahead, a_result(5), 0.5)  # when the step is settled
    assert on_all.losses == [(4, 0.25)]  # what it keeps comes with the others' state
    assert (own.losses, own.rows) == (([(4, 0.25), (5, 0.5)], [{"step": 6}]) if rank == 0 else ([], []))


def test_a_worker_that_was_told_to_leave_a_complete_training_does_not_end_there() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    client: Any = SimpleNamespace(leaving=False)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
            leave_later(signals, client)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert client.leaving and not received
