"""One side of the benchmark of DDP's steps: a batch in memory, DistributedDataParallel over a
backend, or alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import load_images, make_model
from meter import Job, Meter, parse_as
from ranks import BACKENDS, join_group, run_ranks


@dataclass(frozen=True)
class StepJob(Job):
    """What is trained, and what the workers exchange gradients with.

    Attributes:
        side: a name of `ranks.BACKENDS`; anything else exchanges nothing.
        device: type of the device of each worker; a GPU has the number of its rank.
    """

    side: str
    device: str = "cpu"


def train(job: StepJob, rank: int) -> None:
    torch.set_num_threads(1)
    together = job.side in BACKENDS
    device = torch.device("cpu") if job.device == "cpu" else torch.device(job.device, rank)
    if together:
        join_group(job.side, rank, job.workers, job.meter)
    bare, optimizer = make_model(job.model)
    bare.to(device)  # the optimizer keeps its parameters: a module's are moved in place
    model: nn.Module = DistributedDataParallel(bare) if together else bare
    images = load_images(job.global_batch_size)
    inputs, labels = (
        t.to(device) for t in images.collated_batch(range(rank, job.global_batch_size, job.workers))
    )
    loss_fn = nn.CrossEntropyLoss()
    meter = Meter(job, rank)
    model.train()
    for _ in range(job.epochs * job.steps):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        loss.backward()
        optimizer.step()
        meter.step(loss)
    if together:
        dist.destroy_process_group()


if __name__ == "__main__":
    job = parse_as(StepJob)
    run_ranks(lambda rank: train(job, rank), job.workers)
