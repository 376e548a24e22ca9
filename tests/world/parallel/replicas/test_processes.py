"""Several processes, each with several devices, give the answer of one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.training.trainer import Trainer
from support.pool import Pool


class Branches(nn.Module):
    """One of its layers takes no part in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.never = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(6, 4)
        self.last = nn.Linear(16, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        output: torch.Tensor = self.last(self.norm(self.first(inputs)).relu())
        return output


def train(devices: list[str] | None) -> tuple[list[Any], dict[str, torch.Tensor]]:
    lockstep.init("cpu")
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 4, (50,), generator=generator)
    dataset = TensorDataset(
        torch.randn(50, 6, generator=generator).double() + labels[:, None], labels
    )
    torch.manual_seed(0)
    model = Branches().double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    chosen: dict[str, Any] = {"strategy": "replicas", "devices": devices} if devices else {}
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), 16, callbacks=[], **chosen)
    rows = trainer.fit(dataset, 2, validate=dataset)
    found = [[row["train_loss"], row["val_loss"], row["val_accuracy"]] for row in rows]
    return found, {name: value.clone() for name, value in model.state_dict().items()}


def test_processes_with_several_devices_each(pool: Pool) -> None:
    # the last batch of an epoch has 2 samples: one for each process
    results = pool.run(train, ["cpu"] * 3, workers=2)
    alone = pool.run(train, None, workers=1)[0]
    for found in results:
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
