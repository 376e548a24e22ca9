"""A program of DistributedDataParallel for torchrun, and faults that are common in such programs: the first argument."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

fault = sys.argv[1]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(rank if fault == "seeds" else 0)
generator = torch.Generator().manual_seed(7)
samples = 47 if fault in ("padding", "drop last") else 48
data = TensorDataset(
    torch.randn(samples, 1, 4, 4, generator=generator),
    torch.randint(3, (samples,), generator=generator),
)
layers = [torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)]
if fault == "batch norm":
    layers.insert(2, torch.nn.BatchNorm1d(8))
if fault in ("dropout", "same dropout"):
    layers.insert(3, torch.nn.Dropout(0.5))
model = torch.nn.Sequential(*layers)
if fault == "same dropout":
    torch.manual_seed(3)
ddp = model if fault == "not wrapped" else DistributedDataParallel(model)

global_batch = 16
batch = global_batch if fault == "batch a worker" else global_batch // world
if fault == "no sampler":
    loader = DataLoader(data, batch, shuffle=False)
elif fault == "random sampler alone":
    sampler = RandomSampler(data) if world == 1 else DistributedSampler(data)
    loader = DataLoader(data, batch, sampler=sampler)
else:
    loader = DataLoader(
        data, batch, sampler=DistributedSampler(data), drop_last=fault == "drop last"
    )

lr = 0.1 * world if fault == "scaled lr" else 0.1
optimizer = torch.optim.SGD(ddp.parameters(), lr, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
accumulate = 4 // world if fault in ("accumulation", "right accumulation") else 1

step = 0
for epoch in range(3):
    if fault != "no set_epoch":
        loader.sampler.set_epoch(epoch) if hasattr(loader.sampler, "set_epoch") else None
    for images, labels in loader:
        optimizer.zero_grad()
        for part, answer in zip(images.chunk(accumulate), labels.chunk(accumulate), strict=True):
            loss = F.cross_entropy(ddp(part), answer, reduction="sum" if fault == "sum" else "mean")
            if fault == "right accumulation":
                loss = loss / accumulate
            loss.backward()
        optimizer.step()
        if fault == "scheduler":
            for _ in range(world):
                scheduler.step()
    if fault != "scheduler":
        scheduler.step()
dist.destroy_process_group()
