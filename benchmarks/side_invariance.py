"""One side of the benchmark of virtual workers: Lockstep with them, or DDP with passes of the same
size; in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from common import LR, MODELS, MOMENTUM, load_images
from lockstep.data.loader import Batch
from lockstep.parallel.shards import bounds
from meter import Job, Meter, parse_as
from ranks import join_group, run_ranks

LOCKSTEP = "lockstep"
DDP = "ddp"


@dataclass(frozen=True)
class InvarianceJob(Job):
    """What is trained, by whom, and in how many passes.

    Attributes:
        side: "lockstep" or "ddp".
        backend: "shm" or "gloo".
        passes: of a step, over all workers: the shards of Lockstep, or the parts that DDP
            accumulates.
    """

    side: str
    backend: str
    passes: int


class Rows(nn.Module):
    """A transformer that reads a picture row by row: 28 tokens, 2 layers of width 64, 0.1 M
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 64)
        self.places = nn.Parameter(torch.zeros(28, 64))
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pictures (n, 1, 28, 28) to scores (n, 10)."""
        scores: torch.Tensor = self.head(
            self.layers(self.embed(x.squeeze(1)) + self.places).mean(1)
        )
        return scores


HERE: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "convnet": lambda: lockstep.models.build("convnet", 10, (1, 28, 28)),
    "transformer": Rows,
}


def make_step(job: InvarianceJob, rank: int) -> Callable[[], torch.Tensor]:
    """A function that makes one step of the side and returns the loss of it."""
    torch.manual_seed(0)
    model = HERE[job.model]()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    images = load_images(job.global_batch_size)
    run = range(*bounds(job.passes, job.workers, rank))
    cuts = [bounds(job.global_batch_size, job.passes, number) for number in run]
    parts = [images.collated_batch(range(*cut)) for cut in cuts]
    make = shard_step if job.side == LOCKSTEP else ddp_step
    model.train()
    return make(job, model, optimizer, parts)


Parts = list[tuple[torch.Tensor, torch.Tensor]]


def shard_step(
    job: InvarianceJob, model: nn.Module, optimizer: torch.optim.Optimizer, parts: Parts
) -> Callable[[], torch.Tensor]:
    step = lockstep.TrainStep(model, optimizer, nn.CrossEntropyLoss(), virtual_workers=job.passes)
    size = sum(len(labels) for _, labels in parts)
    batch = Batch(
        [list(part) for part in parts],
        torch.arange(size),
        size,
        job.global_batch_size,
        0,
        0,
        job.passes,
    )
    return lambda: step(batch)


def ddp_step(
    job: InvarianceJob, model: nn.Module, optimizer: torch.optim.Optimizer, parts: Parts
) -> Callable[[], torch.Tensor]:
    spread = DistributedDataParallel(model)
    loss_fn = nn.CrossEntropyLoss()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, (inputs, labels) in enumerate(parts):
            with nullcontext() if number == len(parts) - 1 else spread.no_sync():
                loss = loss_fn(spread(inputs), labels) / len(parts)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return step


def train(job: InvarianceJob, rank: int) -> None:
    torch.set_num_threads(1)
    join_group(job.backend, rank, job.workers, job.meter)
    lockstep.init("cpu")
    step = make_step(job, rank)
    meter = Meter(job, rank)
    for _ in range(job.epochs * job.steps):
        meter.step(step())
    dist.destroy_process_group()


if __name__ == "__main__":
    job = parse_as(InvarianceJob)
    run_ranks(lambda rank: train(job, rank), job.workers)
