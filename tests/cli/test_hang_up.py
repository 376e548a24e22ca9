"""A terminal that is closed, and Ctrl-backslash: the run is saved as after SIGTERM. A job under
nohup goes on.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
import torch
import lockstep

comm = lockstep.init("cpu")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))

class Slow(lockstep.callbacks.Callback):
    every_rank = True

    def on_train_step_end(self, trainer, result):
        if comm.rank == 0:
            print("step", result.step, flush=True)
        time.sleep(0.05)

callbacks = [Slow(), lockstep.callbacks.Checkpoints("1epoch")]
trainer = lockstep.Trainer(
    model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.CrossEntropyLoss(), 8, run_dir="run", callbacks=callbacks
)
trainer.fit(data, int(sys.argv[1]))
if comm.rank == 0:
    print("done", flush=True)
"""

PYTHON = [sys.executable]
RUN = [sys.executable, "-m", "lockstep", "run", "--quiet", "--no-prefix", "-np", "2"]
ELASTIC = [*RUN, "--elastic", "1:2"]


def start(folder: Path, command: list[str], epochs: int) -> tuple[int, int]:
    """Start the program in a terminal of its own; returns (process, the terminal's other end)."""
    (folder / "train.py").write_text(PROGRAM)
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        # ignored where a shell runs the tests in the background, or nohup does
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_PROGRESS": "off"}
        os.execve(command[0], [*command, "train.py", str(epochs)], environment)
    return process, terminal


def read_until(terminal: int, text: bytes) -> bytes:
    """Return what the terminal shows until `text`, or until the program has ended."""
    shown = b""
    while text not in shown:
        try:
            more = os.read(terminal, 1 << 16)
        except OSError:  # Linux says so when the other end is closed
            break
        if not more:
            break
        shown += more
    return shown


def exit_code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def checkpoints(folder: Path) -> list[str]:
    return [path.name for path in (folder / "run" / "checkpoints").iterdir()]


@pytest.mark.parametrize(
    ("command", "code"),
    [(PYTHON, 129), (RUN, 143), (ELASTIC, 143)],
    ids=["python", "run", "elastic"],
)
def test_a_run_whose_terminal_is_closed_is_saved(
    tmp_path: Path, command: list[str], code: int
) -> None:
    process, terminal = start(tmp_path, command, 1000)
    shown = read_until(terminal, b"step 3")
    os.close(terminal)
    assert exit_code(process) == code, shown
    assert len(checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("command", [RUN, ELASTIC], ids=["run", "elastic"])
def test_sigquit_to_a_launcher_saves_the_run(tmp_path: Path, command: list[str]) -> None:
    process, terminal = start(tmp_path, command, 1000)
    shown = read_until(terminal, b"step 3")
    os.kill(process, signal.SIGQUIT)
    shown += read_until(terminal, b"\0")
    os.close(terminal)
    assert exit_code(process) == 143, shown
    assert b"stopped by SIGTERM" in shown and b"Resume with: lockstep run --resume run" in shown
    assert len(checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("command", [PYTHON, RUN], ids=["python", "run"])
def test_a_job_under_nohup_goes_on(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_PROGRESS": "off"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(
        ["nohup", *command, "train.py", "3"], cwd=tmp_path, env=environment, text=True, **streams
    ) as job:
        assert job.stdout is not None
        shown = ""
        for line in job.stdout:
            shown += line
            if line == "step 3\n":
                job.send_signal(signal.SIGHUP)
    assert job.returncode == 0 and "done" in shown, shown
