"""Batches that are counted, and forked children."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.flight_recorder import FlightRecorder, RecorderReader, current
from lockstep.watchdog import patches
from lockstep.watchdog.batch_loops import BatchLoops, batch_replacements


def batches_of(loader: DataLoader[Any], use: Callable[[Any], object]) -> list[int]:
    """The batches that are noted while `use` takes some from `loader`."""
    noted: list[int] = []
    state: Any = SimpleNamespace(
        recorder=SimpleNamespace(note_batch=lambda number, _: noted.append(number))
    )
    replaced = batch_replacements(state)
    try:
        use(loader)
    finally:
        for each in reversed(replaced):
            each.undo()
    return noted


def loop(loader: DataLoader[Any]) -> None:
    for number, _ in enumerate(loader):
        assert number < 2


def take(loader: DataLoader[Any]) -> None:
    iterator = iter(loader)
    while next(iterator, None) is not None:
        pass


def test_batches_are_counted_in_loops_of_the_program_alone() -> None:
    """A thread may fetch ahead, and a program may take as many batches as it needs: no rank must do
    as another.
    """
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(2)), batch_size=1)

    def in_thread(loader: DataLoader[Any]) -> None:
        thread = threading.Thread(target=loop, args=(loader,))
        thread.start()
        thread.join()

    assert batches_of(loader, loop) == [0, 1, -4]
    assert batches_of(loader, take) == []
    assert batches_of(loader, in_thread) == []


def test_a_forked_child_writes_nothing_into_its_parents_flight_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FlightRecorder(tmp_path, 0, 1, "here", "program")
    monkeypatch.setattr(current, "recorder", recorder)
    with RecorderReader(recorder.path) as own:
        patches._after_fork()  # as in the child
        recorder.note_batch(7, 1)
        recorder.record_heartbeat()
        assert own.state().batch is None
        assert current.recorder is None


def test_a_loop_that_goes_on_does_not_keep_the_flight_recorder() -> None:
    class Recorder:
        def note_batch(self, number: int, key: int) -> None:
            pass

    recorder: Any = Recorder()
    kept = weakref.ref(recorder)
    iterator = iter(DataLoader(TensorDataset(torch.zeros(4))))
    gc.disable()
    try:
        loops = BatchLoops(recorder)
        for _ in range(2):
            loops.note(iterator, 0)
        del loops, recorder
        assert kept() is None
    finally:
        gc.enable()
