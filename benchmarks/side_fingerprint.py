"""Trains LeNet with virtual workers for `same_fingerprint.py`, and prints what it has become: under
any launcher.

python side_fingerprint.py STEPS          as a worker, or alone
python side_fingerprint.py STEPS ray      with two workers, started by an actor of Ray
"""

from __future__ import annotations

import json
import sys

import torch

import lockstep
from common import load_images

VIRTUAL_WORKERS = 8
BATCH = 64


def train(steps: int) -> dict[str, object]:
    """Train, and return the fingerprint and this worker's place; equal on all ranks but for the
    rank.
    """
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    images = load_images(BATCH * steps)
    model = torch.nn.Sequential(lockstep.models.lenet(), torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = lockstep.Trainer(
        model,
        optimizer,
        torch.nn.CrossEntropyLoss(),
        global_batch_size=BATCH,
        virtual_workers=VIRTUAL_WORKERS,
    )
    trainer.fit(images, epochs=1)
    world = comm.world
    return {
        "fingerprint": lockstep.fingerprint(model, optimizer),
        "rank": world.rank,
        "workers": world.world_size,
        "hosts": world.nodes,
        "launcher": world.source,
    }


def main() -> None:
    """Run as a worker, or start workers on Ray."""
    steps = int(sys.argv[1])
    if sys.argv[2:] == ["ray"]:
        import importlib

        found = importlib.import_module("lockstep.ray").launch(train, steps, workers=2)
        found["launcher"] = "ray"
    else:
        found = train(steps)
    if found["rank"] == 0:
        print("result " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
