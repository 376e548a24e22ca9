"""Tiny trainings with the same bits on every machine; `python tests/support/golden.py 0.3` stores
checkpoints of them.

Each release stores a checkpoint of each training, in the middle of an epoch, with the fingerprints
there and some steps later. The next releases resume from it, and must arrive at the same
fingerprint.

Kernels sum in an order of their own on each kind of processor. So that bits do not depend on it,
most of these trainings have no rounding at all: numbers are small whole ones, global batches,
learning rates and the like are powers of two. Their loss is linear in the weights, so that
gradients depend on the batch alone and the number of digits does not grow. They tell whether the
order of samples and the draws are as before. In "virtual_workers" sums are rounded, but a shard is
one sample, so that no kernel has an order to choose; which shards are added first is what its bits
tell. Draws are those of `torch.randint`, whose numbers come from a Mersenne twister everywhere.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import lockstep
from lockstep.callbacks import AveragedWeights, Callback, Checkpoints
from lockstep.checkpoint.numerics import NUMERICS
from lockstep.parallel.fingerprints import fingerprint_of

__all__ = ["CASES", "STORED", "Case", "Release", "releases"]

STORED = Path(__file__).parents[1] / "data" / "checkpoints"

SAMPLES, GLOBAL_BATCH = 24, 8  # three steps an epoch
SAVED, END = 4, 8  # steps

Sample = tuple[torch.Tensor, torch.Tensor]


# --- data
# --------------------------------------------------------------------------------------------------


class Whole(Dataset[Sample]):
    """Whole numbers: inputs of 3, targets of 5.

    Args:
        dtype: of both.
        draws: whether inputs are changed by draws of torch, Python and NumPy.
        least: the smallest input.
        unit: what inputs are multiples of, a power of two.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float64,
        draws: bool = False,
        least: int = -5,
        unit: float = 1.0,
    ) -> None:
        self._dtype, self._draws, self._least, self._unit = dtype, draws, least, unit

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        numbers = [self._unit * ((7 * index + 3 * j) % 11 + self._least) for j in range(3)]
        inputs = torch.tensor(numbers, dtype=self._dtype)
        targets = torch.tensor([(index + j) % 5 + 1 for j in range(5)], dtype=self._dtype)
        if self._draws:
            inputs += (
                torch.randint(0, 4, (3,)) + 4 * random.randrange(4) + 16 * int(np.random.randint(4))
            )
        return inputs, targets


class Rounded(Dataset[Sample]):
    """Numbers from 0.5 to 1.5 with all digits, whose sums are rounded; targets are 1, 2 and 4."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        drawn = [0.5 + (0x9E3779B97F4A7C15 * (3 * index + j + 1) % 2**52) / 2**52 for j in range(3)]
        return torch.tensor(drawn, dtype=torch.float64), torch.tensor(
            [2.0 ** (index % 3)] * 5, dtype=torch.float64
        )


class InTurn(IterableDataset[Sample]):
    """The samples of `Whole`, one after the other."""

    def __iter__(self) -> Iterator[Sample]:
        samples = Whole()
        return (samples[index] for index in range(SAMPLES))


def _stream(folder: Path) -> lockstep.data.Stream:
    """Return the samples of `Whole` in six files, each of which is one block."""
    paths = [folder / f"part-{number}.jsonl" for number in range(6)]
    if lockstep.init("cpu").rank == 0:
        for number, path in enumerate(paths):
            path.write_text("".join(f"{4 * number + k}\n" for k in range(4)))
    lockstep.init("cpu").barrier()
    return lockstep.data.Stream(paths, map=Whole().__getitem__, shuffle_window=24, lanes=3)


# --- models and losses
# ----------------------------------------------------------------------------------------


def linear_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over samples of the product of outputs and targets; its gradient does not depend on
    the weights.
    """
    return (outputs * targets).sum(1).mean()


class CountedLoss(nn.Module):
    """`linear_loss` of which a buffer counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return linear_loss(outputs, targets)


class Drawing(nn.Module):
    """Multiplies outputs by a power of two that is drawn in each pass of training; a buffer counts
    the passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5, dtype=torch.float64)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs)
        if self.training:
            self.passes += 1
            outputs = outputs * 2.0 ** torch.randint(0, 8, ())
        return outputs


class PartlyFrozen(nn.Module):
    """A layer that is not trained, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.frozen.weight.requires_grad_(False)
        self.linear = nn.Linear(3, 5, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(self.frozen(inputs))
        return outputs


def _linear(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Linear(3, 5, dtype=dtype)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.125, momentum=0.5)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    # Its moments have no rounding. An update has, in a square root: with this learning rate there
    # is none.
    return torch.optim.AdamW(parameters, 0.0, betas=(0.5, 0.5), weight_decay=0.0)


# --- trainings
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        workers: number of workers that store its checkpoint.
        data: makes the data set, or a loader of it; gets a folder for files.
        model: makes the model, whose first trained weights are then set to whole numbers.
        optimizer: makes the optimizer of parameters.
        options: further arguments of the trainer.
        scheduled: whether it has a scheduler of torch.
        averaged: whether it has a moving average of the weights.
        loss: makes the loss.
    """

    workers: int = 1
    data: Callable[[Path], Any] = lambda folder: Whole()
    model: Callable[[], nn.Module] = _linear
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd
    options: tuple[tuple[str, Any], ...] = ()
    scheduled: bool = False
    averaged: bool = False
    loss: Callable[[], Any] = lambda: linear_loss

    def train(self, folder: Path, steps: int, resume: Path | None = None) -> str:
        """Train in `folder` until so many steps are done, and return the fingerprint; called by
        every worker.

        Args:
            folder: an empty folder of the workers; the run directory is in it.
            steps: number of steps.
            resume: a checkpoint to resume from. The weights are others than those stored, until it
                is loaded.
        """
        lockstep.init("cpu")
        model = self.model()
        with torch.no_grad():
            for parameter in model.parameters():
                whole = torch.arange(parameter.numel(), dtype=parameter.dtype).reshape(
                    parameter.shape
                )
                parameter.copy_(whole if resume is None or not parameter.requires_grad else -whole)
        optimizer = self.optimizer(model.parameters())
        options = dict(self.options)
        if self.scheduled:
            options["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            options["scheduler_interval"] = "step"
        average = AveragedWeights(0.5)
        callbacks: list[Callback] = [Checkpoints(), *([average] if self.averaged else [])]
        trainer = lockstep.Trainer(
            model,
            optimizer,
            self.loss(),
            GLOBAL_BATCH,
            run_dir=folder / "run",
            callbacks=callbacks,
            **options,
        )
        trainer.fit(self.data(folder), max_steps=steps, resume=resume)
        return _fingerprint(trainer, average if self.averaged else None)

    def position(
        self, folder: Path, state: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], str]:
        """Return the state of a loader of a loop of one's own after `SAVED` steps, and a
        fingerprint of what follows.

        Args:
            folder: an empty folder for files.
            state: such a state, to go on from.
        """
        lockstep.init("cpu")
        made = self.data(folder)
        with (
            made
            if isinstance(made, lockstep.Loader)
            else lockstep.Loader(made, GLOBAL_BATCH) as loader
        ):
            if state is not None:
                loader.load_state_dict(state)
            first = 0 if state is None else state["epoch"]
            batches = (
                batch for epoch in range(first, first + END) for batch in loader.epoch(epoch)
            )
            if state is None:
                for _ in range(SAVED):
                    next(batches)
                state = loader.state_dict()
            return state, fingerprint_of(
                {str(step): next(batches).data[0] for step in range(SAVED, END)}
            )


def _fingerprint(trainer: lockstep.Trainer, average: AveragedWeights | None) -> str:
    """Return a fingerprint of all numbers that a training has made, except losses, which have sums
    of many terms.
    """
    state = trainer.state_dict()
    entries = (
        {**dict(trainer.model.named_parameters()), **state["model"]}
        if "frozen" in state
        else {**state["model"]}
    )
    if average is not None:
        entries |= {f"averaged.{name}": value for name, value in average.model.state_dict().items()}
    entries |= {f"loss.{name}": value for name, value in state["step"].get("loss", {}).items()}
    entries["scale"] = state["step"]["precision"].get("scale")
    entries["lr"] = trainer.optimizer.param_groups[0]["lr"]
    entries["steps"] = state["step"]["steps_done"]
    return fingerprint_of(entries, state["optimizer"])


def _by_length(_: Path) -> lockstep.Loader:
    lengths = [1 + index % 5 for index in range(SAMPLES)]
    sampler = lockstep.data.LengthBatchSampler(lengths, GLOBAL_BATCH)
    return lockstep.Loader(Whole(), GLOBAL_BATCH, batch_sampler=sampler)


CASES = {
    "scheduler_and_average": Case(
        data=lambda folder: Whole(draws=True), scheduled=True, averaged=True
    ),
    "adam_frozen_lengths": Case(
        data=_by_length, model=PartlyFrozen, optimizer=_adam, options=(("save_frozen", False),)
    ),
    # The first steps overflow, and are skipped. Sums of numbers of one sign overflow in any order,
    # or in none.
    "fp16": Case(
        data=lambda folder: Whole(torch.float32, least=0, unit=0.125),
        model=lambda: _linear(torch.float32),
        options=(("precision", "fp16"),),
    ),
    "virtual_workers": Case(
        workers=2,
        data=lambda folder: Rounded(),
        model=Drawing,
        options=(("virtual_workers", GLOBAL_BATCH), ("allow_different_hardware", True)),
        loss=CountedLoss,
    ),
    "sharded": Case(workers=2, options=(("strategy", "sharded"),)),
    "stream": Case(data=_stream),
    "iterable": Case(data=lambda folder: InTurn()),
}


# --- stored checkpoints
# ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """The checkpoints that a release of Lockstep has stored.

    Attributes:
        name: the release.
        numerics: its version of the numerics.
        fingerprints: case → the fingerprints after `SAVED` and `END` steps.
        positions: case → the result of `Case.position`.
    """

    name: str
    numerics: int
    fingerprints: dict[str, dict[str, str]]
    positions: dict[str, tuple[dict[str, Any], str]]

    def checkpoint(self, case: str) -> Path:
        """Return the checkpoint of a case."""
        return STORED / self.name / case


def releases() -> list[Release]:
    """Return all releases that have stored checkpoints, the oldest first."""
    found = [json.loads(path.read_text()) for path in STORED.glob("*/fingerprints.json")]
    return sorted(
        (Release(**each) for each in found),
        key=lambda release: [*map(int, release.name.split("."))],
    )


def store(release: str) -> None:
    """Store the checkpoints of this code as those of a release."""
    folder = STORED / release
    fingerprints: dict[str, dict[str, str]] = {}
    positions: dict[str, tuple[dict[str, Any], str]] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            short, long = Path(temporary, "short"), Path(temporary, "long")
            fingerprints[name] = {}
            for kind, run, steps in (("saved", short, SAVED), ("end", long, END)):
                run.mkdir()
                fingerprints[name][kind] = lockstep.launch(
                    partial(case.train, run, steps), workers=case.workers
                )
            positions[name] = case.position(Path(temporary))
            shutil.copytree(short / f"run/checkpoints/step-{SAVED:010d}", folder / name)
    stored = Release(release, NUMERICS, fingerprints, positions)
    folder.joinpath("fingerprints.json").write_text(json.dumps(stored.__dict__, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", help="the release, such as 0.3; its folder must not exist yet")
    chosen = parser.parse_args().release
    if (STORED / chosen).exists():
        sys.exit(f"{STORED / chosen} exists: what a release has stored is never changed")
    store(chosen)
