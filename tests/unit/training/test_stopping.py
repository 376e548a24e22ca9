"""Signals are remembered instead of obeyed, and only where Python can put back what was there
before.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from lockstep.training.stop_signals import StopSignals


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in StopSignals.HANDLED}
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a program in the background has it ignored
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def heard() -> list[int]:
    """The SIGTERMs that reach the program around."""
    numbers: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    return numbers


def test_the_first_signal_is_remembered_and_reaches_the_program_at_the_end(
    heard: list[int],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.received is None
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        assert heard == []
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_exception_names_the_signal(heard: list[int]) -> None:
    with pytest.raises(KeyError), StopSignals():
        signal.raise_signal(signal.SIGTERM)
        raise KeyError
    assert heard == []


def test_without_a_signal_none_is_raised(heard: list[int]) -> None:
    with StopSignals():
        pass
    assert heard == []


def test_the_second_acts_as_before() -> None:
    with pytest.raises(KeyboardInterrupt), StopSignals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)


def test_a_launched_worker_ignores_the_second(
    monkeypatch: pytest.MonkeyPatch, heard: list[int]
) -> None:
    monkeypatch.setattr("lockstep.training.stop_signals.under_launcher", lambda: True)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGTERM
    assert heard == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored(heard: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.received is None
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_handler_that_python_cannot_put_back_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = signal.getsignal
    # what it says of a handler that a program in C has set before it started Python
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None if number == signal.SIGTERM else real(number)
    )
    with StopSignals():
        assert real(signal.SIGTERM) == signal.SIG_DFL
        assert real(signal.SIGINT) not in (signal.SIG_DFL, signal.default_int_handler)
    assert real(signal.SIGINT) == signal.default_int_handler


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    during = []

    def use() -> None:
        with StopSignals() as signals:
            during.append((signal.getsignal(signal.SIGINT), signals.received))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert during == [(before, None)]
