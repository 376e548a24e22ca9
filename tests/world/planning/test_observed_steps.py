"""What the observer of `lockstep plan` records of steps of several workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.messages import decode
from lockstep.planning.observer import ObserverSettings, ProfileRecorded, StepObserver, profile_file
from lockstep.planning.step_profile import Profile
from lockstep.training.step.train_step import TrainStep
from support.pool import Pool

SLOW_S = 0.02


def observed(folder: Path) -> list[float]:
    """Return how long each step of a small model has waited for its all-reduce, which is a slow
    one.
    """
    comm = lockstep.init("cpu")
    allreduce = comm.allreduce

    def slow(vector: torch.Tensor, *args: Any) -> torch.Tensor:
        time.sleep(SLOW_S)
        return allreduce(vector, *args)

    observer = StepObserver(ObserverSettings(str(folder), steps=4, durations_only=True))
    observer.install()
    try:
        model = nn.Linear(4, 2)
        step = TrainStep(
            model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), replica_check=0
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm, "allreduce", slow)
            loader = lockstep.Loader(
                TensorDataset(torch.randn(256, 4), torch.ones(256).long()), 16, comm=comm
            )
            for batch in loader.epoch(0):
                step(batch)
    except ProfileRecorded:
        pass
    finally:
        observer.finish()
    profile = decode(profile_file(folder, comm.rank).read_bytes(), Profile)
    assert (profile.workers, profile.ddp) == (2, False)
    return [record.wait_s for record in profile.steps]


def test_the_wait_for_the_only_message_of_a_step_is_no_computing(
    pool: Pool, tmp_path: Path
) -> None:
    for waits in pool.run(observed, tmp_path, workers=2):
        assert len(waits) == 4
        assert all(wait >= SLOW_S for wait in waits)
