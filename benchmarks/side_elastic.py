"""One side of the benchmark of elastic jobs: a training with Lockstep that notes when a loss is
seen and got over.

    lockstep run --elastic 1:4 -np 4 side_elastic.py FOLDER MODEL STEPS TRANSPORT

Each worker appends what it does to FOLDER/events, a line of JSON each (`Notes`).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import lockstep
from lockstep.communicator.elastic_communicator import ElasticCommunicator
from lockstep.elastic.client import MembershipClient
from lockstep.elastic.membership import Regroup
from lockstep.training.callbacks import TrainingContext
from lockstep.training.loop import Loop
from lockstep.training.recovery import ElasticRecovery

if TYPE_CHECKING:
    from lockstep.training.step.step_result import StepResult

WORKERS = 4
GLOBAL_BATCH_SIZE = 64
SAMPLES = 2048


class Notes:
    """What a worker does, with the time on a clock that all processes of the host share.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, kind: str, generation: int = 0, **values: Any) -> None:
        """Append a line; whole lines, also when several processes write."""
        line = {
            "time": time.monotonic(),
            "pid": os.getpid(),
            "kind": kind,
            "generation": generation,
            **values,
        }
        os.write(self._file, f"{json.dumps(line)}\n".encode())


def large_mlp() -> nn.Module:
    """20.0 M parameters; with AdamW a state of 240 MB."""
    layers = [
        nn.Linear(28 * 28, 3200),
        nn.ReLU(),
        nn.Linear(3200, 3200),
        nn.ReLU(),
        nn.Linear(3200, 2240),
        nn.ReLU(),
    ]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(2240, 10))


def make_model(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """LeNet with SGD and momentum, or the large model with AdamW; with the same first values in
    every process.
    """
    torch.manual_seed(0)
    if name == "large":
        model = large_mlp()
        return model, torch.optim.AdamW(model.parameters(), 1e-4)
    model = lockstep.models.lenet()
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Images that are alike within a class, so that a loss falls, and their labels."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    kinds = torch.randn(10, 1, 28, 28, generator=generator)
    return kinds[labels] + torch.randn(SAMPLES, 1, 28, 28, generator=generator), labels


class _Heap(ctypes.Structure):
    """Glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "used",
            "free",
            "keepcost",
        )
    )


def allocated_mb() -> float | None:
    """What this process has allocated and not freed; None without glibc 2.33."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return None
    function.restype = _Heap
    heap = function()
    return round(float(heap.used + heap.hblkhd) / 1e6, 1)


def generation_of(comm: lockstep.Communicator) -> int:
    """The number of the group of an elastic job; 0 in a job of fixed size."""
    client = getattr(comm, "client", None)
    return 0 if client is None else client.generation


class Noting(lockstep.callbacks.Callback):
    """Notes each step, on every worker."""

    every_rank = True

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def on_train_step_end(self, trainer: TrainingContext, result: StepResult) -> None:
        """A step is complete."""
        generation = generation_of(trainer.comm)
        self.notes.write("step", generation, step=result.step, size=trainer.comm.size)
        if result.step % 50 == 0:
            self.notes.write("allocated", generation, mb=allocated_mb())


def note_around(
    owner: Any, name: str, before: Callable[..., None], after: Callable[..., None]
) -> None:
    """Let a function or method of the package tell when it is called and when it has returned."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = original(*args, **kwargs)
        after(*args)
        return result

    setattr(owner, name, call)


def note_regroups(notes: Notes) -> None:
    """Note the parts of a regroup."""
    receive = MembershipClient._take
    regroup = Loop._run_step
    last_begun = [-1]

    def take(self: MembershipClient, message: Any) -> None:
        if isinstance(message, Regroup) and message.when == "at once":
            notes.write("seen", message.generation)
        receive(self, message)

    def run_step(self: Any) -> Any:
        generation = generation_of(self._trainer.comm)
        if last_begun[0] != generation:
            last_begun[0] = generation
            notes.write("begun", generation)
        return regroup(self)

    def nothing(*_: Any) -> None:
        pass

    MembershipClient._take = take  # type: ignore[method-assign]
    Loop._run_step = run_step  # type: ignore[method-assign]
    note_around(
        ElasticCommunicator,
        "leave_group",
        nothing,
        lambda self: notes.write("left", self.client.generation + 1),
    )
    note_around(
        ElasticCommunicator,
        "_form",
        nothing,
        lambda self, view: notes.write("formed", view.generation),
    )
    note_around(
        ElasticRecovery,
        "_share",
        lambda self, state, view, best: notes.write("share", view.generation, has=self.has_state),
        lambda self, state, view, best: notes.write("shared", view.generation),
    )


def main() -> None:
    folder = Path(sys.argv[1])
    model_name = sys.argv[2]
    steps = int(sys.argv[3])
    transport = sys.argv[4]
    notes = Notes(folder)
    notes.write("started")
    note_regroups(notes)
    comm = lockstep.init("cpu", transport=transport)
    model, optimizer = make_model(model_name)
    data = torch.utils.data.TensorDataset(*make_data())
    trainer = lockstep.Trainer(
        *(model, optimizer, nn.CrossEntropyLoss(), GLOBAL_BATCH_SIZE),
        virtual_workers=WORKERS,
        callbacks=[Noting(notes)],
    )
    history = trainer.fit(data, max(1, steps * GLOBAL_BATCH_SIZE // SAMPLES))
    digest = lockstep.fingerprint(model, optimizer)
    if comm.rank == 0:
        notes.write("end", loss=history[-1]["train_loss"], digest=digest)


if __name__ == "__main__":
    main()
