"""Trains in an elastic job whose rank 1 kills itself in step 5, and is replaced when the others have
trained. Arguments: the device, and a file for the result.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import toy_device

DEVICE, RESULT = sys.argv[1], Path(sys.argv[2])


class Dies(lockstep.callbacks.Callback):
    every_rank = True

    def on_train_step_start(self, trainer: Any, batch: Any) -> None:
        if trainer.step.steps_done == 5 and trainer.comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


toy_device.register()
comm = lockstep.init(DEVICE)
replaces = getattr(comm, "is_joining", False)
while replaces and not RESULT.exists():
    time.sleep(0.01)
draws = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=draws)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
trainer = lockstep.Trainer(
    model,
    optimizer,
    nn.CrossEntropyLoss(),
    16,
    virtual_workers=4,
    callbacks=[Dies()] if comm.size > 1 else [],
)
trainer.fit(TensorDataset(x, (x.sum(1) > 0).long()), 2)
if comm.rank == 0 and not replaces:
    RESULT.write_text(
        f"{comm.size} worker on {comm.device.type}: {lockstep.fingerprint(model, optimizer)}"
    )
