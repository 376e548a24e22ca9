"""The commands that an interrupted program proposes work when they are pasted."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import _resume_hint
from lockstep.errors import InterruptedRunError
from support import warm_python

RUN = "-m lockstep run -q --no-prefix"
PROGRAM = """
import os, sys, time
import torch
import lockstep
from lockstep.training.callbacks import Callback, Checkpoints

class Slow(Callback):
    def on_train_step_end(self, trainer, result):
        print("step", result.step, flush=True)
        time.sleep(0.02 if os.environ.get("SLOW") else 0)
        if result.step == 9 and "CRASH" in os.environ:
            os.kill(os.getpid(), 9)

lockstep.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
callbacks = [Slow(), Checkpoints("1epoch")]
trainer = lockstep.Trainer(model, optimizer, torch.nn.CrossEntropyLoss(), 8, run_dir="runs/a b", callbacks=callbacks)
trainer.fit(data, int(sys.argv[1]))
if lockstep.init().rank == 0:
    print("done", trainer.step.steps_done, len(trainer.history), trainer.run_dir, flush=True)
"""


def pasted(
    proposed: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run what a shell would: variables, then ``lockstep`` or ``python`` and its words."""
    words = shlex.split(proposed)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment = {**environment, name: value}
    start = {"lockstep": ["-m", "lockstep"], sys.executable: []}[words.pop(0)]
    return warm_python.run([*start, *words], folder, environment, timeout=100.0)


@pytest.mark.parametrize(
    "command",
    ["train.py 40", f"{RUN} -np 2 train.py 40", f"{RUN} --resume latest -np 1 train.py 40"],
    ids=["python", "lockstep run", "resumed before"],
)
def test_what_ctrl_c_proposes_resumes_the_run(tmp_path: Path, command: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {**os.environ, "SLOW": "1", "OMP_NUM_THREADS": "1"}
    with warm_python.popen(command.split(), tmp_path, environment) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line == "step 5\n")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    (line,) = errors.splitlines()
    assert process.returncode == 130, errors
    name = "lockstep run" if command.startswith(RUN) else "train.py"
    assert line.startswith(f"{name}: stopped by SIGINT after step ")
    proposed = line.partition(". Resume with: ")[2]
    resumed = pasted(proposed, tmp_path, {**environment, "SLOW": ""})
    assert resumed.returncode == 0, (proposed, resumed.stderr)
    assert "step 0\n" not in resumed.stdout
    assert resumed.stdout.endswith("done 160 40 runs/a b\n")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a b"]


def test_the_report_of_a_crash_proposes_what_resumes_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CRASH": "1"}
    with warm_python.popen(f"{RUN} -np 2 train.py 3".split(), tmp_path, environment) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 137 and "SIGKILL" in errors, errors
    proposed = errors.splitlines()[-1]
    assert (
        proposed == "Resume with: lockstep run --resume 'runs/a b' -q --no-prefix -np 2 train.py 3"
    )
    del environment["CRASH"]
    words = [*RUN.split(), "--resume", "runs/a b", "-np", "1", "train.py", "3"]
    with warm_python.popen(words, tmp_path, environment) as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "step 7\n" not in out and "step 8\n" in out and out.endswith("done 12 3 runs/a b\n")


@pytest.mark.parametrize(
    ("typed", "program_words", "sentence"),
    [
        ("train --lr 0.1", 0, ". Resume with: lockstep train --resume runs/a"),
        (
            "run -np 2 train.py --resume x",
            3,
            ". Resume with: lockstep run --resume runs/a -np 2 train.py --resume x",
        ),
        (
            "run --resume=old -np 2 train.py",
            1,
            ". Resume with: lockstep run --resume runs/a -np 2 train.py",
        ),
        ("run --resume old -m train", 1, ". Resume with: lockstep run --resume runs/a -m train"),
        (
            "horovodrun -np 2 python t.py",
            0,
            ". Resume with: LOCKSTEP_RESUME=runs/a lockstep horovodrun -np 2 python t.py",
        ),
        (
            "run -x TOKEN=secret train.py",
            1,
            ". To resume, start it again with the environment variable LOCKSTEP_RESUME=runs/a",
        ),
    ],
)
def test_what_is_proposed_exists_and_shows_no_secret(
    typed: str, program_words: int, sentence: str
) -> None:
    error = InterruptedRunError("stopped", 2, "runs/a/checkpoints/step-0000000003")
    assert _resume_hint(error, typed.split(), program_words) == sentence
    assert _resume_hint(InterruptedRunError("stopped", 2), typed.split(), program_words) == ""
