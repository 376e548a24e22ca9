"""A program of Accelerate, and faults that are common in such programs: the first argument."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

fault = sys.argv[1]

accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    step_scheduler_with_optimizer=fault in ("scheduler", "growing batch"),
    dataloader_config=DataLoaderConfiguration(
        use_seedable_sampler=fault != "default sampler", split_batches=fault == "split batches"
    ),
)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(7)
data = TensorDataset(
    torch.randn(96, 16, generator=generator), torch.randint(3, (96,), generator=generator)
)
layers = [torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)]
if fault == "dropout":
    layers.insert(1, torch.nn.Dropout(0.2))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 40))
# Accelerate's batches are those of each worker, and grow the global batch unless they are divided
divided = fault in ("right", "scheduler", "sum", "dropout")
loader = DataLoader(data, 8 // accelerator.num_processes if divided else 8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if fault in ("scheduler", "growing batch"):
    scheduler = accelerator.prepare(scheduler)

for _epoch in range(2):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(
                model(inputs), labels, reduction="sum" if fault == "sum" else "mean"
            )
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1000.0)
            optimizer.step()
            if accelerator.sync_gradients or fault in ("scheduler", "growing batch"):
                scheduler.step()
            optimizer.zero_grad()
