"""One side of the scaling benchmark: training with DistributedDataParallel under torchrun.

The script is the one that PyTorch's tutorials teach. Alone, it does without process group and
wrapper.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

from common import load_images, make_model
from meter import Job, Meter, parse_job


def make_dataset(job: Job) -> TensorDataset:
    """The images as float tensors, standardised once and for all."""
    images = load_images(job.samples)
    return TensorDataset(*images.collated_batch(range(len(images))))


def make_loader(
    dataset: Dataset[Any], sampler: DistributedSampler[Any], batch: int
) -> DataLoader[Any]:
    """As usual: samples are taken one by one and stacked."""
    return DataLoader(dataset, batch_size=batch, sampler=sampler)


def make_indexed_loader(
    dataset: Dataset[Any], sampler: DistributedSampler[Any], batch: int
) -> DataLoader[Any]:
    """The quick way for tensors in memory: a batch is indexed at once. Lockstep's loader does the
    same.
    """
    return DataLoader(
        dataset, batch_size=None, sampler=BatchSampler(sampler, batch, drop_last=False)
    )


def train(job: Job, loader_of: Any = make_loader) -> None:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if size > 1 else 0
    bare, optimizer = make_model(job.model)
    model: nn.Module = DistributedDataParallel(bare) if size > 1 else bare
    dataset = make_dataset(job)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, size, rank, seed=0)
    loader = loader_of(dataset, sampler, job.global_batch_size // size)
    loss_fn = nn.CrossEntropyLoss()
    meter = Meter(job, rank)
    model.train()
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
            meter.step(loss)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    train(parse_job())
