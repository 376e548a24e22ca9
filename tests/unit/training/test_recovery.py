"""Which losses the workers of an elastic job go on after, what they repeat, and which hooks
callbacks are given.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.communicator.elastic_communicator import failure_reason
from lockstep.elastic.client import WorkerLeft
from lockstep.elastic.membership import View
from lockstep.errors import (
    ConfigError,
    DesyncError,
    InterruptedRunError,
    LockstepError,
    MembershipChangedError,
    RankLostError,
    StallError,
    TransportError,
)
from lockstep.training.callbacks import Callback
from lockstep.training.callbacks.group import CallbackGroup
from lockstep.training.recovery import (
    REGROUP,
    ElasticRecovery,
    MissingRecovery,
    Recovery,
    leave_later,
)
from lockstep.training.stop_signals import StopSignals


@pytest.mark.parametrize(
    "error",
    [
        MembershipChangedError(3),
        TransportError("shm: rank 1 is gone"),
        RankLostError(1, "shm: all_reduce: the process of rank 1 (7) has ended"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
            "[127.0.0.1]"
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


# --- operations
# --------------------------------------------------------------------------------------------------


class Group:
    """A communicator of one worker, which notes why it regroups; its training is complete at
    once.
    """

    def __init__(self) -> None:
        self.rank, self.size, self.device, self.trainings = 0, 1, torch.device("cpu"), 0
        self.is_joining, self.keeps_values = False, True
        self.client = SimpleNamespace(
            wait_for_lease=lambda: None,
            wants_to_regroup=False,
            leaving=False,
            stop_signal=0,
            enter=self.note,
            check=lambda: None,
            complete=self.ended,
            generation=1,
        )
        self.reasons: list[tuple[str, bool]] = []
        self.noted: list[Any] = []
        self.results: list[Any] = []
        self.endings = [True]

    def note(self, *what: Any) -> None:
        self.noted.append(what)

    def ended(self) -> bool:
        return self.endings.pop()

    has_earlier_result = False

    def joins_before_result(self) -> bool:
        return True

    def note_result(self, training: int, result: object) -> None:
        self.results.append(result)

    def forget_results(self, training: int) -> None:
        """All are published at once."""

    def publish_results(self) -> None:
        self.noted.extend(self.results)
        self.results.clear()

    def barrier(self) -> None:
        self.noted.append("barrier")

    def broadcast_object(self, value: Any, root: int) -> Any:
        return value

    def regroup_until(
        self,
        commit: Any,
        adapt: Any,
        reason: str = "",
        at_boundary: bool = False,
        check: Any = None,
    ) -> None:
        self.reasons.append((reason, at_boundary))
        adapt(View(len(self.reasons), (0,), (0,), (commit(),), 0))


class State:
    """The state of a training: what happens to it."""

    def __init__(self) -> None:
        self.result, self.happened = "the result", list[str]()
        self.divides_state = False

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.happened.append(name)


def lost_once(result: Any) -> Any:
    """An operation during which a worker is lost, once."""
    errors: list[RuntimeError] = [TransportError("gone")]

    def operation() -> Any:
        if errors:
            raise errors.pop()
        return result

    return operation


def test_an_operation_is_repeated_where_it_was_called() -> None:
    comm: Any = Group()
    recovery, state = ElasticRecovery(comm), State()
    with recovery.training(state, 3, "folder") as takes_part, recovery.until_all_have_ended():
        assert takes_part and state.happened == ["commit"]
        assert recovery.run(lost_once(7)) == 7
        repeated = [
            "begin",
            "note_seen",
            "undo",
            "leave",
            "regroup",
            "begin",
            "note_seen",
            "commit",
        ]
        assert state.happened[1:] == repeated and comm.reasons == [("gone", False)]
        assert recovery.run(lambda a, b: a + b, 1, 2, meets=False) == 3
        assert recovery.read(lost_once(8)) == 8
        recovery.once(lost_once(9))
        recovery.boundary(3 * REGROUP)
        recovery.boundary(2.0)
    assert comm.reasons == [("gone", False)] * 3 + [("", True)]
    assert comm.noted == [(0, 3, "folder"), "barrier", "the result"] and comm.keeps_values


class Step:
    """A step of which each worker updates a part; a worker is lost in one of its exchanges, once."""

    def __init__(self, recovery: ElasticRecovery, lost_in: str) -> None:
        self.recovery, self.lost_in, self.happened = recovery, lost_in, list[str]()

    def exchange(self, name: str) -> None:
        self.happened.append(name)
        if name == self.lost_in:
            self.lost_in = ""
            raise TransportError("gone")

    def __call__(self) -> int:
        self.happened.append("passes")
        self.recovery.update(
            lambda: self.exchange("meet"),
            lambda _: self.happened.append("update"),
            lambda: self.exchange("give out"),
        )
        self.exchange("rest")
        return 7


@pytest.mark.parametrize(
    ("lost_in", "attempts", "finishes"), [("meet", 2, False), ("give out", 1, True)]
)
def test_an_update_that_a_worker_has_made_is_completed_and_not_repeated(
    lost_in: str, attempts: int, finishes: bool
) -> None:
    comm: Any = Group()
    recovery, state = ElasticRecovery(comm), State()
    state.divides_state = True
    step = Step(recovery, lost_in)
    with recovery.training(state, 3), recovery.until_all_have_ended():
        assert comm.client.hands_over
        assert recovery.run(step) == 7
        assert not recovery.is_updating
    assert step.happened.count("update") == 1
    assert step.happened.count("passes") == attempts
    assert ("finish_update" in state.happened) is finishes
    assert ("undo" in state.happened) is not finishes
    assert len(comm.reasons) == 1 and not comm.client.hands_over


def test_no_step_is_repeated_after_its_update() -> None:
    """What follows it must not communicate; if it does, a loss there ends the training."""
    recovery, state = ElasticRecovery(Group()), State()  # type: ignore[arg-type]
    state.divides_state = True
    with pytest.raises(TransportError, match="gone"), recovery.training(state, 3):
        recovery.run(Step(recovery, "rest"))
    assert "undo" not in state.happened


def test_who_leaves_hands_over_its_part_of_the_state() -> None:
    comm: Any = Group()
    recovery, state = ElasticRecovery(comm), State()
    state.divides_state = True
    with recovery.training(state, 3), recovery.until_all_have_ended():
        state.happened.clear()
        recovery.boundary(REGROUP)
        assert state.happened == ["note_seen", "hand_over", "leave", "regroup"]


def test_the_result_of_a_loop_that_was_left_counts_when_the_program_goes_on() -> None:
    """An error may have left it, also that of a worker that leaves the job."""
    comm: Any = Group()
    recovery, state = ElasticRecovery(comm), State()

    def loop() -> Iterator[None]:
        with (
            recovery.training(state, 3),
            suppress(GeneratorExit),
            recovery.until_all_have_ended(),
        ):
            yield

    batches = loop()
    next(batches)
    batches.close()
    assert "the result" not in comm.noted
    next(loop())
    assert comm.noted.count("the result") == 1


def test_what_rank_0_has_seen_is_noted_before_others_join() -> None:
    """A worker that joins at a boundary may be rank 0 soon, and cannot call the hooks before it."""
    comm: Any = Group()
    recovery, state = ElasticRecovery(comm), State()
    with recovery.training(state, 3), recovery.until_all_have_ended():
        recovery.run(lambda: 7)
        state.happened.clear()
        recovery.boundary(REGROUP)
        assert state.happened == ["note_seen", "leave", "regroup"]


def test_what_rank_0_has_seen_is_noted_where_a_loss_is_noticed_while_loading() -> None:
    comm: Any = Group()
    recovery, state = ElasticRecovery(comm), State()
    losses = [RuntimeError("Connection reset by peer")]

    def load() -> int:
        if losses:
            raise losses.pop()
        return 3

    with recovery.training(state, 3), recovery.until_all_have_ended():
        recovery.run(lambda: 7)
        state.happened.clear()
        assert recovery.read(load) == 3
        assert state.happened == ["note_seen", "leave", "regroup"]


def test_operations_before_the_first_step_have_the_results_of_the_others_on_a_worker_that_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state: Any = State()
    state.for_others = state.from_others = lambda result: result
    recovery = ElasticRecovery(Group())  # type: ignore[arg-type]
    with recovery.training(state, 3):
        with recovery.beginning():
            assert [recovery.run(lambda at=number: 7 * at) for number in range(3)] == [0, 7, 14]
        assert recovery.run(lambda: 8) == 8
        sent = list(recovery._kept_results)
    comm: Any = Group()
    comm.is_joining = True
    joined = ElasticRecovery(comm)

    def regroup() -> None:
        joined._kept_results = sent

    monkeypatch.setattr(joined, "form_next_group", regroup)
    with joined.training(state, 3):
        with joined.beginning():
            assert [joined.run(int, "no") for _ in range(3)] == [0, 7, 14]
        assert joined.run(lambda: 9) == 9 and joined.done == 1


def test_a_hook_that_a_loss_ends_is_not_called_again() -> None:
    comm: Any = Group()
    recovery, called = ElasticRecovery(comm), []

    def hook(what: int) -> None:
        called.append(what)
        raise TransportError("gone")

    with recovery.training(State(), 1):
        recovery.once(hook, 5)
    assert called == [5]


def test_an_error_of_the_program_ends_the_training_and_is_no_loss() -> None:
    comm: Any = Group()
    recovery, state = ElasticRecovery(comm), State()
    with pytest.raises(ValueError, match="wrong"), recovery.training(state, 1):
        recovery.run(lambda: int("wrong"))
    assert state.happened[-1] == "undo" and not comm.reasons and comm.keeps_values
    with pytest.raises(TransportError):  # outside of a training nothing is repeated
        recovery.run(lost_once(1))


def test_an_operation_within_another_one_is_a_part_of_it() -> None:
    comm: Any = Group()
    recovery, state = ElasticRecovery(comm), State()
    inner = lost_once(4)
    with recovery.training(state, 1):
        assert recovery.run(lambda: recovery.run(inner)) == 4
    assert state.happened.count("undo") == 1 and state.happened.count("commit") == 2


def test_who_has_ended_waits_for_all_others_also_after_a_signal_to_the_job() -> None:
    comm: Any = Group()
    comm.endings = [True, False]
    recovery = ElasticRecovery(comm)
    with (
        pytest.raises(InterruptedRunError),
        recovery.training(State(), 1),
        recovery.until_all_have_ended(),
    ):
        raise InterruptedRunError("stopped", 15)
    assert comm.endings == [] and comm.reasons == [("", False)]


def test_a_worker_that_comes_after_the_end_of_a_training_takes_no_part() -> None:
    comm: Any = Group()
    comm.is_joining, comm.has_earlier_result, comm.earlier_result = True, True, lambda: ["a row"]
    state: Any = State()
    with ElasticRecovery(comm).training(state, 1) as takes_part:
        assert not takes_part and state.result == ["a row"]


def test_where_one_training_follows_another_a_worker_goes_on_that_could_not_join_before_the_end() -> (
    None
):
    comm: Any = Group()
    comm.is_joining, comm.joins_before_result, comm.earlier_result = True, lambda: False, lambda: 3
    state: Any = State()
    recovery = ElasticRecovery(comm)
    with recovery.training(state, 1, is_one_of_many=True) as takes_part:
        assert not takes_part and state.result == 3 and not recovery.repeats
    assert comm.is_joining and comm.noted == []


def test_a_worker_whose_first_group_is_that_of_a_later_training_joins_in_that_one() -> None:
    class Late(Group):
        def regroup_until(self, *args: Any) -> None:
            check = args[-1]
            view = View(1, (0, 1), (0, 0), ((1, 4), ()), 0, fit=1)
            check(view)
            self.is_joining = False

    comm: Any = Late()
    comm.is_joining, comm.earlier_result = True, lambda: ["a row"]
    state: Any = State()
    recovery = ElasticRecovery(comm)
    with recovery.training(state, 1) as takes_part:
        assert not takes_part and state.result == ["a row"] and comm.is_joining
    with recovery.training(state, 1) as takes_part:
        assert takes_part and not comm.is_joining and recovery.repeats


def test_a_training_follows_the_workers_that_have_changed_in_another_one() -> None:
    comm: Any = Group()
    comm.allgather_object = lambda value: [value]
    first, state = ElasticRecovery(comm), State()
    assert not first.is_behind
    comm.client.generation = 2  # in another training
    assert first.is_behind
    first.follow(lambda: state)
    assert state.happened == ["commit", "regroup"] and not first.is_behind
    comm.client.generation = 3
    with first.training(state, 1):
        assert state.happened == ["commit", "regroup"] * 2 + ["commit"]


def test_a_state_that_nobody_has_any_more_is_an_error() -> None:
    comm: Any = Group()
    comm.allgather_object = lambda value: [value]
    comm.is_joining, comm.has_earlier_result, comm.earlier_result = True, True, lambda: "a row"
    first: ElasticRecovery = ElasticRecovery(comm)
    with first.training(State(), 1) as takes_part:
        assert not takes_part
    comm.is_joining, comm.client.generation = False, 2  # in another training
    with pytest.raises(LockstepError, match=r"have left the elastic job.*Save a checkpoint before"):
        first.follow(State)


def test_a_training_that_other_workers_cannot_go_on_with_is_refused() -> None:
    comm: Any = Group()
    first = MissingRecovery(comm)
    assert not first.is_behind
    comm.client.generation = 2
    assert first.is_behind
    with pytest.raises(ConfigError, match="Make it after the other training"):
        first.follow(State)


# --- callbacks of rank 0, which may move to another worker
# ------------------------------------------------------------


class Changing(Recovery):
    """That of a job whose workers change."""

    has_fixed_workers = False


class Seen(Callback):
    """What it was called for."""

    def __init__(self, every_rank: bool = False) -> None:
        self.every_rank = every_rank
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])

    def on_train_start(self, trainer: Any) -> None:
        self.seen.append("start")

    def on_train_epoch_start(self, trainer: Any) -> None:
        self.seen.append("epoch")

    def on_loss(self, trainer: Any, result: Any, loss: float) -> None:
        self.seen.append(loss)

    def on_row(self, trainer: Any, row: Any) -> None:
        self.seen.append("row")

    def on_train_end(self, trainer: Any, error: Any) -> None:
        self.seen.append("end")


def run_as_second(all_seen: bool, after: str, trainer: Any = None) -> tuple[list[Any], list[Any]]:
    """What callbacks of rank 0 and of all see on a worker that takes over rank 0 after the last
    row, or the end.
    """
    first = CallbackGroup([Seen(), Seen(every_rank=True)], 0, Changing())
    first.call("on_loss", trainer, None, 0.5)
    states = first.changed_states()
    assert states is not None and first.changed_states() is None
    own, on_all = Seen(), Seen(every_rank=True)
    group = CallbackGroup([own, on_all], 1, Changing())
    with group.running(trainer):
        group.call("on_train_epoch_start", trainer)
        group.call("on_loss", trainer, None, 0.5)
        group.note_commit()
        group.call("on_loss", trainer, None, 0.25)
        group.call("on_row", trainer, {})
        if after == "row":
            group.take_rank(0, trainer, states, all_seen, epoch_has_begun=True)
            group.take_rank(
                0, trainer, states, all_seen, epoch_has_begun=True
            )  # the view was over before it began
            group.note_commit()
            group.call("on_loss", trainer, None, 0.125)
    if after == "end":
        group.take_rank(0, trainer, states, all_seen, epoch_has_begun=False)
    return own.seen, on_all.seen


def test_who_takes_over_rank_0_is_given_what_its_predecessor_has_not_seen() -> None:
    own, on_all = run_as_second(False, "row")
    assert own == [0.5, "start", "epoch", 0.25, "row", 0.125, "end"]
    assert on_all == ["start", "epoch", 0.5, 0.25, "row", 0.125, "end"]
    assert run_as_second(True, "row")[0] == [0.5, "start", "epoch", 0.125, "end"]


def test_who_takes_over_rank_0_after_the_end_ends_what_its_predecessor_has_not() -> None:
    assert run_as_second(False, "end")[0] == [0.5, "start", 0.25, "row", "end"]
    assert run_as_second(True, "end")[0] == [0.5]


def test_callbacks_of_a_worker_that_leaves_do_not_end() -> None:
    callback = Seen(every_rank=True)
    with pytest.raises(WorkerLeft), CallbackGroup([callback], 1, Changing()).running(None):  # type: ignore[arg-type]
        raise WorkerLeft
    assert callback.seen == ["start"]


def test_a_callback_of_rank_0_that_cannot_move_is_refused_where_the_workers_change() -> None:
    class Own(Callback):
        pass

    CallbackGroup([Own()], 0)
    with pytest.raises(
        ConfigError, match=r"callbacks.Own: expected a callback with state_dict\(\)"
    ):
        CallbackGroup([Own()], 1, Changing())


def test_all_callbacks_end_the_last_first_whatever_one_of_them_raises() -> None:
    ended: list[int] = []

    class Ends(Seen):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def on_train_end(self, trainer: Any, error: Any) -> None:
            ended.append(self.number)
            if self.number == 2:
                raise ValueError("no")

    with (
        pytest.raises(ValueError, match="no"),
        CallbackGroup([Ends(1), Ends(2), Ends(3)], 0).running(None),
    ):  # type: ignore[arg-type]
        pass
    assert ended == [3, 2, 1]


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
