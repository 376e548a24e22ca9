"""How often a training waits for other hosts: a step for its reduction alone, and the end of an
epoch a few times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.callbacks import Callback, Checkpoints
from lockstep.training.step.train_step import TrainStep
from support.pool import Pool
from support.round_trips import RoundTrips, counted, on_hosts_of_their_own
from support.runs import images, make, model

EPOCHS, STEPS = 4, 5


class Marks(Callback):
    """Notes what was counted in each step, and between steps."""

    every_rank = True

    def __init__(self, counter: RoundTrips) -> None:
        self._counter, self._before = counter, counter.copy()
        self.steps: list[RoundTrips] = []
        self.between: list[RoundTrips] = []

    def _added(self) -> RoundTrips:
        before, self._before = self._before, self._counter.copy()
        return self._counter.since(before)

    def on_train_step_start(self, trainer: Any, batch: Any) -> None:
        self.between.append(self._added())

    def on_train_step_end(self, trainer: Any, result: Any) -> None:
        self.steps.append(self._added())


def train(
    folder: Path | None, backend: str, validates: bool
) -> tuple[list[RoundTrips], list[RoundTrips]]:
    """The round trips of each step of a Trainer, and those between steps."""
    with on_hosts_of_their_own(backend), counted() as counter:
        marks = Marks(counter)
        trainer = make(folder, [marks] if folder is None else [Checkpoints(), marks])
        trainer.fit(images(), EPOCHS, validate=images(31, seed=6) if validates else None)
    return marks.steps, marks.between


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_step_of_a_trainer_waits_for_its_reduction(
    pool: Pool, tmp_path: Path, backend: str
) -> None:
    """In the first steps of all, and the first one of an epoch, its check is waited for as well."""
    for steps, between in pool.run(train, tmp_path / "run", backend, True, init=False):
        assert len(steps) == EPOCHS * STEPS
        assert all(step.total <= 2 for step in steps), steps
        assert all(step.total == 1 for step in steps[STEPS + 2 :]), steps
        within = [found for number, found in enumerate(between) if number % STEPS]
        assert all(found.total == 0 for found in within), within


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_end_of_an_epoch_waits_a_few_times(pool: Pool, tmp_path: Path, backend: str) -> None:
    """For: the states and data of the workers, the sums of the evaluation, the state that is saved,
    rank 0's writing and how it went, requests to stop, and the data of the next epoch.

    One of them, the first after the steps, waits for its check before.
    """
    for validates, most in ((True, 9), (False, 7)):
        folder = tmp_path / f"validates {validates}"
        for _, between in pool.run(train, folder, backend, validates, init=False):
            ends = between[2 * STEPS :: STEPS]
            assert len(ends) == EPOCHS - 2
            for found in ends:
                assert found.total <= most, found
                assert found.checks <= 1, found


def test_without_checkpoints_and_validation_it_waits_less(pool: Pool) -> None:
    for _, between in pool.run(train, None, "gloo", False, init=False):
        for found in between[2 * STEPS :: STEPS]:
            assert found.total <= 4, found


def own_loop(way: str) -> list[RoundTrips]:
    """The round trips of each step of a loop, with `TrainStep` or `prepare`."""
    with on_hosts_of_their_own("shm"):
        comm = lockstep.init("cpu")
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loader = lockstep.Loader(images(80), global_batch_size=16, comm=comm)
        loss_fn = nn.CrossEntropyLoss()
        found = []
        with counted() as counter:
            if way == "TrainStep":
                step = TrainStep(net, optimizer, loss_fn)
                for epoch in range(3):
                    for batch in loader.epoch(epoch):
                        before = counter.copy()
                        step.run(batch)
                        found.append(counter.since(before))
                return found
            net, optimizer, loader, loss_fn = lockstep.prepare(net, optimizer, loader, loss_fn)
            for _ in range(3):
                for data, labels in loader:
                    before = counter.copy()
                    optimizer.zero_grad()
                    loss_fn(net(data), labels).backward()
                    optimizer.step()
                    found.append(counter.since(before))
            return found


@pytest.mark.parametrize("way", ["TrainStep", "prepare"])
def test_a_step_of_ones_own_loop_waits_for_its_reduction(pool: Pool, way: str) -> None:
    for found in pool.run(own_loop, way, init=False):
        assert len(found) == 15
        assert all(step.total <= 2 for step in found[5:]), found
