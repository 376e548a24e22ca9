"""Draws pictures for the documentation: the screen of a training, of a report on a desync, of what
"Prove it" shows, and a run's curve.png.

Each command runs in a terminal of tmux, whose screen becomes an SVG file in docs/figures/. Needs
tmux and rich.

    python benchmarks/pictures.py            # all, in about a minute
    python benchmarks/pictures.py training   # one of them
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import DOCS

TRAIN = """
import torch
import lockstep

comm = lockstep.init()
torch.manual_seed(0)
train, test = lockstep.data.digits()
model = lockstep.models.lenet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
trainer = lockstep.Trainer(model, optimizer, torch.nn.CrossEntropyLoss(), 64, run_dir="runs/digits")
trainer.fit(train, epochs=5, validate=test)
"""

DESYNC = """
import torch
import torch.distributed as dist

def mean(values):
    dist.all_reduce(values)
    return values / dist.get_world_size()

dist.init_process_group("shm")
for step in range(100):
    if dist.get_rank() == 1 and step == 7:
        continue  # a batch that only this rank skips
    mean(torch.ones(4))
dist.barrier()
"""


DAMAGED = """
import os

import torch

import lockstep

lockstep.init()
torch.manual_seed(0)
digits, _ = lockstep.data.digits()
images, labels = digits.collated_batch(list(range(len(digits))))
if "DAMAGED" in os.environ:
    images[int(os.environ["DAMAGED"])] *= 1000
model = lockstep.models.lenet()
trainer = lockstep.Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    torch.nn.CrossEntropyLoss(),
    global_batch_size=48,
    virtual_workers=6,
    run_dir=os.environ.get("RUN", "runs/a"),
    callbacks=[lockstep.callbacks.Checkpoints("10steps")],
    on_spike=os.environ.get("ON_SPIKE"),
)
trainer.fit(torch.utils.data.TensorDataset(images, labels), epochs=1)
"""

FAULTY = """
import torch

import lockstep

comm = lockstep.init()
torch.manual_seed(0)
digits, _ = lockstep.data.digits()
model = lockstep.models.lenet()

def flip(gradient):
    if comm.rank == 1 and trainer.step.steps_done >= 7:  # its chip is defective from here on
        gradient = gradient.clone()
        gradient.view(torch.int32)[0, 0] ^= 1 << 22
    return gradient

model[-1].weight.register_hook(flip)
trainer = lockstep.Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    torch.nn.CrossEntropyLoss(),
    global_batch_size=48,
    virtual_workers=6,
    cross_check=4,
    callbacks=[],
)
trainer.fit(digits, epochs=1)
"""

DAMAGED_SAMPLE = 797  # which step 20 uses

MAKE_HEALTHY = "RUN=runs/a python train.py"
MAKE_DAMAGED = f"RUN=runs/b DAMAGED={DAMAGED_SAMPLE} python train.py"


@dataclass(frozen=True)
class Picture:
    """A terminal after a command.

    Attributes:
        name: of the file, and on the command line.
        program: what is in train.py.
        command: what is typed.
        ready: whether a screen's text is the one to draw.
        rows: of the terminal.
        file: of the program's run, which is the picture instead of the screen; "" for the screen.
        before: a command that comes before, and is not shown; "" for none.
    """

    name: str
    program: str
    command: str
    ready: Callable[[str], bool]
    rows: int
    file: str = ""
    before: str = ""

    @property
    def path(self) -> Path:
        """Where the picture is in the documentation."""
        return (
            DOCS / "figures" / (Path(self.file).name if self.file else f"terminal_{self.name}.svg")
        )


def _in_epoch(number: int) -> Callable[[str], bool]:
    return lambda text: bool(re.search(rf"epoch {number}/5 .*[1-9]\d+/\d+", text))


PICTURES = (
    Picture("training", TRAIN, "lockstep run -np 2 train.py", _in_epoch(4), 12),
    Picture("desync", DESYNC, "lockstep run -np 2 train.py", lambda text: "Written to" in text, 34),
    Picture(
        "curve",
        TRAIN,
        "lockstep run -np 2 train.py; echo over",
        lambda text: "over" in text,
        30,
        "runs/digits/curve.png",
    ),
    Picture(
        "blame",
        DAMAGED,
        "lockstep blame runs/b",
        lambda text: "To leave it out" in text,
        10,
        before=MAKE_DAMAGED,
    ),
    Picture(
        "spike",
        DAMAGED,
        f"RUN=runs/c DAMAGED={DAMAGED_SAMPLE} ON_SPIKE=skip lockstep run -np 2 train.py; "
        "lockstep ledger runs/c --steps 18:23",
        lambda text: "names the samples" in text,
        14,
    ),
    Picture(
        "diff",
        DAMAGED,
        "lockstep diff runs/a runs/b",
        lambda text: "first difference in" in text,
        9,
        before=f"{MAKE_HEALTHY}; {MAKE_DAMAGED}",
    ),
    Picture(
        "cross_check",
        FAULTY,
        "lockstep run -np 3 train.py",
        lambda text: "error:" in text and text.rstrip().endswith("$"),
        8,
    ),
)
_DEADLINE_S = 300.0  # on a busy machine as well


def screen(picture: Picture, columns: int = 100) -> str:
    """Return the screen, with the escape sequences of its colours; copies the picture's file, if it
    has one.
    """
    session = f"picture-{picture.name}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(picture.program)
        path = f"{Path(sys.executable).parent}:$PATH"
        shell = f"cd {folder}; PS1='$ ' PATH={path} OMP_NUM_THREADS=1 exec bash --norc"
        size = ["-x", str(columns), "-y", str(picture.rows)]
        subprocess.run(["tmux", "new-session", "-d", "-s", session, *size, shell], check=True)
        try:
            before = f"({picture.before}) > /dev/null 2>&1; " if picture.before else ""
            typed = f"{before}clear; {picture.command}"
            subprocess.run(["tmux", "send-keys", "-t", session, typed, "Enter"], check=True)
            deadline = time.monotonic() + _DEADLINE_S
            while time.monotonic() < deadline:
                shown = _capture(session)
                if picture.ready(re.sub(r"\x1b\[[\d;]*m", "", shown)):
                    if picture.file:
                        shutil.copy(Path(folder, picture.file), picture.path)
                    return shown
                time.sleep(0.05)
            raise SystemExit(
                f"{picture.command} did not show what was expected:\n{_capture(session)}"
            )
        finally:
            subprocess.run(["tmux", "kill-session", "-t", session], check=True)


def _capture(session: str) -> str:
    command = ["tmux", "capture-pane", "-p", "-e", "-t", session]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip()


def draw(picture: Picture, columns: int = 100) -> None:
    """Write the picture."""
    from rich.console import Console
    from rich.text import Text

    lines = [
        f"$ {picture.command}",
        *screen(picture, columns).splitlines(),
        "",  # below it there is room for underscores
    ]  # what was typed has been cleared
    if picture.file:
        return
    console = Console(record=True, width=columns, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(lines)))
    svg = console.export_svg(title=picture.command, unique_id=picture.name)
    svg = re.sub(
        r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL
    )  # which would load fonts from another site
    picture.path.write_text(svg)


def main() -> None:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [picture.name for picture in PICTURES]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{' or '.join(known)}; all if none"
    )
    names = parser.parse_args().names
    if unknown := set(names) - set(known):
        parser.error(f"expected {' or '.join(known)}, got {', '.join(sorted(unknown))}")
    if shutil.which("tmux") is None:
        raise SystemExit("tmux is not installed")
    for picture in PICTURES:
        if not names or picture.name in names:
            draw(picture)
            print(f"wrote {picture.path}")


if __name__ == "__main__":
    main()
