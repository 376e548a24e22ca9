"""An elastic job with two trainings: what was made before the workers changed in the other one is
used again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support import warm_python
from support.elastic_program import fingerprint

# The second training ends when a worker was lost in it, and another one has joined it. That one has
# made its models with other values than rank 0 has given to all.
PROGRAM = """
import os, signal, sys, torch, lockstep
from lockstep.callbacks import Callback
comm = lockstep.init("cpu")
kind, lost, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
torch.manual_seed(int(os.path.exists("killed")))

def make_model():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters())

class Counts(Callback):
    steps = 0
    def on_train_step_end(self, trainer, result):
        self.steps += 1
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

class Changes(Callback):
    every_rank = True
    def on_train_step_end(self, trainer, result):
        if workers > 1 and result.step == 1 and comm.rank == lost and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.size == workers and result.step > 1:
            trainer.stop("the workers have changed")

loss_fn = torch.nn.CrossEntropyLoss()
model, optimizer = make_model()
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
counts, seen = Counts(), {"losses": []}
if kind.startswith("trainer"):
    first = lockstep.Trainer(model, optimizer, loss_fn, 12, virtual_workers=3, scheduler=scheduler, callbacks=[counts])
elif kind in ("steps", "step"):
    first = lockstep.TrainStep(model, optimizer, loss_fn, virtual_workers=3, scheduler=scheduler)
    loader = lockstep.Loader(data, 12, virtual_workers=3)
else:
    model, optimizer, scheduler, loader = lockstep.prepare(
        model, optimizer, scheduler, torch.utils.data.DataLoader(data, 12, shuffle=True), virtual_workers=3,
        state={"seen": seen},
    )

def train(epochs):
    if kind.startswith("trainer"):
        if kind == "trainer, evaluated" and epochs == 2:
            seen["losses"].append(first.evaluate(data))
        first.fit(data, epochs)
        seen["losses"] = [*seen["losses"][-1:], *(row["train_loss"] for row in first.history)]
    elif kind == "step" and epochs == 2:
        for epoch in range(2):
            for batch in loader.epoch(epoch):
                seen["losses"].append(first(batch).item())
    elif kind == "steps":
        for batch in lockstep.elastic.steps(loader, first, epochs, state={"seen": seen}):
            seen["losses"].append(first(batch).item())
    elif kind == "prepare" or (kind == "prepare, first used later" and epochs == 2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            mean = optimizer.step(loss=loss)
            scheduler.step()
            if optimizer.stepped:
                seen["losses"].append(float(mean))

train(1)
other_model, other_optimizer = make_model()
lockstep.Trainer(other_model, other_optimizer, loss_fn, 12, virtual_workers=3, callbacks=[Changes()]).fit(data, 1000)
train(2)
print("rank", comm.rank, "seen", seen["losses"], scheduler.get_last_lr(), flush=True)
if comm.rank == 0:
    print("steps", counts.steps, "fingerprint", lockstep.fingerprint(model, optimizer), flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("trainer", 0),
        ("trainer, evaluated", 1),
        ("steps", 1),
        ("step", 0),
        ("prepare", 0),
        ("prepare, first used later", 1),
    ],
)
def test_a_training_follows_the_workers_that_have_changed_in_another_one(
    kind: str, lost: int, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ["-m", "lockstep", "run", "--elastic", "1:3", "-np", 3, program, kind, lost, 3]
    job = warm_python.run(command, tmp_path, variables, timeout=90.0)
    assert job.returncode == 0, job.stderr
    assert f"rank {lost} was lost" in job.stderr and "joined; 3 workers go on" in job.stderr
    assert "started again" not in job.stderr
    (tmp_path / "killed").unlink()
    alone = warm_python.run([program, kind, lost, 1], tmp_path, variables, timeout=90.0)
    (of_one,) = seen(alone.stdout)
    assert seen(job.stdout) == [of_one] * 3
    assert fingerprint(job.stdout) == fingerprint(alone.stdout)
    assert re.findall(r"steps \d+", job.stdout) == re.findall(r"steps \d+", alone.stdout)


def seen(text: str) -> list[str]:
    """Return what each rank has printed of the losses."""
    return re.findall(r"seen (.*)", text)
