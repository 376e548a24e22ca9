"""A signal to every process of a job, whatever group it is in, as Slurm sends it: the run is saved,
or begins anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

PROGRAM = """
import sys, time
import torch
import lockstep

comm = lockstep.init("cpu")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))

class Slow(lockstep.callbacks.Callback):
    def on_train_step_end(self, trainer, result):
        if comm.rank == 0:
            print("step", result.step, flush=True)
        time.sleep(0.05)

callbacks = [Slow(), lockstep.callbacks.Checkpoints("1epoch")]
trainer = lockstep.Trainer(
    model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.CrossEntropyLoss(), 8, run_dir="run", callbacks=callbacks,
    num_workers=1,
)
trainer.fit(data, 1000)
"""


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "run",
        "-np",
        "2",
        "--no-prefix",
        *options,
        "train.py",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_PROGRESS": "off"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, text=True, **output
    )


def signal_all(launcher: subprocess.Popen[str]) -> None:
    processes = [
        *psutil.Process(launcher.pid).children(recursive=True),
        psutil.Process(launcher.pid),
    ]
    for process in processes:
        process.send_signal(signal.SIGTERM)


def test_a_training_with_loader_processes_is_saved(tmp_path: Path) -> None:
    launcher = start(tmp_path, "--quiet")
    assert launcher.stdout is not None
    with launcher:
        for line in launcher.stdout:
            if line == "step 3\n":
                break
        signal_all(launcher)
        rest = launcher.stdout.read()
    assert launcher.returncode == 143, rest
    # the launcher's own SIGTERM may reach a worker when it has saved already, and end it before it
    # says so
    assert "stopped by SIGTERM" in rest and "Resume with: lockstep run --resume run" in rest
    assert "DataLoader worker" not in rest


def test_a_job_that_is_starting_ends_as_by_the_signal(tmp_path: Path) -> None:
    """The fork server, which reports how workers end, survives it also while it loads PyTorch."""
    launcher = start(tmp_path)
    with launcher:
        while (
            len(psutil.Process(launcher.pid).children()) < 2
        ):  # the resource tracker, and the fork server
            assert launcher.poll() is None
        assert launcher.stdout is not None and launcher.stdout.readline().startswith(
            "lockstep run: 2 workers"
        )
        signal_all(launcher)
        rest = launcher.stdout.read()
    # the launcher is ended by the signal itself before it collects signals; a shell shows 143 for
    # both
    assert launcher.returncode in (143, -signal.SIGTERM), rest
    assert "255" not in rest
