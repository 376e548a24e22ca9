"""The script that the benchmark of predictions plans for: a Trainer with one of five models, on
data in memory.

python benchmarks/side_plan.py MODEL GLOBAL_BATCH_SIZE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from common import keep_freed_memory, wide_mlp

TOKENS = 64

IMAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lockstep.models.lenet,
    "resnet18": lockstep.models.resnet18,
    "convnet": lockstep.models.convnet,
    "mlp": wide_mlp,
}


def text_data(samples: int) -> Dataset[tuple[Tensor, ...]]:
    """Blocks of random bytes, each with the bytes that follow."""
    text = torch.randint(0, 256, (samples, TOKENS + 1))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def main(name: str, batch: int) -> None:
    keep_freed_memory()
    lockstep.init("cpu")
    torch.manual_seed(0)
    samples = 64 * batch
    data: Dataset[tuple[Tensor, ...]] | Dataset[tuple[Tensor, Tensor]]
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Any]
    if name == "gpt":
        data = text_data(samples)
        model = lockstep.models.gpt(context=TOKENS)
        loss = lockstep.models.next_token_loss
    else:
        data, _ = lockstep.data.synthetic(train=samples, test=batch)
        model = IMAGE_MODELS[name]()
        loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    lockstep.Trainer(model, optimizer, loss, batch, callbacks=[]).fit(data, epochs=4)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
