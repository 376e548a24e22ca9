"""One side of `one_idea.py`: the training of the README, with Lockstep or with PyTorch's DDP.

    lockstep run -np 4 side_one_idea.py lockstep EPOCHS     64 samples a step, over all workers
    torchrun --nproc-per-node 4 side_one_idea.py ddp EPOCHS    64 samples a step on each worker

Prints the loss on the test images before the first epoch and after each one, and the fingerprint of
the model.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep
from lockstep.data import ImageSet

BATCH = 64
LR = 0.02
MOMENTUM = 0.9
VIRTUAL_WORKERS = 8

Found = tuple[list[float], str]
"""The losses, and the fingerprint."""


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same first values on every worker."""
    torch.manual_seed(0)
    model = lockstep.models.lenet()
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def make_tensors(images: ImageSet) -> TensorDataset:
    """All images, standardised, with their labels."""
    return TensorDataset(*images.collated_batch(range(len(images))))


def test_loss(model: nn.Module, test: TensorDataset) -> float:
    """The mean loss on the test images, computed at once on this worker, in the same way for both
    sides.
    """
    inputs, labels = test.tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), labels))


def train_with_lockstep(epochs: int) -> Found:
    """As the README shows it."""
    lockstep.init("cpu")
    train, test = lockstep.data.digits()
    tensors = make_tensors(test)
    model, optimizer = make_model()
    trainer = lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        global_batch_size=BATCH,
        virtual_workers=VIRTUAL_WORKERS,
        callbacks=[],
    )
    losses = [test_loss(model, tensors)]
    for epoch in range(epochs):
        trainer.fit(train, epochs=epoch + 1)
        losses.append(test_loss(model, tensors))
    return losses, lockstep.fingerprint(model)


def train_with_ddp(epochs: int) -> Found:
    """As PyTorch's tutorial on DistributedDataParallel shows it: the batch size is that of a
    worker.
    """
    dist.init_process_group("gloo")
    train, test = lockstep.data.digits()
    dataset = make_tensors(train)
    tensors = make_tensors(test)
    model, optimizer = make_model()
    wrapped = DistributedDataParallel(model)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    loss_fn = nn.CrossEntropyLoss()
    losses = [test_loss(model, tensors)]
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss_fn(wrapped(inputs), labels).backward()
            optimizer.step()
        losses.append(test_loss(model, tensors))
    return losses, lockstep.fingerprint(model)


def main() -> None:
    """Run as a worker."""
    _, side, epochs = sys.argv
    losses, fingerprint = {"lockstep": train_with_lockstep, "ddp": train_with_ddp}[side](
        int(epochs)
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("result " + json.dumps({"losses": losses, "fingerprint": fingerprint}), flush=True)


if __name__ == "__main__":
    main()
