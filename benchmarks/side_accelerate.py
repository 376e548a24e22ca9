"""One side of the scaling benchmark: training with Hugging Face Accelerate, as its quick tour
teaches.
"""

from __future__ import annotations

from accelerate import Accelerator  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import nn
from torch.utils.data import DataLoader

from common import make_model
from meter import Job, Meter, parse_job
from side_ddp import make_dataset


def train(job: Job) -> None:
    accelerator = Accelerator(cpu=True)
    bare, bare_optimizer = make_model(job.model)
    batch = job.global_batch_size // accelerator.num_processes
    model, optimizer, loader = accelerator.prepare(
        bare, bare_optimizer, DataLoader(make_dataset(job), batch_size=batch, shuffle=True)
    )
    loss_fn = nn.CrossEntropyLoss()
    meter = Meter(job, accelerator.process_index)
    model.train()
    for _ in range(job.epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            meter.step(loss)
    accelerator.end_training()


if __name__ == "__main__":
    train(parse_job())
