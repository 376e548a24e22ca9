"""What comes on top of a training: the watchdog, memory, and checkpoints that are written
meanwhile.

- The watchdog on against off: all-reduces of 4 bytes and steps of DDP over NCCL, in a job of one
  rank.
- The most memory of a step of ResNet-18 with 256 images: by hand and with `TrainStep`.
- A checkpoint of 1 GB while training: for how long the training stands still, where it is written
  at once and in the background.

    PYTHONPATH=src:benchmarks python benchmarks/gpu/overheads.py
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sides import MODELS, hand_step, made
from small_steps import batches_on, train_step
from timing import Options, finish, keep, options, wait_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.training.callbacks import Callback, Checkpoints

# --- The watchdog
# --------------------------------------------------------------------------------------------------


def watched(device: str, mode: str, quick: bool) -> dict[str, float]:
    """Microseconds of an all-reduce and of a step, in a job of one rank with the watchdog on or
    off.
    """
    os.environ["LOCKSTEP_WATCHDOG"] = mode
    comm = lockstep.init(device)
    where = comm.device
    count = 10 if quick else 300
    tensor = torch.ones(1, device=where)
    model, optimizer = made(MODELS["LeNet"], where)
    step = hand_step(DistributedDataParallel(model), optimizer)
    (batch,) = batches_on(where, 1, 32)

    def per_call(call: Any) -> float:
        found = []
        for _ in range(7):
            wait_for(where)
            began = time.perf_counter()
            for _ in range(count):
                call()
            wait_for(where)
            found.append(1e6 * (time.perf_counter() - began) / count)
        return statistics.median(found[2:])

    return {
        "all-reduce": per_call(lambda: dist.all_reduce(tensor)),
        "step of DDP": per_call(lambda: step(*batch)),
    }


def watchdog(given: Options) -> dict[str, Any]:
    modes = ["on", "off"] if given.quick else ["on", "off", "off", "on"]
    found: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    for mode in modes:
        found[mode].append(
            lockstep.launch(watched, given.device.type, mode, given.quick, workers=1)
        )
    return {
        what: {
            mode: statistics.median([each[what] for each in values])
            for mode, values in found.items()
        }
        for what in ("all-reduce", "step of DDP")
    }


# --- Memory
# --------------------------------------------------------------------------------------------------


def memory(given: Options) -> dict[str, float] | None:
    """GiB at the peak of a step, by side; None on the CPU, which does not count it."""
    device = given.device
    if device.type != "cuda":
        return None
    batches = batches_on(device, 2, 16 if given.quick else 256)
    make = MODELS["ResNet-18"]
    found = {}
    for name in ("by hand", "TrainStep"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step: Any = hand_step(*made(make, device)) if name == "by hand" else None
        step = step or train_step(make, device)
        for number in range(8):
            step(*batches[number % 2])
        wait_for(device)
        found[name] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
        del step
    return found


# --- Checkpoints
# --------------------------------------------------------------------------------------------------


def large(quick: bool) -> nn.Module:
    """Some 1 GB of parameters."""
    width, layers = (64, 2) if quick else (8192, 4)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), *(nn.Linear(width, width) for _ in range(layers - 1))
    )


class Clock(Callback):
    """Notes when each step begins."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_step_start(self, trainer: Any, batch: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def longest(self) -> float:
        """Return the longest time between two of them, in seconds."""
        return max(after - before for before, after in itertools.pairwise(self.times))


def checkpoints(given: Options) -> dict[str, float]:
    """The longest time between two steps, in seconds: without a checkpoint, with one, and one in
    the background.
    """
    comm = lockstep.init()
    steps = 6 if given.quick else 60
    data = torch.utils.data.TensorDataset(torch.randn(512, 784), torch.zeros(512, dtype=torch.long))
    found = {}
    for name, options_of_side in (("none", None), ("at once", False), ("in the background", True)):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            model = large(given.quick).to(comm.device)
            clock = Clock()
            writing = [] if options_of_side is None else [Checkpoints(f"{steps + steps // 6}steps")]
            trainer = lockstep.Trainer(
                model,
                torch.optim.SGD(model.parameters(), lr=1e-6),
                nn.CrossEntropyLoss(),
                64,
                callbacks=[clock, *writing],
                run_dir=Path(folder, "run"),
                async_save=bool(options_of_side),
            )
            loader = trainer.loader(data)
            trainer.fit(loader, max_steps=steps)  # warm
            clock.times.clear()
            trainer.fit(loader, max_steps=2 * steps)
            found[name] = clock.longest()
            del trainer, model, loader
    return found


def main() -> None:
    given, path = options(__doc__, 60.0)
    found: dict[str, Any] = {
        "watchdog, microseconds": watchdog(given)
    }  # before this process uses the device
    keep(path, found)
    lockstep.init(given.device.type)
    found["memory, GiB"] = memory(given)
    keep(path, found)
    finish(path, {**found, "longest time between two steps, seconds": checkpoints(given)})


if __name__ == "__main__":
    main()
