"""The script that the benchmark of predictions plans for: a Trainer with one of five models, on data in memory.

python benchmarks/side_plan.py MODEL GLOBAL_BATCH_SIZE
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import lockstep
from common import wide_mlp

TOKENS = 64


def main(name: str, batch: int) -> None:
    lockstep.init("cpu")
    torch.manual_seed(0)
    samples = 64 * batch
    if name == "gpt":
        text = torch.randint(0, 256, (samples, TOKENS + 1))
        data = torch.utils.data.TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        model: nn.Module = lockstep.models.gpt(context=TOKENS)
        loss = lockstep.models.next_token_loss
    else:
        data, _ = lockstep.data.synthetic(train=samples, test=batch)
        makers = {"lenet": lockstep.models.lenet, "resnet18": lockstep.models.resnet18, "mlp": wide_mlp}
        model = (makers | {"convnet": lockstep.models.convnet})[name]()
        loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    lockstep.Trainer(model, optimizer, loss, batch, callbacks=[]).fit(data, epochs=4)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
