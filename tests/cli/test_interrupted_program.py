"""A program without a file, as a notebook is one, that trains on launched workers and gets Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import checkpoint

PROGRAM = """
import time
import torch
import lockstep
from lockstep.training.callbacks import Callback

class Say(Callback):
    def on_step(self, trainer, result):
        if result.step == 3:
            print("training", flush=True)

def slow(output, target):
    if lockstep.init().rank == 0:
        print("evaluating", flush=True)
    time.sleep(0.05)  # 10,000 batches of this are minutes
    return torch.zeros(())

def train(evaluate):
    data = torch.utils.data.TensorDataset(torch.zeros(160_000, 4), torch.zeros(160_000, dtype=torch.long))
    few = torch.utils.data.Subset(data, range(160))
    model = torch.nn.Linear(4, 2)
    trainer = lockstep.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.CrossEntropyLoss(), 16,
        out="run", callbacks=[Say()], metrics={"slow": slow},
    )
    trainer.fit(few if evaluate else data, 10 if evaluate else 100_000, validate=data if evaluate else None)

lockstep.launch(train, EVALUATE, workers=2)
"""


@pytest.mark.parametrize("where", ["training", "evaluating"])
def test_it_saves_before_it_ends(tmp_path: Path, where: str) -> None:
    code = PROGRAM.replace("EVALUATE", str(where == "evaluating"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            while process.stdout.readline().strip() != where:
                assert process.poll() is None
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            _, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    said = re.search(r"InterruptedRunError: stopped by SIGINT after step (\d+) \(epoch 1 of \d+\); saved (\S+)", errors)
    assert said is not None, errors
    checkpoint.verify(tmp_path / said[2])
    assert int(said[1]) == (10 if where == "evaluating" else checkpoint.read(tmp_path / said[2]).step)
