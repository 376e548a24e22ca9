"""`lockstep verify SCRIPT`: what differs first at another number of workers, in a user's own
program.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from support.command import Here

BEGINNING = """
import sys
import torch
import lockstep
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

comm = lockstep.init("cpu")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

TRAINER = """
trainer = lockstep.Trainer(model, optimizer, torch.nn.MSELoss(), 16, run_dir="run", callbacks=[])
trainer.fit(data, 3, validate=data)
print("this far a script does not come")
"""

DIVIDED_OPTIMIZER = TRAINER.replace("16,", "16, virtual_workers=4, shard_optimizer=True,")

SCHEDULE_BY_HAND = """
loader = DataLoader(data, batch_size=16)
model, prepared, loader = lockstep.prepare(model, optimizer, loader)
for x, y in loader:
    prepared.zero_grad()
    F.mse_loss(model(x), y).backward()
    prepared.step()
    optimizer.param_groups[0]["lr"] *= 1 - 0.1 * comm.size
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, size = comm.rank, comm.size
for step in range(8):
    x, y = (each[step * 8 : step * 8 + 8].tensor_split(size)[rank] for each in data.tensors)
    optimizer.zero_grad()
    F.mse_loss(model(x), y, reduction=sys.argv[1]).backward()
    optimizer.step()
"""


def verify(folder: Path, here: Here, program: str, *arguments: str) -> tuple[int, str]:
    (folder / "train.py").write_text(BEGINNING + program)
    ended = here("verify", "--workers", "1,2", "--steps", "3", folder / "train.py", *arguments)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, " ".join((ended.stdout + ended.stderr).split())


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        (TRAINER, "The same at every number of workers, up to rounding."),
        (DIVIDED_OPTIMIZER, "The same bits at every number of workers."),
    ],
    ids=["a whole optimizer", "one of which each worker has a part"],
)
def test_a_trainer_is_the_same_and_leaves_no_run(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch, program: str, verdict: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = verify(tmp_path, here, program)
    assert code == 0, said
    assert verdict in said
    assert "1 worker again 3 the same bits" in said and "this far" not in said
    assert not (tmp_path / "run").exists()


def test_a_hyperparameter_that_follows_the_number_of_workers(tmp_path: Path, here: Here) -> None:
    code, said = verify(tmp_path, here, SCHEDULE_BY_HAND)
    assert code == 1, said
    assert "lr at step 1 is 0.09 on 1 worker and 0.08 on 2 workers" in said


@pytest.mark.parametrize(("reduction", "code"), [("mean", 0), ("sum", 1)])
def test_a_script_of_ddp(tmp_path: Path, here: Here, reduction: str, code: int) -> None:
    ended, said = verify(tmp_path, here, DDP, reduction)
    assert ended == code, said
    if code:
        assert "Cause: gradient scale. The gradient at step 0 is 0.5 times as large" in said


def test_ranks_that_train_apart(tmp_path: Path, here: Here) -> None:
    code, said = verify(tmp_path, here, DDP.replace("model = Distr", "_ = Distr"), "mean")
    assert code == 1
    assert "On 2 workers, rank 1 has another weight than rank 0 before step 1" in said


def test_a_script_that_is_not_seeded(tmp_path: Path, here: Here) -> None:
    program = (
        "import time\ndata = TensorDataset(data.tensors[0] * (time.time() % 1 + 1), "
        "data.tensors[1])\n"
    )
    code, said = verify(tmp_path, here, DDP.replace("\nfrom", f"\n{program}from", 1), "mean")
    assert code == 1 and "Cause: seeds. Not the number of workers" in said


def test_a_script_that_fails_or_does_not_train(tmp_path: Path, here: Here) -> None:
    code, said = verify(tmp_path, here, "1 / 0\n")
    assert code == 1
    assert (
        f"train.py:{BEGINNING.count(chr(10)) + 1} failed: ZeroDivisionError: division by zero."
        in said
    )
    code, said = verify(tmp_path, here, "print('nothing to do')\n")
    assert code == 2
    assert "ended without a step" in said and "'nothing to do'" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "script: expected an existing Python file"),
        (["--model", "mlp", "train.py"], "--model: expected none with a script"),
        (["--steps", "0", "train.py"], "--steps: expected a whole number of at least 1"),
        (["-m"], "-m: expected the name of a module after it"),
    ],
)
def test_bad_input(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err
