"""The training of `long_run.py`: LeNet on handwritten digits whose samples take time to arrive.

    lockstep run --elastic 1:6 -np 4 side_long_run.py FOLDER SAMPLE_S EPOCHS

Each worker appends a line of JSON to FOLDER/events after each step. The training ends after EPOCHS
epochs, or with the epoch in which a file FOLDER/enough appears.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

import lockstep
from lockstep.callbacks import Callback, Checkpoints, CSVLog
from lockstep.training.callbacks import TrainingContext
from side_elastic import Notes, allocated_mb

if TYPE_CHECKING:
    from lockstep.training.step.step_result import StepResult

GLOBAL_BATCH_SIZE = 48
VIRTUAL_WORKERS = 12
VALIDATION_SAMPLES = 96
STEPS_BETWEEN_COUNTS = 100  # counting the objects of Python takes some 20 ms


class ArrivingSamples(Dataset[Any]):
    """The samples of a data set, each of which takes some time to arrive.

    Args:
        samples: the data set.
        seconds: that a sample takes.
    """

    def __init__(self, samples: Dataset[Any], seconds: float) -> None:
        self._samples = samples
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return self._samples[index]


class NoteSteps(Callback):
    """Notes each step, on every worker, and ends the training when it is enough."""

    every_rank = True

    def __init__(self, folder: Path) -> None:
        self._enough = folder / "enough"
        self._notes = Notes(folder)

    def on_train_step_end(self, trainer: TrainingContext, result: StepResult) -> None:
        """A step is complete."""
        step = result.step
        comm = trainer.comm
        self._notes.write("step", step=step, rank=comm.rank, size=comm.size)
        if step % STEPS_BETWEEN_COUNTS == 0:
            self._notes.write("held", mb=allocated_mb(), objects=len(gc.get_objects()))

    def on_row(self, trainer: Any, row: dict[str, Any]) -> None:
        """An epoch is complete."""
        if self._enough.exists():
            trainer.stop("the time is over")


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it is, if it hangs
    folder = Path(sys.argv[1])
    sample_s = float(sys.argv[2])
    epochs = int(sys.argv[3])
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    train, test = lockstep.data.digits()
    model = lockstep.models.lenet()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    trainer = lockstep.Trainer(
        *(model, optimizer, nn.CrossEntropyLoss(), GLOBAL_BATCH_SIZE),
        virtual_workers=VIRTUAL_WORKERS,
        num_workers=1,
        run_dir=folder / "run",
        callbacks=[NoteSteps(folder), CSVLog(), Checkpoints()],
    )
    history = trainer.fit(
        ArrivingSamples(train, sample_s), epochs, Subset(test, range(VALIDATION_SAMPLES))
    )
    digest = lockstep.fingerprint(model, optimizer)
    if comm.rank == 0:
        losses = [row["train_loss"] for row in history]
        Notes(folder).write("end", epochs=len(history), digest=digest, losses=losses)


if __name__ == "__main__":
    main()
