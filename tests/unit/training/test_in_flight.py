"""So many steps are queued and no more, their losses come in order, and `wait_all` waits for
whatever is under way.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.communicator import init, requests
from lockstep.communicator.requests import Request, wait_all
from lockstep.data.device_copies import to_device
from lockstep.errors import ConfigError, DivergedError, InterruptedRunError
from lockstep.training.callbacks import Callback, Checkpoints
from lockstep.training.callbacks.base import Row
from lockstep.training.evaluate import evaluate
from lockstep.training.in_flight import InFlightLimit, StepsInFlight
from lockstep.training.recovery import REGROUP
from lockstep.training.step.step_result import StepNumbers, StepResult
from lockstep.training.trainer import Trainer

OTHER = torch.device("meta")
"""Any device but the CPU, for what only looks at its kind."""


def result_of(step: int, loss: float = 1.0) -> StepResult:
    values = torch.tensor([loss, 0.0, 1.0]).unbind()
    return StepResult(step, StepNumbers(values[0], values[2], values[1]), 0.1)


# --- how far ahead
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 5])
def test_losses_come_in_order_when_so_many_steps_are_queued(max_steps_in_flight: int) -> None:
    told: list[tuple[int, float]] = []
    steps_in_flight = StepsInFlight(
        OTHER, max_steps_in_flight, lambda result, loss: told.append((result.step, loss))
    )
    for step in range(8):
        steps_in_flight.add(result_of(step, step / 2))
        steps_in_flight.settle()
        assert told == [(number, number / 2) for number in range(step - max_steps_in_flight + 2)]
    for _ in range(2):  # once each
        steps_in_flight.check()
        assert told == [(number, number / 2) for number in range(8)]
    steps_in_flight.add(result_of(8, 4.0))
    steps_in_flight.settle()
    assert len(told) == (9 if max_steps_in_flight == 1 else 8)


def test_after_a_regroup_only_losses_and_requests_to_stop_of_earlier_steps_count() -> None:
    told: list[tuple[int, float]] = []
    compared: list[int] = []
    steps_in_flight = StepsInFlight(OTHER, 3, lambda result, loss: told.append((result.step, loss)))
    replicas: Any = SimpleNamespace(settle=lambda step, sums: compared.append(step))
    result = result_of(0, 0.5)
    numbers = result.on_hand._replace(stop=torch.tensor(REGROUP))
    requested = replace(result, on_hand=numbers, replicas=replicas, marks=torch.ones(4))
    steps_in_flight.add(requested)
    steps_in_flight.regroup()
    steps_in_flight.check()
    assert (told, compared) == ([(0, 0.5)], [])
    for step in (1, 2, 3):
        steps_in_flight.add(replace(requested, step=step))
        assert steps_in_flight.settle() == REGROUP * (
            step == 3
        )  # that of step 1, as all know that of step 0
    assert compared == [1]
    numbers = result.on_hand._replace(stop=torch.tensor(3 + 2 * REGROUP))
    steps_in_flight.add(replace(requested, on_hand=numbers))
    steps_in_flight.regroup()
    assert steps_in_flight.settle(whole=True) == 3


@pytest.mark.parametrize("max_steps_in_flight", [1, 3])
def test_the_host_waits_for_the_oldest_of_so_many(
    monkeypatch: pytest.MonkeyPatch, max_steps_in_flight: int
) -> None:
    class Event:
        count = 0

        def __init__(self) -> None:
            self.number, Event.count = Event.count, Event.count + 1

        def record(self, stream: Any) -> None:
            assert stream == "the current one"

        def synchronize(self) -> None:
            ended.append(self.number)

    ended: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current one")
    pace = InFlightLimit(torch.device("cuda:0"), max_steps_in_flight)
    for piece in range(6):
        pace.record()
        assert ended == list(range(piece - max_steps_in_flight + 2))
    InFlightLimit(torch.device("cpu"), max_steps_in_flight).record()  # has nothing queued


def test_the_next_batch_is_copied_before_this_one_is_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, seen = ["compute"], []

    class Event:
        def record(self, stream: Any) -> None:
            self.number = sum(what == "copy" for what, _ in seen)

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        streams.append(stream.name)
        yield
        streams.pop()

    def copy(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert streams[-1] == "copies" and non_blocking
        seen.append(("copy", int(tensor)))
        return tensor

    def wait(event: Event) -> None:
        seen.append(("wait", event.number - 1))

    consumer = SimpleNamespace(name="compute", wait_event=wait)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(name="copies"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: consumer)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    kept: list[Any] = []
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: kept.append((int(tensor), stream.name)),
    )
    for (number,) in to_device(
        [(torch.tensor(number),) for number in range(3)], torch.device("cuda:0")
    ):
        seen.append(("use", int(number)))
    assert seen == [
        *[("copy", 0), ("copy", 1), ("wait", 0), ("use", 0)],
        *[("copy", 2), ("wait", 1), ("use", 1)],
        *[("wait", 2), ("use", 2)],
    ]
    assert kept == [
        (number, "compute") for number in range(3)
    ]  # not freed while the consumer reads


@pytest.mark.parametrize("value", [0, -1, True, 2.0, None])
def test_numbers_of_steps_that_cannot_be(value: Any) -> None:
    with pytest.raises(
        ConfigError, match="max_steps_in_flight: expected a whole number of at least 1"
    ):
        make(max_steps_in_flight=value)
    with pytest.raises(
        ConfigError, match="max_steps_in_flight: expected a whole number of at least 1"
    ):
        evaluate(
            nn.Linear(2, 2),
            make().loader(samples()),
            nn.CrossEntropyLoss(),
            max_steps_in_flight=value,
        )


# --- what callbacks see
# -------------------------------------------------------------------------------------


def samples(n: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(n, 2, generator=generator), torch.randint(0, 2, (n,), generator=generator)
    )


def make(callbacks: list[Callback] | None = None, **options: Any) -> Trainer:
    init("cpu")
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), 2, callbacks=callbacks or [], **options)


class Events(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.losses: list[tuple[float, float]] = []

    def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self.seen.append(("step", result.step))

    def on_loss(self, trainer: Trainer, result: StepResult, loss: float) -> None:
        self.seen.append(("loss", result.step))
        self.losses.append((loss, float(result.loss)))

    def on_train_epoch_end(self, trainer: Trainer, row: Row) -> None:
        self.seen.append(("epoch", int(row["epoch"])))


def test_on_the_cpu_each_loss_is_there_after_its_step() -> None:
    events = Events()
    make([events]).fit(samples(), 1)
    assert events.seen == [
        pair for step in range(5) for pair in (("step", step), ("loss", step))
    ] + [("epoch", 1)]
    assert all(told == of_step for told, of_step in events.losses)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lockstep.training.trainer.StepsInFlight", lambda _, *rest: StepsInFlight(OTHER, *rest)
    )


@pytest.mark.usefixtures("late")
def test_elsewhere_losses_come_later_in_order_and_all_before_an_epoch_ends() -> None:
    events = Events()
    make([events], max_steps_in_flight=3).fit(samples(), 2)
    for epoch in range(2):
        first = 5 * epoch
        queued = [("step", first), ("step", first + 1)]
        going = [
            pair
            for step in range(2, 5)
            for pair in (("step", first + step), ("loss", first + step - 2))
        ]
        rest = [("loss", first + 3), ("loss", first + 4), ("epoch", epoch + 1)]
        assert events.seen[11 * epoch : 11 * (epoch + 1)] == queued + going + rest
    assert all(told == of_step for told, of_step in events.losses)


@pytest.mark.usefixtures("late")
def test_all_losses_are_reported_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    events = Events()

    class Saved(Callback):
        def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
            if result.step == 3:
                trainer.save()
                events.seen.append(("saved", 3))

    make([events, Saved(), Checkpoints("0")], max_steps_in_flight=5, run_dir=tmp_path).fit(
        samples(), 1
    )
    place = events.seen.index(("saved", 3))
    assert events.seen[place - 4 : place] == [("loss", step) for step in range(4)]


@pytest.mark.usefixtures("late")
def test_losses_are_reported_before_an_interrupted_run_ends() -> None:
    class Interrupt(Callback):
        def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
            if result.step == 0:
                signal.raise_signal(signal.SIGTERM)

    events = Events()
    with pytest.raises(InterruptedRunError, match="after step 4 "):
        make([events, Interrupt()], max_steps_in_flight=3).fit(samples(), 1)
    assert events.seen[-2:] == [("loss", 2), ("loss", 3)]


def test_an_evaluation_in_training_has_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(
        "lockstep.training.evaluate.InFlightLimit",
        lambda *given: found.append(given[1]) or InFlightLimit(*given),
    )
    make(max_steps_in_flight=3).evaluate(samples())
    assert found == [3]


# --- wait_all
# -----------------------------------------------------------------------------------------------


class Work:
    def __init__(self, name: str, order: list[str], error: Exception | None = None) -> None:
        self.name, self.order, self.error = name, order, error

    def wait(self) -> None:
        self.order.append(self.name)
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def _nothing_outstanding() -> None:
    gc.collect()  # trainers of earlier tests


def test_requests_in_their_order_with_their_results() -> None:
    order: list[str] = []
    made = [Request([Work(name, order)], lambda name=name: name.upper()) for name in "abc"]
    assert wait_all(reversed(made)) == ["C", "B", "A"]
    assert order == ["c", "b", "a"]
    assert wait_all([]) == []


@pytest.mark.parametrize("requests", [3, [None], "ab", Request.completed(0)])
def test_what_is_no_list_of_requests(requests: Any) -> None:
    with pytest.raises(
        ConfigError, match="requests: expected a list of requests, as iallreduce returns, got"
    ):
        wait_all(requests)


def test_without_requests_all_that_are_held_in_the_order_in_which_they_began() -> None:
    order: list[str] = []
    made = {name: Request([Work(name, order)], lambda: 1) for name in "abcd"}
    made["b"].wait()
    del made["c"]
    gc.collect()
    assert lockstep.synchronize() is None
    assert order == ["b", "a", "d"]
    lockstep.synchronize()  # nothing is waited for twice
    assert order == ["b", "a", "d"] and made["a"].wait() == 1
    # the steps of a trainer that another test has kept are there as long as it is
    assert not [each for each in requests._PENDING.values() if isinstance(each, Request)]


def test_without_requests_the_first_failure_is_raised_once() -> None:
    order: list[str] = []
    failing = Request([Work("a", order, RuntimeError("the other side has gone"))], lambda: 1)
    other = Request([Work("b", order)], lambda: 2)
    with pytest.raises(RuntimeError, match="has gone"):
        lockstep.synchronize()
    lockstep.synchronize()
    assert order == ["a", "b"] and other.wait() == 2
    del failing


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("poisoned", [False, True])
def test_the_queued_steps_of_a_trainer(poisoned: bool) -> None:
    told: list[int] = []
    after: list[int] = []

    class Told(Callback):
        def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
            if result.step == 2:
                trainer.steps_in_flight.add(result_of(102, float("nan") if poisoned else 1.0))
                assert told == []
                try:
                    lockstep.synchronize()
                finally:
                    after.extend(told)

        def on_loss(self, trainer: Trainer, result: StepResult, loss: float) -> None:
            told.append(result.step)

    trainer = make([Told()], max_steps_in_flight=8)
    if poisoned:
        with pytest.raises(DivergedError, match="at step 102 "):
            trainer.fit(samples(), 1)
        lockstep.synchronize()  # what has been raised is over
        assert told == after == [0, 1, 2]
    else:
        trainer.fit(samples(), 1)
        assert after == [0, 1, 2, 102]
        assert told == [0, 1, 2, 102, 3, 4]


@pytest.mark.parametrize("used", [True, False])
def test_accelerators_that_have_been_used(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    waited: list[int] = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 1024 * (index != 1))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    lockstep.synchronize()
    assert waited == ([0, 2] if used else [])
