"""PyTorch's own way, DistributedDataParallel, without a word of Lockstep: its launcher runs it as
it is.

lockstep run -np 2 examples/ddp.py [EPOCHS]        or torchrun --nproc-per-node 2
It needs scikit-learn, for the digits.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split


def make_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    whole = TensorDataset(images, torch.tensor(digits.target))
    return random_split(whole, [1437, 360], torch.Generator().manual_seed(0))


def make_model():
    convolutions = [
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
    ]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def place():
    """This rank's device, by its number on this machine: its number in the job is another one on a
    second machine.
    """
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def accuracy(model, data, device):
    """Over every rank's share of the test data."""
    right = torch.zeros(2, device=device)
    mine = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(mine, batch_size=256):
            found = model(images.to(device)).argmax(1) == labels.to(device)
            right += torch.stack([found.sum(), torch.tensor(len(found), device=device)])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main(epochs=5, batch_size=64):
    device = place()
    dist.init_process_group()
    training, test = make_data()
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(
            epoch
        )  # before the loader is asked for the epoch's batches: later it changes nothing
        model.train()
        start = time.perf_counter()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - start
        reached = accuracy(model.module, test, device)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch + 1}  time {seconds:.2f} s  test accuracy {reached:.2%}", flush=True
            )
    if dist.get_rank() == 0:
        torch.save(model.module.cpu().state_dict(), "ddp.pt")  # plain names, which load anywhere
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
