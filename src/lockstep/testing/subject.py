"""What a test runs, a function or a program, in a worker: steps are counted, and some end the
worker.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import environment
from ..verification.held import Held
from ..verification.recording import StepRecorder, find_models, name_parameters
from .results import Entries, as_entries

EVERY_RANK = -1


class Kill(msgspec.Struct, frozen=True):
    """The end of a worker after a step.

    Attributes:
        rank: the rank with which the worker has begun; `EVERY_RANK` for all workers. One that takes
            the place of a lost worker is not meant: it has not done all steps.
        step: number of steps that the worker has done by then.
        signal: the number of the signal that it sends to itself.
    """

    rank: int
    step: int
    signal: int = signal.SIGKILL


class Task(msgspec.Struct, frozen=True):
    """What the workers of a job do.

    Attributes:
        program: a script and its arguments; empty for a function, whose pickled call is the file
            ``call``.
        path: folders in which modules of the test are found.
        kills: the ends of workers.
        recorded_steps: steps after which the job ends, if they are recorded for
            `lockstep.verification`; 0 to run all.
        held: what is the same at every number of workers, if steps are recorded.
    """

    program: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    kills: tuple[Kill, ...] = ()
    recorded_steps: int = 0
    held: Held = Held()


def mark_of(folder: Path, kill: Kill) -> Path:
    """Return the path of the file that exists as soon as a worker has been ended by `kill`."""
    return folder / f"killed-{kill.rank}-{kill.step}"


def run_subject(folder: Path) -> None:
    """Do as the task in `folder` says; rank 0 writes the result and its number of steps there."""
    task: Task = msgspec.json.decode((folder / "task.json").read_bytes(), type=Task)
    sys.path += [folder for folder in task.path if folder not in sys.path]
    counter = _StepCounter(task, folder)
    recorder = StepRecorder(folder, task.recorded_steps, task.held) if task.recorded_steps else None
    counter.install()
    if recorder is not None:
        recorder.install()
    try:
        if task.program:
            _run_program(task.program)
            entries = counter.final_state()
        else:
            call, arguments, _ = pickle.loads((folder / "call").read_bytes())
            entries = as_entries(call(*arguments))
    finally:
        counter.undo()
        if recorder is not None:
            recorder.finish()
    # a job that has lost workers has other ranks than the variables say
    rank = dist.get_rank() if dist.is_initialized() else environment.find_world().rank
    if rank == 0:
        draft = folder / f"result-{os.getpid()}"
        torch.save({"entries": entries, "steps": counter.steps}, draft)
        draft.replace(folder / "result")


def _run_program(program: tuple[str, ...]) -> None:
    sys.argv = list(program)
    sys.path[0] = str(Path(program[0]).resolve().parent)
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


class _StepCounter:
    """Counts the steps of optimizers, keeps what they train, and ends the worker where the task
    says so.
    """

    def __init__(self, task: Task, folder: Path) -> None:
        self.steps = 0
        self._task = task
        self._folder = folder
        self._counts: dict[int, int] = {}
        self._depth = 0
        self._optimizers: list[Optimizer] = []
        self._models: list[nn.Module] = []
        self._hooks: list[Any] = []
        rank = environment.find_world().rank
        try:
            (folder / f"began-{rank}").touch(exist_ok=False)
        except FileExistsError:  # in place of a worker that was lost
            self._kills: list[Kill] = []
        else:
            self._kills = [kill for kill in task.kills if kill.rank in (EVERY_RANK, rank)]

    def install(self) -> None:
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        self._depth += 1
        if id(optimizer) not in self._counts:
            self._counts[id(optimizer)] = 0
            self._optimizers.append(optimizer)
            if self._task.program:  # its variables are gone when it has ended
                self._models = list(find_models())

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        self._depth -= 1
        if self._depth > 0:  # a wrapper's step, which calls that of its base class
            return
        self._counts[id(optimizer)] += 1
        self.steps = max(self.steps, self._counts[id(optimizer)])
        for kill in self._kills:
            if kill.step == self.steps:
                mark_of(self._folder, kill).touch()
                os.kill(os.getpid(), kill.signal)

    def final_state(self) -> Entries:
        """Return the parameters and buffers that the program has trained, by name."""
        parameters = [
            p
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        names = name_parameters(self._models, parameters)
        entries: dict[str, Any] = {names[id(parameter)]: parameter for parameter in parameters}
        for model in self._models:
            prefix = f"{type(model).__name__}: " if len(self._models) > 1 else ""
            entries |= {prefix + name: buffer for name, buffer in model.named_buffers()}
        return as_entries(entries)


if __name__ == "__main__":
    run_subject(Path(sys.argv[1]))
