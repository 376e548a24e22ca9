"""A program without a file, as a notebook is one, that trains on launched workers and gets
Ctrl-C.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from lockstep.checkpoint import folder
from support import warm_python

PROGRAM = """
import time
import torch
import lockstep
from lockstep.training.callbacks import Callback, Checkpoints

class Say(Callback):
    def on_train_step_end(self, trainer, result):
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
        run_dir="run", callbacks=[Say(), Checkpoints("0")], metrics={"slow": slow},
    )
    trainer.fit(few if evaluate else data, 10 if evaluate else 100_000, validate=data if evaluate else None)

lockstep.launch(train, EVALUATE, workers=2)
"""


@pytest.mark.parametrize("where", ["training", "evaluating"])
def test_it_saves_before_it_ends(tmp_path: Path, where: str) -> None:
    code = PROGRAM.replace("EVALUATE", str(where == "evaluating"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with warm_python.popen(["-c", code], tmp_path, environment, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            while process.stdout.readline().strip() != where:
                assert process.poll() is None
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            _, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    (line,) = errors.splitlines()
    said = re.fullmatch(
        r"python: stopped by SIGINT after step (\d+) \(epoch 1 of \d+\); saved (\S+)\. To resume, start it again with "
        r"the environment variable LOCKSTEP_RESUME=run",
        line,
    )
    assert said is not None, errors
    assert process.returncode == 130
    folder.verify(tmp_path / said[2])
    assert int(said[1]) == (10 if where == "evaluating" else folder.read(tmp_path / said[2]).step)
