"""One side of the comparisons of language models: nanoGPT's model and training program, written
anew.

nanoGPT (A. Karpathy, 2022) cannot be installed as a package. This program has what its published
code and settings have: a GPT-2 with learned positions, LayerNorm without biases, GELU and tied
weights; batches of blocks at random places of a file of 16-bit numbers; AdamW with weight decay for
matrices, clipping, a warm-up and a cosine; and DistributedDataParallel over Gloo under torchrun.
`torch.compile` is off, as its documentation says for a CPU.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpt_text import (
    BETAS,
    CLIP,
    LEARNING_RATE,
    MIN_LEARNING_RATE,
    SIZES,
    WARM_UP,
    WEIGHT_DECAY,
    Sizes,
    project_text,
)
from meter import Job, Meter, parse_job


class Layer(nn.Module):
    """Attention and an MLP of GPT-2."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.before_attention = nn.LayerNorm(width, bias=False)
        self.before_mlp = nn.LayerNorm(width, bias=False)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.joined = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, t, width) → (n, t, width)."""
        n, t, width = x.shape
        parts = self.attend(self.before_attention(x)).split(width, dim=2)
        q, k, v = (
            part.view(n, t, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).contiguous().view(n, t, width))
        y: torch.Tensor = x + self.narrow(F.gelu(self.widen(self.before_mlp(x))))
        return y


class NanoGPT(nn.Module):
    """The model: tokens (n, t) and targets (n, t) → the mean loss."""

    def __init__(self, vocabulary: int, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        self.head = nn.Linear(sizes.width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("joined.weight", "narrow.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * sizes.layers) if last else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS)


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
    """

    def __init__(self, text: bytes, folder: Path) -> None:
        self.known = sorted(set(text))
        self.table = np.zeros(256, dtype=np.uint16)
        self.table[self.known] = np.arange(len(self.known))
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


def train(job: Job) -> None:
    """Train as the job says, and tell the meter."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if size > 1 else 0
    sizes = SIZES[job.model]
    torch.manual_seed(1337 + rank)
    with tempfile.TemporaryDirectory() as folder:
        data = Characters(project_text(), Path(folder))
        bare = NanoGPT(len(data.known), sizes)
        model: nn.Module = DistributedDataParallel(bare) if size > 1 else bare
        optimizer = make_optimizer(bare)
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
    train(parse_job())
