"""One side of the scaling benchmark: training with Lockstep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

import lockstep
from common import load_images, make_model
from lockstep.training.callbacks import TrainingContext
from meter import Job, Meter, parse_job

if TYPE_CHECKING:
    from lockstep.training.step.step_result import StepResult


class Metering(lockstep.callbacks.Callback):
    """Tells the meter of every step."""

    every_rank = True

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_start(self, trainer: TrainingContext) -> None:
        """The first step is about to be made."""
        self.meter = Meter(self.job, trainer.comm.rank)

    def on_train_step_end(self, trainer: TrainingContext, result: StepResult) -> None:
        """One more."""
        self.meter.step(result.loss)


def train(job: Job) -> None:
    lockstep.init("cpu")
    model, optimizer = make_model(job.model)
    trainer = lockstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), job.global_batch_size, callbacks=[Metering(job)]
    )
    trainer.fit(load_images(job.samples), job.epochs)


if __name__ == "__main__":
    job = parse_job()
    if job.workers == 1:
        train(job)
    else:
        lockstep.launch(train, job, workers=job.workers, threads=1)
