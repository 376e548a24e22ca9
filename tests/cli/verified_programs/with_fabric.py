"""A program of Lightning Fabric, and faults that are common in such programs: the first argument."""

import os
import sys

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fault = sys.argv[1]

fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
fabric.launch()
fabric.seed_everything(0, verbose=False)
generator = torch.Generator().manual_seed(7)
data = TensorDataset(
    torch.randn(48, 3, 8, 8, generator=generator), torch.randint(3, (48,), generator=generator)
)
layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3)]
if fault == "batch norm":
    layers.insert(1, torch.nn.BatchNorm2d(4))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(
    model.parameters(), 0.05 * (fabric.world_size if fault == "scaled lr" else 1)
)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, 8, shuffle=True))

for _epoch in range(2):
    for number, (images, labels) in enumerate(loader):
        synced = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not synced or fault == "never synced"):
            loss = (
                F.cross_entropy(
                    model(images), labels, reduction="sum" if fault == "sum" else "mean"
                )
                / 2
            )
            fabric.backward(loss)
        if synced:
            optimizer.step()
            optimizer.zero_grad()
