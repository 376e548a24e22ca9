"""A program that trains in an elastic job, and what it leaves behind."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["fingerprint", "rows", "write_program"]

_PROGRAM = """
import faulthandler, os, signal, socket, time, torch, lockstep
faulthandler.register(signal.SIGUSR1, all_threads=True)
from lockstep.callbacks import CSVLog, Callback, Checkpoints
comm = lockstep.init("cpu")
print("pid", os.getpid(), "on", socket.gethostname(), flush=True)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,)))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
class Tells(Callback):
    every_rank = True
    def on_train_step_end(self, trainer, result):
        time.sleep(0.02)
        print("step", result.step, "of", comm.size, flush=True)
        if comm.rank == 1 and os.path.exists("raise"):
            raise ValueError("of the program")
    def on_row(self, trainer, row):
        if os.path.exists("enough"):
            trainer.stop("it is enough")
run_dir = RUN_DIR
trainer = lockstep.Trainer(
    model, torch.optim.AdamW(model.parameters()), torch.nn.CrossEntropyLoss(), 12, virtual_workers=VIRTUAL_WORKERS,
    run_dir=run_dir, callbacks=[Tells(), *([CSVLog(), Checkpoints()] if run_dir else [])],
)
trainer.fit(data, EPOCHS, validate=data)
if comm.rank == 0:
    print(
        "fingerprint", len(trainer.history), lockstep.fingerprint(model, trainer.optimizer),
        "of process", os.getpid(), flush=True,
    )
"""


def write_program(
    folder: Path, epochs: int, run_dir: Path | None, samples: int = 48, virtual_workers: int = 3
) -> Path:
    """Write the program into `folder`.

    A file ``enough`` in the folder ends it with the epoch in progress, and ``raise`` lets rank 1
    raise an error.

    Args:
        folder: of the program.
        epochs: that it trains, with a global batch of 12 samples.
        run_dir: its run folder, with metrics.csv and checkpoints; None for none.
        samples: of an epoch.
        virtual_workers: of the training.
    """
    program = folder / "program.py"
    text = _PROGRAM.replace("RUN_DIR", repr(None if run_dir is None else str(run_dir)))
    for name, value in (
        ("EPOCHS", epochs),
        ("SAMPLES", samples),
        ("VIRTUAL_WORKERS", virtual_workers),
    ):
        text = text.replace(name, str(value))
    program.write_text(text)
    return program


def fingerprint(text: str) -> tuple[str, str]:
    """Return the number of epochs, if it is told, and the fingerprint that a training has printed
    once.
    """
    found = re.findall(r"fingerprint (?:(\d{1,6}) )?([0-9a-f]{16,64})\b", text)
    assert len(found) == 1, text
    return found[0][0], found[0][1]


def rows(folder: Path) -> list[list[str]]:
    """Return the lines of metrics.csv in a run folder, without what depends on the clock."""
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    timed = [
        number for number, name in enumerate(lines[0]) if name in ("seconds", "samples_per_second")
    ]
    return [[value for number, value in enumerate(line) if number not in timed] for line in lines]
