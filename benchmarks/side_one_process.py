"""One side of the benchmark of one process: a model alone, two replicas in threads or in a loop, or
two processes.

On GPUs also `nn.DataParallel`, which knows no other devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lockstep
from common import load_images, make_model
from lockstep.replicas import allreduce_, replicate, scatter
from meter import Meter, parse_as
from ranks import BACKENDS, run_ranks
from side_ddp_step import StepJob
from side_ddp_step import train as train_ddp

DEVICES = {"cpu": ["cpu", "cpu"], "cuda": ["cuda:0", "cuda:1"]}
ALONE = "alone"
LOOP = "loop"
THREADS = "threads"
TORCH = "torch"

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(images, labels) → the loss."""


def make_alone(model: nn.Module, optimizer: torch.optim.Optimizer, devices: list[str]) -> Step:
    """The model as it is, or what looks like one."""
    loss_fn = nn.CrossEntropyLoss()

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = loss_fn(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def make_torch(model: nn.Module, optimizer: torch.optim.Optimizer, devices: list[str]) -> Step:
    return make_alone(nn.DataParallel(model, [*map(torch.device, devices)]), optimizer, devices)


def make_threads(model: nn.Module, optimizer: torch.optim.Optimizer, devices: list[str]) -> Step:
    parallel = lockstep.DataParallel(model, [*devices], loss=nn.CrossEntropyLoss())

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = parallel(images, target=labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def make_loop(model: nn.Module, optimizer: torch.optim.Optimizer, devices: list[str]) -> Step:
    """The tutorials' way: one replica after the other, a sum for each parameter, an update of each
    replica.
    """
    replicas = replicate(model, devices)
    loss_fn = nn.CrossEntropyLoss(reduction="sum")
    kind: Any = type(optimizer)
    options = optimizer.defaults
    optimizers = [
        kind(replica.parameters(), lr=options["lr"], momentum=options["momentum"])
        for replica in replicas
    ]

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = []
        for replica, own, (x, y) in zip(
            replicas, optimizers, scatter((images, labels), devices), strict=True
        ):
            own.zero_grad()
            losses.append(loss_fn(replica(x), y) / len(images))
        for loss in losses:
            loss.backward()
        for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
            allreduce_([copy.grad for copy in copies])
        for own in optimizers:
            own.step()
        return torch.stack([loss.detach().to(devices[0]) for loss in losses]).sum()

    return step


MAKE = {ALONE: make_alone, LOOP: make_loop, THREADS: make_threads, TORCH: make_torch}


def use_one_arena() -> None:
    """Tell glibc's allocator to let all threads have their memory from one place, if there is such
    an allocator.

    Threads other than the first have arenas of their own, which give memory back to the system
    whatever `keep_freed_memory` has asked for: two replicas of ResNet-18 had 49,000 page faults a
    step where one model had none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-8, 1)  # M_ARENA_MAX of <malloc.h>


def train(job: StepJob) -> None:
    torch.set_num_threads(1)
    use_one_arena()
    devices = DEVICES[job.device]
    model, optimizer = make_model(job.model)
    step = MAKE[job.side](model.to(devices[0]), optimizer, devices)
    images = load_images(job.global_batch_size)
    inputs, labels = (t.to(devices[0]) for t in images.collated_batch(range(job.global_batch_size)))
    meter = Meter(job, 0)
    for _ in range(job.epochs * job.steps):
        meter.step(step(inputs, labels))


if __name__ == "__main__":
    job = parse_as(StepJob)
    run_ranks(
        lambda rank: train_ddp(job, rank) if job.side in BACKENDS else train(job), job.workers
    )
