"""Small training runs with virtual workers, and their fingerprints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.data.loader import Loader
from lockstep.models import build
from lockstep.parallel.fingerprints import fingerprint
from lockstep.training.step.train_step import TrainStep

__all__ = ["Augmented", "adamw", "busy", "momentum", "named", "pictures", "run", "runs"]

Make = Callable[[], nn.Module]


def pictures(n: int = 22, shape: tuple[int, ...] = (1, 28, 28)) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 10, (n,), generator=generator)
    return TensorDataset(
        torch.randn(n, *shape, generator=generator) + labels[:, None, None, None] / 5, labels
    )


class Augmented(Dataset[Any]):
    """Pictures that are moved and mirrored by draws of torch."""

    def __init__(self, n: int = 22) -> None:
        self.pictures = pictures(n)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        image, label = self.pictures[index]
        moved = image.roll(tuple(torch.randint(-2, 3, (2,)).tolist()), (1, 2))
        return (moved.flip(2) if torch.rand(()) < 0.5 else moved), label


class _Counting(nn.Module):
    """Keeps a running scale of its own in a buffer, puts another tensor in its place, and counts
    its calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean()
            self.calls += 1
        return x / self.scale


def busy() -> nn.Module:
    """Dropout, batch norm, a frozen layer, and buffers of its own."""
    body = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)
    )
    head = nn.Sequential(
        nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8, momentum=None), _Counting(), nn.Flatten()
    )
    model = nn.Sequential(body, head, nn.Dropout(0.2), nn.Linear(288, 10))
    model[3].bias.requires_grad_(False)
    return model


def named(name: str) -> Make:
    return lambda: build(name, 10, (3, 32, 32) if name == "resnet18" else (1, 28, 28))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def run(
    make: Make,
    *,
    data: Any = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
    virtual_workers: int | None = 8,
    global_batch_size: int = 12,
    epochs: int = 1,
    steps: int | None = None,
    num_workers: int = 0,
    loss_fn: Any = None,
    **options: Any,
) -> tuple[str, list[float]]:
    """(fingerprint of model and optimizer, loss of each step)."""
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = make()
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    step = TrainStep(
        model, made, loss_fn or F.cross_entropy, virtual_workers=virtual_workers, **options
    )
    loader = Loader(
        data or pictures(),
        global_batch_size,
        virtual_workers=virtual_workers,
        num_workers=num_workers,
        comm=comm,
    )
    losses: list[float] = []
    try:
        for epoch in range(epochs):
            for batch in loader.epoch(epoch):
                losses.append(float(step(batch)))
                if len(losses) == steps:
                    break
    finally:
        loader.close()
    return fingerprint(model, made), losses


def runs(several: list[dict[str, Any]]) -> list[tuple[str, list[float]]]:
    """`run` for each of `several` sets of arguments."""
    return [run(**arguments) for arguments in several]
