"""A model cut by layers: each worker has some of them, and a batch goes through all workers in
parts.

Run it alone or with several workers; the losses are the same up to rounding:

    lockstep run -np 2 examples/pipeline.py
"""

from __future__ import annotations

import torch
from torch import nn

import lockstep

FEATURES = 32
WIDTH = 256
CLASSES = 8
BATCH = 96


def make_model() -> nn.Sequential:
    """The same on every worker; only the layers of its own stage stay in its memory."""
    torch.manual_seed(0)
    hidden = [
        layer
        for _ in range(5)
        for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
    ]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *hidden, nn.Linear(WIDTH, CLASSES))


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch `number`, the same on every worker: the class is where the input is largest among the
    first few.
    """
    inputs = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :CLASSES].argmax(1)


def main() -> None:
    """Train with as many stages as workers, and measure on samples that were not seen."""
    comm = lockstep.init()
    pipe = lockstep.pipeline(make_model(), schedule="1f1b")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    for number in range(60):
        loss = pipe.step(*samples(number), nn.CrossEntropyLoss())
        optimizer.step()
        if comm.rank == 0 and number % 20 == 19:
            print(f"step {number + 1}: loss {float(loss):.5f}")
    inputs, labels = samples(1000)
    right = (pipe.eval()(inputs).argmax(1) == labels.to(comm.device)).float().mean()
    held = comm.allgather_object(sum(p.nbytes for p in pipe.parameters()))
    whole = (
        pipe.state_dict()
    )  # every worker calls it; loads into make_model() and with any number of stages
    if comm.rank == 0:
        print(f"accuracy {float(right):.3f}")
        print("parameters, MB on each worker:", ", ".join(f"{n / 1e6:.2f}" for n in held))
        make_model().load_state_dict(whole)


if __name__ == "__main__":
    main()
