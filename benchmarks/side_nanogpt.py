"""One side of the comparisons of language models: nanoGPT's training program, written anew, with
its own model or Lockstep's.

This program has what nanoGPT's published code and settings have: batches of blocks at random places
of a file of 16-bit numbers; clipping, a warm-up and a cosine; and DistributedDataParallel over Gloo
under torchrun. `torch.compile` is off, as its documentation says for a CPU.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpt_models import GPTJob, WithLoss, build, known_bytes
from gpt_text import CLIP, LEARNING_RATE, MIN_LEARNING_RATE, SIZES, WARM_UP, project_text
from meter import Meter, parse_as


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to a tenth."""
    if step < WARM_UP:
        return LEARNING_RATE * (step + 1) / (WARM_UP + 1)
    done = min(1.0, (step - WARM_UP) / max(1, steps - WARM_UP))
    return MIN_LEARNING_RATE + 0.5 * (1 + math.cos(math.pi * done)) * (
        LEARNING_RATE - MIN_LEARNING_RATE
    )


class Characters:
    """A text as numbers of its characters, in a file, as nanoGPT prepares it.

    Args:
        text: ASCII.
        folder: where to put the file.
        known: the characters that have a number, in order.
    """

    def __init__(self, text: bytes, folder: Path, known: bytes) -> None:
        self.table = np.zeros(256, dtype=np.uint16)
        self.table[list(known)] = np.arange(len(known))
        self._path = folder / "train.bin"
        self.table[np.frombuffer(text, dtype=np.uint8)].tofile(self._path)

    def batch(self, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks at random places, and what follows."""
        data = np.memmap(
            self._path, dtype=np.uint16, mode="r"
        )  # anew each time, as nanoGPT does against a leak
        places = torch.randint(len(data) - context, (size,)).tolist()
        inputs = torch.stack(
            [torch.from_numpy(data[i : i + context].astype(np.int64)) for i in places]
        )
        targets = torch.stack(
            [torch.from_numpy(data[i + 1 : i + 1 + context].astype(np.int64)) for i in places]
        )
        return inputs, targets


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """One update; returns the loss."""
    loss: torch.Tensor = model(*batch)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def train(job: GPTJob) -> None:
    """Train as the job says, and tell the meter."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if size > 1 else 0
    sizes = SIZES[job.model]
    torch.manual_seed(1337 + rank)
    with tempfile.TemporaryDirectory() as folder:
        known = known_bytes(job.owner, project_text())
        data = Characters(project_text(), Path(folder), known)
        bare, optimizer = build(job, len(known))
        model: nn.Module = WithLoss(bare)
        if size > 1:
            model = DistributedDataParallel(model)
        steps = job.epochs * job.steps
        meter = Meter(job, rank)
        batch = data.batch(job.global_batch_size // size, sizes.context)
        for number in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(number, steps)
            loss = step(model, optimizer, batch)
            batch = data.batch(job.global_batch_size // size, sizes.context)
            meter.step(loss)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    train(parse_as(GPTJob))
